"""Replies of `/generate`: one JSON object or server-sent events, and the watch over the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dspark_core.checkpoint.tokenizer import Tokenizer
from server.async_engine import EngineDeadError, Stream
from server.protocol import INTERNAL_ERROR, Json, closing_fields, error_body, logprob_entry, to_json
from server.request import Delta

DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache, no-store", "x-accel-buffering": "no"}
_STOPPING = "the server is shutting down"

log = logging.getLogger(__name__)
T = TypeVar("T")


class GenerationError(RuntimeError):
    """The engine gave up on one request; the message says why."""


class Generation:
    """The choices of one HTTP request while they are decoded. Whoever holds it closes it.

    Args:
        streams: one per choice, in the order of their index.
        prompt_tokens: length of the prompt they share.
        tokenizer: for the text of logprobs.
    """

    def __init__(self, streams: Sequence[Stream], prompt_tokens: int, tokenizer: Tokenizer) -> None:
        self.streams, self.prompt_tokens, self.tokenizer = streams, prompt_tokens, tokenizer

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
                    yield index, delta
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def content(self, deltas: Sequence[Delta]) -> Json:
        """Text, token ids and, where asked for, logprobs of consecutive deltas of one choice."""
        fields: Json = {
            "text": "".join(delta.text for delta in deltas),
            "token_ids": [token_id for delta in deltas for token_id in delta.token_ids],
        }
        if any(delta.logprobs is not None for delta in deltas):
            entries = [entry for delta in deltas for entry in delta.logprobs or ()]
            fields["logprobs"] = [logprob_entry(self.tokenizer, entry) for entry in entries]
        return fields

    def place(self, index: int) -> dict[str, int]:
        """The index of a choice, told only where there are several."""
        return {"index": index} if len(self.streams) > 1 else {}


async def reply(generation: Generation) -> Json:
    """The whole reply; GenerationError or EngineDeadError when any choice fails."""
    choices: list[list[Delta]] = [[] for _ in generation.streams]
    async with aclosing(generation.deltas()) as arriving:
        async for index, delta in arriving:
            if delta.error is not None:
                raise GenerationError(delta.error)
            choices[index].append(delta)
    prompt_tokens = generation.prompt_tokens
    objects = [
        {**generation.place(i), **generation.content(deltas), **closing_fields(deltas[-1], prompt_tokens)}
        for i, deltas in enumerate(choices)
    ]
    if len(objects) == 1:
        return objects[0]
    completion_tokens = sum(deltas[-1].completion_tokens for deltas in choices)
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {"choices": objects, "usage": usage}


async def events(generation: Generation) -> AsyncGenerator[bytes, None]:
    """The reply as server-sent events. The 200 is out already, so whatever goes wrong is an event as well."""
    try:
        async with aclosing(generation.deltas()) as arriving:
            async for index, delta in arriving:
                fields = _event_fields(generation, delta)
                if fields:
                    yield _event({**generation.place(index), **fields})
    except EngineDeadError as error:
        yield _event(error_body(str(error), 503, "engine_unavailable"))
    except Exception:
        log.exception("a stream failed after it began")
        yield _event(error_body(INTERNAL_ERROR, 500, "internal_error"))
    yield DONE


def _event_fields(generation: Generation, delta: Delta) -> Json:
    if delta.error is not None:
        return error_body(delta.error, 500, "internal_error")
    if delta.finish_reason is not None:
        return generation.content([delta]) | closing_fields(delta, generation.prompt_tokens)
    return generation.content([delta]) if delta.text or delta.token_ids else {}


def _event(fields: Mapping[str, Any]) -> bytes:
    return b"data: " + to_json(fields) + b"\n\n"


class EventStream(StreamingResponse):
    """Sends a generation's events. However the sending ends, nothing of the generation is left running."""

    def __init__(self, generation: Generation) -> None:
        self.generation, self.events = generation, events(generation)
        super().__init__(self.events, media_type="text/event-stream", headers=_HEADERS)

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        with closing(self.generation):
            try:
                async with aclosing(self.events):
                    await while_connected(receive, self.stream_response(send))
            except ClientDisconnect:
                log.debug("client hung up during a stream")
            except EngineDeadError as error:
                last_words = _event(error_body(str(error), 503, "engine_unavailable")) + DONE
                await send({"type": "http.response.body", "body": last_words, "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it at once when the client hangs up.

    Starlette cancels streaming responses alone, and on some servers not even those: both kinds watch here.

    Args:
        receive: the request's channel; its body must have been read.

    Raises:
        ClientDisconnect: the client went first.
        EngineDeadError: the server is shutting down and did not wait for the end.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    except asyncio.CancelledError:
        raise EngineDeadError(_STOPPING) from None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
