"""Who may ask, how much, and for how long: the key, the drain before the end, the size of a body, the time limit."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark_core.settings import quote
from server import deadline
from server.config import ServerConfig
from server.errors import error_response
from server.streaming import STOPPING

# Never refused for the lack of a key: what tells that the server lives, and the static page that asks for the key.
OPEN_PATHS = ("/", "/health", "/version")
OPEN_FOLDER = "/playground/"
# Answered while the server drains: what tells how far it is.
STATE_PATHS = ("/health", "/version", "/metrics")
_SCHEME = b"bearer "


def is_loopback(host: str | None) -> bool:
    """Whether a name or address can mean no other machine than this one."""
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


@dataclass
class Drain:
    """Whether the server is about to end, and how many of the requests that it took are still answered."""

    begun: bool = False
    running: int = 0


class Gate:
    """ASGI middleware that lets requests through, counted and limited, or answers why not."""

    def __init__(self, app: ASGIApp, config: ServerConfig, drain: Drain) -> None:
        self.app, self.drain = app, drain
        self.keys = [key.encode() for key in config.api_key]
        self.origins, self.loopback = config.cors_origins, is_loopback(config.host)
        self.max_body_mb, self.request_timeout = config.max_body_mb, config.request_timeout
        self.retry_after = max(config.drain_seconds, 1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if refusal := self._refusal(scope):
            await refusal(scope, receive, send)
            return
        deadline.begin(self.request_timeout)
        self.drain.running += 1
        try:
            await self.app(scope, self._limited(receive), send)
        finally:
            self.drain.running -= 1

    def _refusal(self, scope: Scope) -> Response | None:
        path: str = scope["path"]
        is_open = path in OPEN_PATHS or path.startswith(OPEN_FOLDER)
        if self.keys and not is_open and (complaint := self._complaint(scope)):
            return error_response(scope, complaint, 401, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
        if not self.keys and (complaint := self._cross_origin(scope)):
            return error_response(scope, complaint, 403, "cross_origin")
        if self.drain.begun and path not in STATE_PATHS:
            headers = {"Retry-After": str(self.retry_after), "Connection": "close"}
            return error_response(scope, f"{STOPPING}; ask another, or later", 503, "draining", headers)
        return None

    def _complaint(self, scope: Scope) -> str | None:
        """What is wrong with the request's key."""
        expected = "expected the header 'Authorization: Bearer KEY' with a key of this server"
        given: Sequence[bytes] = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return f"found {'several keys' if given else 'no API key'}, {expected}"
        if given[0][: len(_SCHEME)].lower() != _SCHEME:
            return f"found another kind of authorization, {expected}"
        key = given[0][len(_SCHEME) :].strip()
        # All are compared, each in constant time: how long it takes tells nothing of them.
        matches = [hmac.compare_digest(key, known) for known in self.keys]
        if not any(matches):
            return f"the API key is not one of this server, {expected}"
        return None

    def _cross_origin(self, scope: Scope) -> str | None:
        """Why a page that a browser has open may not ask a server without keys: any page could, unseen by the user.

        A page of a name that was made to point at this machine calls itself one of ours; on a loopback address such
        names are known to be none.
        """
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get(b"origin")
        if origin is None or origin in self.origins or "*" in self.origins:
            return None
        ours = origin.partition("://")[2] == headers.get(b"host")
        if ours and (not self.loopback or is_loopback(urlsplit(origin).hostname)):
            return None
        expected = "expected one of --cors-origins, or a server with --api-key"
        return f"the page {quote(origin)} is not of this server, {expected}"

    def _limited(self, receive: Receive) -> Receive:
        """The request's channel: HTTPException once the body is longer than allowed, or is not whole in time."""
        size, whole = 0, False

        async def limited() -> Message:
            nonlocal size, whole
            if whole:  # what comes now only tells that the client went
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), deadline.remaining())
            except (TimeoutError, deadline.RequestTimeoutError):
                text = "the body did not arrive in the time the server allows (--request-timeout)"
                raise HTTPException(408, text, {"Connection": "close"}) from None
            size += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if size > self.max_body_mb * 2**20:
                raise HTTPException(413, f"the body is longer than {self.max_body_mb} MiB, the most that is read")
            return message

        return limited
