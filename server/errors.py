"""What goes wrong, as HTTP answers: one shape of error, a status, and headers that say what to do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark_core.errors import RequestError
from server.async_engine import EngineDeadError, QueueFullError
from server.deadline import RequestTimeoutError
from server.generation import GenerationError
from server.logs import CLIENT_CLOSED_REQUEST, note
from server.protocol import INTERNAL_ERROR, MODEL_NOT_FOUND, error_body, to_json
from server.streaming import STOPPING

_CODES = {404: "not_found", 405: "method_not_allowed", 408: "body_timeout", 413: "body_too_large"}
Headers = Mapping[str, str] | None

log = logging.getLogger(__name__)


def json_response(content: Mapping[str, Any], status: int = 200, headers: Headers = None) -> Response:
    """A JSON answer in the server's own encoding."""
    return Response(to_json(content), status, headers, media_type="application/json")


def error_response(scope: Scope, message: str, status: int, code: str | None, headers: Headers = None) -> Response:
    """An error that no field of the request is to blame for; the log has its code."""
    note(scope, error=code)
    return json_response(error_body(message, status, code), status, headers)


def add_error_handlers(app: FastAPI) -> None:
    """Answer what handlers raise."""
    app.add_exception_handler(RequestError, _bad_request)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(EngineDeadError, _engine_dead)
    app.add_exception_handler(QueueFullError, _queue_full)
    app.add_exception_handler(RequestTimeoutError, _too_late)
    app.add_exception_handler(GenerationError, _generation_failed)
    app.add_exception_handler(ClientDisconnect, _client_gone)


class Faults:
    """ASGI middleware: logs an error that nobody expected, and answers 500 if nothing has been sent."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception:
            log.exception("a request failed")
            if started:
                raise  # the server closes the connection, so that nobody takes the answer for whole
            await error_response(scope, INTERNAL_ERROR, 500, "internal_error")(scope, receive, send)
        except asyncio.CancelledError:  # the drain is over, and the body of this request is not even here
            if started:
                raise
            await error_response(scope, STOPPING, 503, "engine_unavailable")(scope, receive, send)


async def _bad_request(http: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    note(http.scope, error=error.code)
    status = 404 if error.code == MODEL_NOT_FOUND else 400
    return json_response(error_body(str(error), status, error.code, error.field), status)


async def _http_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code in (404, 405):
        asked, known = f"{http.method} {http.scope['path']}", ", ".join(http.app.state.endpoints)
        message = f"{asked}: {message}; expected one of {known}"
    return error_response(http.scope, message, error.status_code, _CODES.get(error.status_code), error.headers)


async def _engine_dead(http: Request, error: Exception) -> Response:
    return error_response(http.scope, str(error), 503, "engine_unavailable")


async def _queue_full(http: Request, error: Exception) -> Response:
    assert isinstance(error, QueueFullError)
    return error_response(http.scope, str(error), 503, "queue_full", {"Retry-After": str(error.retry_after)})


async def _too_late(http: Request, error: Exception) -> Response:
    return error_response(http.scope, str(error), 504, "timeout")


async def _generation_failed(http: Request, error: Exception) -> Response:
    return error_response(http.scope, str(error), 500, "internal_error")


async def _client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
