"""Answers as server-sent events, and the watch over the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, closing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from server.async_engine import EngineDeadError
from server.deadline import RequestTimeoutError, remaining
from server.generation import Generation
from server.logs import note
from server.protocol import INTERNAL_ERROR, error_body, to_json

DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache, no-store", "x-accel-buffering": "no"}
STOPPING = "the server is shutting down"

log = logging.getLogger(__name__)
T = TypeVar("T")


async def events(generation: Generation) -> AsyncGenerator[bytes, None]:
    """The reply as server-sent events. The 200 is out already, so whatever goes wrong is an event as well."""
    writer, failed = generation.writer, False
    try:
        async with aclosing(generation.deltas()) as arriving:
            async for index, delta in arriving:
                if delta.error is not None:
                    failed = True
                    yield _event({**error_body(delta.error, 500, "internal_error"), **generation.place(index)})
                    continue
                for fields in writer.events(index, delta):
                    yield _event(fields)
        if not failed:
            for fields in writer.closing():
                yield _event(fields)
    except EngineDeadError as error:
        yield _event(error_body(str(error), 503, "engine_unavailable"))
    except Exception:
        log.exception("a stream failed after it began")
        yield _event(error_body(INTERNAL_ERROR, 500, "internal_error"))
    yield DONE


def _event(fields: Mapping[str, Any]) -> bytes:
    return b"data: " + to_json(fields) + b"\n\n"


class EventStream(StreamingResponse):
    """Sends a generation's events. However the sending ends, nothing of the generation is left running."""

    def __init__(self, generation: Generation) -> None:
        self.generation, self.events, self.begun = generation, events(generation), False
        super().__init__(self.events, media_type="text/event-stream", headers=_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        last_words = b""
        with closing(self.generation):
            try:
                async with aclosing(self.events):
                    await while_connected(receive, self.stream_response(send))
            except ClientDisconnect:
                note(scope, error="client_disconnected")
            except (EngineDeadError, RequestTimeoutError) as error:
                if not self.begun:
                    raise
                late = isinstance(error, RequestTimeoutError)
                status, code = (504, "timeout") if late else (503, "engine_unavailable")
                note(scope, error=code)
                last_words = _event(error_body(str(error), status, code)) + DONE
            finally:
                note(scope, **self.generation.figures())
        if last_words:  # its places are free by now, however slowly the client reads
            await send({"type": "http.response.body", "body": last_words, "more_body": False})

    async def stream_response(self, send: Send) -> None:
        """Send the head, then the events."""
        self.begun = True
        await super().stream_response(send)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it at once when the client hangs up or the request's time is over.

    Starlette cancels streaming responses alone, and on some servers not even those: both kinds watch here.

    Args:
        receive: the request's channel; its body must have been read.

    Raises:
        ClientDisconnect: the client went first.
        EngineDeadError: the server is shutting down and did not wait for the end.
        RequestTimeoutError: it took longer than the server allows.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait({task, gone}, timeout=remaining(), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect if gone.done() else RequestTimeoutError
    except asyncio.CancelledError:
        raise EngineDeadError(STOPPING) from None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
