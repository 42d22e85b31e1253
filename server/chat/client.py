"""Asks a dspark server over HTTP. Whatever goes wrong is a ChatError in words."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import httpx

Json = dict[str, Any]
_CONNECT_S = 10.0  # how long to wait for a connection; an answer may take any time
_BROKEN = "the connection broke before the answer had ended"


class ChatError(Exception):
    """The server cannot be asked, or has refused; the message says why and what would help."""


class Client:
    """One dspark server.

    Args:
        url: where it is, such as http://localhost:8000.
        api_key: sent with every request, if the server asks for one.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url.rstrip("/")
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=httpx.Timeout(None, connect=_CONNECT_S))

    def close(self) -> None:
        """Let the connection go."""
        self._http.close()

    def model(self) -> str:
        """The name of the served model; ChatError when it cannot be asked."""
        with self._words():
            response = self._http.get("/v1/models")
            _check(response)
            return str(response.json()["data"][0]["id"])

    def generate(self, body: Mapping[str, Any]) -> Generator[Json, None, None]:
        """The events of a streamed POST /generate; ChatError when it is refused, fails or breaks."""
        with self._words(), self._http.stream("POST", "/generate", json={**body, "stream": True}) as response:
            if response.is_error:
                response.read()
            _check(response)
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    event = cast(Json, json.loads(line.removeprefix("data: ")))
                    if "error" in event:
                        raise ChatError(str(event["error"]["message"]))
                    yield event
        raise ChatError(_BROKEN)

    @contextmanager
    def _words(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            message = f"nothing answers at {self.url} ({error}); start it with dspark-serve, or name another with --url"
            raise ChatError(message) from None
        except httpx.TransportError:
            raise ChatError(_BROKEN) from None
        except (ValueError, LookupError, TypeError):
            raise ChatError(f"what answers at {self.url} is no dspark server; name another with --url") from None


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = f"the server answered {response.status_code} {response.reason_phrase}"
    if response.status_code == httpx.codes.UNAUTHORIZED:
        message += "; give it with --api-key or in DSPARK_API_KEY"
    raise ChatError(message)
