"""Routes of the playground: the page at `/` and its files under `/playground/`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

PAGE = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# A model's text is never markup on this page; were it ever, nothing in it could run or call home.
_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asks every time and gets a 304: a new version shows at once
}


@dataclass(frozen=True)
class Asset:
    """A file of the page as it goes out."""

    content: bytes
    media_type: str
    etag: str

    def response(self, known: str | None) -> Response:
        """The file, or 304 where the browser knows it (`known`: its If-None-Match)."""
        headers = {**_HEADERS, "etag": self.etag}
        if known == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def load_assets() -> dict[str, Asset]:
    """The files beside this one, by name."""
    assets = {}
    for path in sorted(Path(__file__).parent.iterdir()):
        if media_type := _TYPES.get(path.suffix):
            content = path.read_bytes()
            assets[path.name] = Asset(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return assets


def playground_routes() -> APIRouter:
    """`/` and `/playground/NAME`; none of them needs a key, and none tells anything of the model."""
    router, assets = APIRouter(), load_assets()

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(http: Request) -> Response:
        return assets[PAGE].response(http.headers.get("if-none-match"))

    @router.api_route("/playground/{name}", methods=["GET", "HEAD"])
    async def asset(http: Request, name: str) -> Response:
        if name not in assets:
            raise HTTPException(404, "the playground has no such file")
        return assets[name].response(http.headers.get("if-none-match"))

    return router
