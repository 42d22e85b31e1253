"""An answer that is ready before its request was read reaches the client whole."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_S = 1.0  # what arrives later is not waited for


class Linger:
    """ASGI middleware, around all others: an answer ends when its request has been read, or LINGER_S later.

    A connection that is closed while bytes of the request are unread, or on their way, is reset, and the reset can
    overtake the answer: who was refused would see a broken connection and not why (RFC 9112, section 9.6). The
    answer itself is sent at once; only its end waits. (Not while the server ends: it has cut this request already.)
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unread, held = _has_body(scope), False

        async def watched() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def without_end(message: Message) -> None:
            nonlocal held
            if unread and message["type"] == "http.response.body" and not message.get("more_body", False):
                held, message = True, {**message, "more_body": True}
            await send(message)

        async def read() -> None:
            while unread:
                await watched()

        await self.app(scope, watched, without_end)
        if held:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                with suppress(TimeoutError, asyncio.CancelledError):  # cut meanwhile: the answer still gets its end
                    await asyncio.wait_for(read(), LINGER_S)
            await send({"type": "http.response.body"})


def _has_body(scope: Scope) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in scope.get("headers", ()))
