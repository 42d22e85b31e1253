"""`dspark-serve`: load a target and its draft, say what was loaded, serve it."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NoReturn

import uvicorn

from dspark_core.errors import CheckpointError
from dspark_core.program import LOG_FORMAT, fail
from dspark_core.settings import Parser, UsageError, build
from server.config import ServerConfig

PROGRAM = "dspark-serve"
GROUPS = {"model": "what is served", "engine": "the engine's sizes", "http": "the HTTP server"}
GRACE_S = 5  # seconds that running requests get to finish once a signal to stop has come


class Server(uvicorn.Server):
    """uvicorn that ends at once on any second signal, and lets the requests that it cuts say so."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves this out then, and the engine's thread would run on
            await self.lifespan.shutdown()
        elif self.server_state.tasks:  # cancelled at the end of the grace: they have something left to send
            await asyncio.wait(self.server_state.tasks, timeout=1)


def build_parser() -> Parser:
    """One flag per field of ServerConfig."""
    parser = Parser(
        PROGRAM, description="Serve a language model and its DSpark draft over HTTP: the same text, sooner."
    )
    parser.add_settings(ServerConfig, GROUPS)
    return parser


def parse_config(argv: Sequence[str]) -> ServerConfig:
    """Settings from the command line; UsageError names the flag, what was found and what was expected."""
    return build(ServerConfig, build_parser().parse_known(argv, ServerConfig.model_fields))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket: a second server fails at once, and clients that come early wait in its queue."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def banner(info: Mapping[str, str], host: str, port: int) -> str:
    """What was loaded and how to talk to it, in one block."""
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, f"[{host}]" if ":" in host else host)
    width = max(map(len, info))
    lines = [f"  {name:<{width}}  {value}" for name, value in info.items()]
    body = """{"prompt": "The capital of France is", "max_tokens": 32, "stream": true}"""
    return "\n".join(["dspark serves", *lines, "try", f"  curl -N http://{host}:{port}/generate -d '{body}'"])


def serve(config: ServerConfig, sock: socket.socket) -> None:
    """Load the models and serve until a signal comes; CheckpointError when they cannot be loaded."""
    # Imported here: torch takes seconds, and --help or a typing error should not.
    from server.app import create_app
    from server.async_engine import AsyncEngine
    from server.loader import load_engine

    engine = load_engine(config)
    print(banner(engine.info, *sock.getsockname()[:2]), flush=True)
    app = create_app(AsyncEngine(engine, config.max_queue), config)
    Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=GRACE_S)).run([sock])


def _stop(_: int, __: FrameType | None) -> NoReturn:
    # While loading this ends the process; while serving uvicorn handles the signal, then raises it once more.
    raise SystemExit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 stopped by a signal, 1 cannot start, 2 wrong usage."""
    try:
        config = parse_config(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        return fail(PROGRAM, str(error), 2)
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, _stop)
    logging.basicConfig(level=config.log_level.upper(), format=LOG_FORMAT)
    try:
        sock = listen(config.host, config.port)
    except OSError as error:
        where = f"{config.host} port {config.port}"
        reason = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
        return fail(PROGRAM, f"cannot listen on {where}: {reason}; choose others with --host and --port", 1)
    with sock:
        try:
            serve(config, sock)
        except CheckpointError as error:
            return fail(PROGRAM, str(error), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
