"""The HTTP application. Handlers are thin: parse, submit, answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from dspark_core import __version__
from server.access import Drain, Gate
from server.answers import answer
from server.async_engine import AsyncEngine, EngineDeadError
from server.config import ServerConfig
from server.errors import Faults, add_error_handlers, json_response
from server.generate import GenerateWriter
from server.generation import Generation, compile_grammar, open_streams
from server.linger import Linger
from server.logs import REQUEST_ID, RequestLog, note_prompt
from server.metrics import CONTENT_TYPE as METRICS_TYPE
from server.metrics import Metrics
from server.openai.routes import openai_routes
from server.playground.routes import playground_routes
from server.protocol import parse_generate


def create_app(engine: AsyncEngine, config: ServerConfig) -> FastAPI:
    """The application around an engine, which it starts and stops with itself."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(engine.stop)

    drain = Drain()
    app = FastAPI(
        title="dspark",
        lifespan=lifespan,
        openapi_url=None,
        redirect_slashes=False,  # behind a proxy the address would be a wrong one
        middleware=_middleware(config, drain),
    )
    app.state.drain = drain
    model = config.served_model_name or engine.info["target"].partition(" (")[0]
    routers = [_routes(engine, config, drain, model), openai_routes(engine, model), playground_routes()]
    for router in routers:
        app.include_router(router)
    app.state.endpoints = [told for router in routers for told in _endpoints(router)]
    add_error_handlers(app)
    return app


def _endpoints(router: APIRouter) -> list[str]:
    """Methods and paths, for who asks for others."""
    routes = [route for route in router.routes if isinstance(route, Route)]
    return [f"{method} {route.path}" for route in routes for method in sorted((route.methods or set()) - {"HEAD"})]


def _middleware(config: ServerConfig, drain: Drain) -> list[Middleware]:
    """What every request passes, outermost first. Preflights end before the gate: browsers send no key with them."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=config.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # clients send many of their own; nobody is let in by them
        expose_headers=[REQUEST_ID],
    )
    return [
        Middleware(Linger),
        Middleware(RequestLog, prompts=config.log_prompts),
        *([cors] if config.cors_origins else []),
        Middleware(Faults),
        Middleware(Gate, config, drain),
    ]


def _routes(engine: AsyncEngine, config: ServerConfig, drain: Drain, model: str) -> APIRouter:
    router = APIRouter()

    @router.post("/generate")
    async def generate(http: Request) -> Response:
        request = parse_generate(await http.body())
        note_prompt(http.scope, request.model_dump(include={"prompt", "prompt_ids", "messages"}, exclude_none=True))
        engine.check_queue(request.n)  # before any work
        prompt_ids = await asyncio.to_thread(request.prompt_tokens, engine.tokenizer)
        grammar = await compile_grammar(engine, request.grammar_source())
        jobs = [(prompt_ids, request.params(index, grammar)) for index in range(request.n)]
        writer = GenerateWriter(engine.tokenizer, len(prompt_ids), request.n)
        generation = Generation(open_streams(engine, jobs), writer, len(prompt_ids))
        return await answer(http, generation, stream=request.stream)

    @router.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        if not engine.healthy:
            raise EngineDeadError("the engine is not running")
        load = {"running": engine.num_running, "waiting": engine.num_waiting}
        if drain.begun:
            return json_response({"status": "draining", **load}, 503)
        return json_response({"status": "ok", **load})

    @router.get("/version")
    async def version() -> Response:
        draft = Path(config.ckpt).expanduser()
        name = draft.resolve().name if draft.is_dir() else config.ckpt  # a folder's place is nobody's business
        return json_response({"version": __version__, "target": model, "draft": name})

    metrics = Metrics(engine, model)

    @router.get("/metrics")
    async def series() -> Response:
        return Response(metrics.text(), media_type=METRICS_TYPE)

    return router
