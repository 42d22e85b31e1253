"""A scripted engine behind the seam of server.async_engine, and ways to talk to the application around it.

Run as a module it is `dspark-serve` with that engine: `python -m tests.server.http_util --port 0`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

import httpx
import uvicorn
from fastapi import FastAPI

from dspark_core.errors import CheckpointError, RequestError
from server import cli, loader
from server.app import create_app
from server.async_engine import AsyncEngine, EngineDeadError
from server.config import ServerConfig
from server.request import Delta, RequestParams, Speculation, TokenLogprob

DEADLINE_S = 30.0
MAX_MODEL_LEN = 64
VOCAB_SIZE = 256
# What every `delta` says of speculation.
SPECULATION = {"rounds": 2, "drafted": 6, "verified": 5, "accepted": 3, "acceptance_length": 2.5}
Script = Callable[[list[int], RequestParams], AsyncIterator[Delta]]


def delta(text: str, ids: list[int] | None = None, **fields: Any) -> Delta:
    """A delta of some text; token ids default to its bytes."""
    values: dict[str, Any] = {
        "text": text,
        "token_ids": list(text.encode("utf-8")) if ids is None else ids,
        "logprobs": None,
        "finish_reason": None,
        "error": None,
        "completion_tokens": 0,
        "speculation": Speculation(rounds=2, drafted=6, verified=5, accepted=3),
    }
    return Delta(**(values | fields))


async def echo(prompt_ids: list[int], params: RequestParams) -> AsyncIterator[Delta]:
    """The prompt's own bytes, one a delta, then a last delta that ends the choice."""
    ids = prompt_ids[: params.max_tokens]
    for count, token_id in enumerate(ids):
        await asyncio.sleep(0)
        logprobs = None
        if params.logprobs is not None:
            top = tuple((other, -1.0 - other) for other in range(params.logprobs))
            logprobs = [TokenLogprob(token_id=token_id, logprob=-0.5, top=top)]
        yield delta(chr(token_id), [token_id], logprobs=logprobs, completion_tokens=count + 1)
    reason = "stop" if len(ids) == len(prompt_ids) else "length"
    yield delta("", finish_reason=reason, completion_tokens=len(ids))


async def endless(prompt_ids: list[int], params: RequestParams) -> AsyncIterator[Delta]:
    """Goes on for ever, as a model that never emits EOS."""
    while True:
        await asyncio.sleep(0.005)
        yield delta("x")


async def hundred(prompt_ids: list[int], params: RequestParams) -> AsyncIterator[Delta]:
    """A text that takes a while, and ends."""
    for _ in range(100):
        await asyncio.sleep(0.005)
        yield delta("x")
    yield delta("", finish_reason="length", completion_tokens=100)


async def silent(prompt_ids: list[int], params: RequestParams) -> AsyncIterator[Delta]:
    """A prefill that never ends: no delta ever comes."""
    await asyncio.Event().wait()
    yield delta("never")


def scripted(*deltas: Delta | Exception) -> Script:
    """Deltas in a row; an exception among them is raised."""

    async def script(prompt_ids: list[int], params: RequestParams) -> AsyncIterator[Delta]:
        for item in deltas:
            if isinstance(item, Exception):
                raise item
            yield item

    return script


class ByteTokenizer:
    """One token per byte. Chat is `role:content` per line."""

    vocab_size = VOCAB_SIZE

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.encode("".join(f"{m['role']}:{m['content']}\n" for m in messages))

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


class FakeStream:
    def __init__(self, engine: FakeEngine, source: AsyncIterator[Delta]) -> None:
        self.engine, self.source = engine, source

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async for item in self.source:
            # Only the last delta and an abort give the slot back: nobody notices that a reader went away.
            if item.last:
                self.engine.active.discard(self)
            yield item

    def abort(self) -> None:
        self.engine.active.discard(self)


class FakeEngine:
    """Plays `script` for every request. `active` holds the streams that nobody ended or aborted."""

    def __init__(self, script: Script = echo, tokenizer: ByteTokenizer | None = None) -> None:
        self.script = script
        self.healthy, self.num_waiting = False, 0
        self.active: set[FakeStream] = set()
        self.submitted: list[tuple[list[int], RequestParams]] = []
        self.tokenizer = tokenizer or ByteTokenizer()
        self.max_model_len = MAX_MODEL_LEN
        self.info = {
            "target": "tiny-target (llama, 2 layers)",
            "draft": "tiny-draft",
            "KV capacity": "1024 tokens, 8 MiB",
        }

    @property
    def num_running(self) -> int:
        return len(self.active)

    def start(self) -> None:
        self.healthy = True

    def stop(self) -> None:
        self.healthy = False

    def check_queue(self, count: int) -> None:
        """There is room for any number."""

    def submit(self, prompt_ids: list[int], params: RequestParams) -> FakeStream:
        if not self.healthy:
            raise EngineDeadError("the engine is not running")
        total = len(prompt_ids) + (params.max_tokens or 1)
        if not prompt_ids:
            raise RequestError("the prompt is empty, expected at least one token", "prompt")
        if total > MAX_MODEL_LEN:
            raise RequestError(f"{total} tokens, expected at most {MAX_MODEL_LEN}", "max_tokens")
        self.submitted.append((prompt_ids, params))
        stream = FakeStream(self, self.script(prompt_ids, params))
        self.active.add(stream)
        return stream


def make_app(engine: FakeEngine, **config: Any) -> FastAPI:
    """The real application around a fake engine."""
    return create_app(cast(AsyncEngine, engine), ServerConfig(**config))


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client without sockets; the application's lifespan runs around it."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://server") as client,
    ):
        yield client


async def post(engine: FakeEngine, body: Any) -> httpx.Response:
    """One request to a fresh application; afterwards the engine must hold nothing."""
    async with client_of(make_app(engine)) as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await client.post("/generate", content=content)
    assert not engine.active
    return response


@contextmanager
def server_of(app: FastAPI) -> Iterator[str]:
    """A real uvicorn on a free loopback port, in a thread; yields its base URL."""
    sock = cli.listen("127.0.0.1", 0)
    server = cli.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    try:
        eventually(lambda: server.started)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "the server did not stop"


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for a condition; fails when it does not come true before a generous deadline."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.005)


def sse_data(body: str) -> list[str]:
    """The payloads of a complete stream, each of them one `data:` line and a blank one."""
    assert body.endswith("\n\n")
    lines = body[:-2].split("\n\n")
    assert all(line.startswith("data: ") and len(line.splitlines()) == 1 for line in lines), lines
    return [line.removeprefix("data: ") for line in lines]


def fake_serve() -> int:
    """`dspark-serve` whose loader and engine are scripted; `--ckpt` names the script, or a fault."""

    def load_engine(config: ServerConfig) -> Any:
        if config.ckpt == "slow":
            print("loading", flush=True)
            sys.stdin.readline()
        scripts = {"demo": echo, "endless": endless, "hundred": hundred, "slow": echo}
        if config.ckpt not in scripts:
            raise CheckpointError(f"{config.ckpt}/config.json does not exist; expected a model folder")
        return FakeEngine(scripts[config.ckpt])

    cast(Any, loader).load_engine = load_engine
    sys.modules["server.async_engine"].__dict__["AsyncEngine"] = lambda engine, max_queue: engine
    return cli.main()


if __name__ == "__main__":
    raise SystemExit(fake_serve())
