"""The HTTP application. Handlers are thin: parse, submit, answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, closing
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from dspark_core.errors import RequestError
from server.async_engine import AsyncEngine, EngineDeadError, QueueFullError, Stream
from server.config import ServerConfig
from server.metrics import CONTENT_TYPE as METRICS_TYPE
from server.metrics import Metrics
from server.protocol import INTERNAL_ERROR, GenerateRequest, error_body, parse_generate, to_json
from server.streaming import EventStream, Generation, GenerationError, reply, while_connected

MAX_BODY_BYTES = 8 * 2**20
_ENDPOINTS = "POST /generate, GET /health, GET /metrics, GET /v1/models"
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
Headers = Mapping[str, str] | None
# nginx's number for a client that went first; only the access log sees it.
_CLIENT_CLOSED_REQUEST = 499


def create_app(engine: AsyncEngine, config: ServerConfig) -> FastAPI:
    """The application around an engine, which it starts and stops with itself."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(engine.stop)

    app = FastAPI(title="dspark", lifespan=lifespan, openapi_url=None)
    app.include_router(_routes(engine, config))
    app.add_exception_handler(RequestError, _bad_request)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(EngineDeadError, _engine_dead)
    app.add_exception_handler(QueueFullError, _queue_full)
    app.add_exception_handler(GenerationError, _internal_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _internal_error)
    return app


def _routes(engine: AsyncEngine, config: ServerConfig) -> APIRouter:
    router = APIRouter()
    model = config.served_model_name or engine.info["target"].partition(" (")[0]
    created = int(time.time())

    @router.post("/generate")
    async def generate(http: Request) -> Response:
        request = parse_generate(await read_body(http))
        prompt_ids = await asyncio.to_thread(request.prompt_tokens, engine.tokenizer)
        generation = submit(engine, request, prompt_ids)
        if request.stream:
            return EventStream(generation)
        with closing(generation):
            return json_response(await while_connected(http.receive, reply(generation)))

    @router.get("/health")
    async def health() -> Response:
        if not engine.healthy:
            raise EngineDeadError("the engine is not running")
        return json_response({"status": "ok", "running": engine.num_running, "waiting": engine.num_waiting})

    metrics = Metrics(engine)

    @router.get("/metrics")
    async def series() -> Response:
        return Response(metrics.text(), media_type=METRICS_TYPE)

    @router.get("/v1/models")
    async def models() -> Response:
        card = {"id": model, "object": "model", "created": created, "owned_by": "dspark"}
        return json_response({"object": "list", "data": [{**card, "max_model_len": engine.max_model_len}]})

    return router


def submit(engine: AsyncEngine, request: GenerateRequest, prompt_ids: list[int]) -> Generation:
    """Hand every choice to the engine; when it refuses one, take back those before it."""
    engine.check_queue(request.n)
    streams: list[Stream] = []
    with ExitStack() as undo:
        for index in range(request.n):
            stream = engine.submit(prompt_ids, request.params(index))
            undo.callback(stream.abort)
            streams.append(stream)
        undo.pop_all()
    return Generation(streams, len(prompt_ids), engine.tokenizer)


async def read_body(http: Request) -> bytes:
    """The request's body; HTTPException 413 as soon as it is longer than the limit."""
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is longer than {MAX_BODY_BYTES} bytes, the most that is read")
    return bytes(body)


def json_response(content: Mapping[str, Any], status: int = 200, headers: Headers = None) -> Response:
    """A JSON answer in the server's own encoding."""
    return Response(to_json(content), status, headers, media_type="application/json")


async def _bad_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return json_response(error_body(str(error), 400, error.code, error.field), 400)


async def _http_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code in (404, 405):
        message = f"{http.method} {http.url.path}: {message}; expected one of {_ENDPOINTS}"
    content = error_body(message, error.status_code, _CODES.get(error.status_code))
    return json_response(content, error.status_code, error.headers)


async def _engine_dead(_: Request, error: Exception) -> Response:
    return json_response(error_body(str(error), 503, "engine_unavailable"), 503)


async def _queue_full(_: Request, error: Exception) -> Response:
    assert isinstance(error, QueueFullError)
    return json_response(error_body(str(error), 503, "queue_full"), 503, {"Retry-After": str(error.retry_after)})


async def _internal_error(_: Request, error: Exception) -> Response:
    message = str(error) if isinstance(error, GenerationError) else INTERNAL_ERROR
    return json_response(error_body(message, 500, "internal_error"), 500)


async def _client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
