"""`dspark-serve`: load a target and its draft, say what was loaded, serve it."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn

from dspark_core.errors import CheckpointError
from dspark_core.program import fail
from dspark_core.settings import Parser, UsageError, flag, public_fields
from dspark_core.sources import Layers, read_environment, read_flat_toml, unknown_variables, variable
from server import logs
from server.config import ServerConfig

if TYPE_CHECKING:
    from server.access import Drain

PROGRAM = "dspark-serve"
GROUPS = {
    "model": "what is served",
    "engine": "the engine's sizes",
    "http": "the HTTP server",
    "run": "checking and logging",
}
EPILOG = (
    "Every flag is also a variable (--max-num-seqs 8 is DSPARK_MAX_NUM_SEQS=8) and a key of the file "
    "(max_num_seqs = 8). A flag wins over the variable, the variable over the file, the file over the default."
)
CUT_S = 1  # seconds that requests which are cut at the end of the drain get to say so

log = logging.getLogger("server.cli")  # whether it is imported or run


class Server(uvicorn.Server):
    """uvicorn that goes on listening while running requests end, says 503 to new ones, and ends at any second signal.

    Args:
        config: around an application of `create_app`; its timeout_graceful_shutdown is how long they get, in seconds.
    """

    @property
    def drain(self) -> Drain:
        app: Any = self.config.app
        found: Drain = app.state.drain
        return found

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit, self.drain.begun = self.should_exit, True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.drain.begun = True
        await self._drain(self.config.timeout_graceful_shutdown or 0)
        self.config.timeout_graceful_shutdown = CUT_S
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves this out then, and the engine's thread would run on
            await self.lifespan.shutdown()

    async def _drain(self, seconds: float) -> None:
        """Wait for the requests that run; cut those that are left, which gives them the word to say so."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self.drain.running and not self.force_exit and loop.time() < end:
            await asyncio.sleep(0.02)
        if self.drain.running and not self.force_exit:
            log.warning("cut after %g s (--drain-seconds): %d running requests", seconds, self.drain.running)
            tasks = set(self.server_state.tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=CUT_S)


def build_parser() -> Parser:
    """One flag per field of ServerConfig, and --config."""
    parser = Parser(
        PROGRAM,
        description="Serve a language model and its DSpark draft over HTTP: the same text, sooner.",
        epilog=EPILOG,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    parser.add_settings(ServerConfig, GROUPS)
    return parser


def parse_config(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> ServerConfig:
    """Settings from flags, variables, and a file; UsageError names the place, what was found and what was expected."""
    names = ["config", *public_fields(ServerConfig)]
    given, around = build_parser().parse_known(argv, names), read_environment(names, environ)
    layers = Layers()
    file = (around | given).get("config")
    around.pop("config", None)
    given.pop("config", None)
    if file is not None:
        layers.add_file(Path(file), read_flat_toml(Path(file).expanduser(), names[1:]))
    layers.add(around, variable)
    layers.add(given, flag)
    return layers.build(ServerConfig)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket: a second server fails at once, and clients that come early wait in its queue."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def table(title: str, info: Mapping[str, str]) -> list[str]:
    """Lines of a block: the title, then names and values."""
    width = max(map(len, info))
    return [title, *(f"  {name:<{width}}  {value}" for name, value in info.items())]


def banner(info: Mapping[str, str], host: str, port: int, *, needs_key: bool = False) -> str:
    """What was loaded and how to talk to it, in one block."""
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, f"[{host}]" if ":" in host else host)
    body = """{"prompt": "The capital of France is", "max_tokens": 32, "stream": true}"""
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    address = f"http://{host}:{port}"
    try_it = [f"  {address}/ in a browser", f"  curl -N{key} {address}/generate -d '{body}'"]
    return "\n".join([*table("dspark serves", info), "try", *try_it])


def access(config: ServerConfig) -> str:
    """Who may ask, without the keys themselves."""
    if not config.api_key:
        return f"without a key, for everyone who reaches {config.host}"
    return f"with an API key, of which there {'are' if len(config.api_key) > 1 else 'is'} {len(config.api_key)}"


def serve(config: ServerConfig, sock: socket.socket) -> None:
    """Load the models and serve until a signal comes; CheckpointError when they cannot be loaded."""
    # Imported here: torch takes seconds, and --help or a typing error should not.
    from server.starting import answering

    with answering(sock):
        from server.app import create_app
        from server.async_engine import AsyncEngine
        from server.loader import load_engine

        engine = load_engine(config)
        app = create_app(AsyncEngine(engine, config.max_queue), config)
    info = {**engine.info, "access": access(config)}
    print(banner(info, *sock.getsockname()[:2], needs_key=bool(config.api_key)), flush=True)
    own_logs: dict[str, Any] = {"log_config": None, "access_log": False}
    Server(uvicorn.Config(app, **own_logs, ws="none", timeout_graceful_shutdown=config.drain_seconds)).run([sock])


def check(config: ServerConfig) -> None:
    """Load the models and say what would be served; CheckpointError when they cannot be loaded."""
    from server.loader import load_engine

    info = load_engine(config).info
    print("\n".join(table("dspark would serve", {**info, "access": access(config)})))


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
    logs.setup(config.log_level, config.log_format)
    for warning in unknown_variables(["config", *public_fields(ServerConfig)], os.environ):
        log.warning(warning)
    try:
        if config.check:
            check(config)
        else:
            return listen_and_serve(config)
    except CheckpointError as error:
        return fail(PROGRAM, str(error), 1)
    return 0


def listen_and_serve(config: ServerConfig) -> int:
    """Serve on the host and port of the settings; the exit code."""
    try:
        sock = listen(config.host, config.port)
    except OSError as error:
        where = f"{config.host} port {config.port}"
        reason = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
        return fail(PROGRAM, f"cannot listen on {where}: {reason}; choose others with --host and --port", 1)
    with sock:
        serve(config, sock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
