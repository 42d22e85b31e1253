"""Answers while the models load: 503, so that nobody takes a port that listens for a server that is ready."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from server.linger import Linger
from server.logs import RequestLog

_RETRY_AFTER_S = 2
_THREAD = "starting"
# Written out, in the shape of server.protocol: to import that takes the seconds that this is there for.
_MESSAGE = "the models are still being loaded"
_ERROR = {"error": {"message": _MESSAGE, "type": "server_error", "param": None, "code": "loading"}}
_HEALTH = {"status": "loading"}

log = logging.getLogger("uvicorn.error")


async def loading(scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI application of that time: the same answer to every request."""
    content = _HEALTH if scope["path"] == "/health" else _ERROR
    headers = {"Retry-After": str(_RETRY_AFTER_S), "Connection": "close"}
    await JSONResponse(content, 503, headers)(scope, receive, send)


@contextmanager
def answering(sock: socket.socket) -> Iterator[None]:
    """Answer on a listening socket meanwhile, from a thread; it goes on listening afterwards, for the real server."""
    app = Linger(RequestLog(loading))
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([sock.dup()],), name=_THREAD, daemon=True)
    log.addFilter(_is_news)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
        log.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    # That this server begins and ends would read as if the real one did.
    return record.threadName != _THREAD or record.levelno >= logging.WARNING
