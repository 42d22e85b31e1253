"""The choices that one HTTP request waits for, and how their words are found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Protocol

from dspark_core.grammar import Grammar
from server.async_engine import AsyncEngine, Stream
from server.fields import GrammarSource
from server.protocol import Json
from server.request import Delta, RequestParams

# One thread for all: large grammars then wait for each other, and nobody else waits for them.
_GRAMMARS = ThreadPoolExecutor(1, "grammar")


class Writer(Protocol):
    """Words what an endpoint answers. One object per HTTP request."""

    def events(self, index: int, delta: Delta) -> Iterable[Json]:
        """What a stream says of one more delta of choice `index`; none of these is an error."""

    def closing(self) -> Iterable[Json]:
        """What a stream says when every choice has ended."""

    def reply(self, choices: Sequence[Sequence[Delta]]) -> Json:
        """The answer in one piece: the deltas of every choice, in order."""


class GenerationError(RuntimeError):
    """The engine gave up on one request; the message says why."""


class Generation:
    """The choices of one HTTP request while they are decoded. Whoever holds it closes it.

    Args:
        streams: one per choice, in the order of their index.
        writer: words the answer.
        prompt_tokens: of all prompts together.
    """

    def __init__(self, streams: Sequence[Stream], writer: Writer, prompt_tokens: int) -> None:
        self.streams, self.writer, self.prompt_tokens = streams, writer, prompt_tokens
        self._latest: dict[int, Delta] = {}  # by choice

    def close(self) -> None:
        """Abort the choices that still run; their slots and KV come free at the engine's next step."""
        for stream in self.streams:
            stream.abort()

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(choice index, delta) of all choices as they come; what a stream raised is raised at the end."""
        arrived: asyncio.Queue[tuple[int, Delta | None]] = asyncio.Queue()

        async def forward(index: int, stream: Stream) -> None:
            try:
                async for delta in stream:
                    arrived.put_nowait((index, delta))
            finally:
                arrived.put_nowait((index, None))

        tasks = [asyncio.create_task(forward(i, stream)) for i, stream in enumerate(self.streams)]
        running = len(tasks)
        try:
            while running:
                index, delta = await arrived.get()
                if delta is None:
                    running -= 1
                else:
                    self._latest[index] = delta
                    yield index, delta
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def figures(self) -> Json:
        """What the log says of it (server.logs.note): of all choices together, as far as they have come."""
        latest = [delta for _, delta in sorted(self._latest.items())]
        rounds = sum(delta.speculation.rounds for delta in latest)
        accepted = sum(delta.speculation.accepted for delta in latest)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sum(delta.completion_tokens for delta in latest),
            "finish_reason": ",".join(delta.finish_reason for delta in latest if delta.finish_reason) or None,
            "acceptance_length": round(1 + accepted / rounds, 2) if rounds else None,
        }

    def place(self, index: int) -> dict[str, int]:
        """The index of a choice, for an error of it alone: told only where there are several."""
        return {"index": index} if len(self.streams) > 1 else {}

    async def reply(self) -> Json:
        """The whole answer; GenerationError or EngineDeadError when any choice fails."""
        choices: list[list[Delta]] = [[] for _ in self.streams]
        async with aclosing(self.deltas()) as arriving:
            async for index, delta in arriving:
                if delta.error is not None:
                    raise GenerationError(delta.error)
                choices[index].append(delta)
        return await asyncio.to_thread(self.writer.reply, choices)  # many log-probabilities take long to word


def open_streams(engine: AsyncEngine, jobs: Sequence[tuple[list[int], RequestParams]]) -> list[Stream]:
    """Hand every choice (prompt ids, parameters) to the engine; when it refuses one, take back those before it."""
    engine.check_queue(len(jobs))
    streams: list[Stream] = []
    with ExitStack() as undo:
        for prompt_ids, params in jobs:
            stream = engine.submit(prompt_ids, params)
            undo.callback(stream.abort)
            streams.append(stream)
        undo.pop_all()
    return streams


async def compile_grammar(engine: AsyncEngine, wanted: GrammarSource | None) -> Grammar | None:
    """The grammar that a request asks for, if any; RequestError when it cannot be followed."""
    if wanted is None:
        return None
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_GRAMMARS, partial(engine.engine.grammars.compile, *wanted))
