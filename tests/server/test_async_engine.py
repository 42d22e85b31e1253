"""The engine beside the event loop: streams, aborts and the end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from dspark_core.errors import RequestError
from server.async_engine import MAX_RETRY_AFTER_S, AsyncEngine, EngineDeadError, QueueFullError, Stream
from server.engine import Engine
from server.request import Delta, Request, RequestParams
from tests.server.drafts import ScriptedDrafter
from tests.server.engines import GREEDY, check_idle, make_engine, make_prompt, reference_greedy

DEADLINE_S = 20.0
COUNT = 12
PROMPT = make_prompt(10)
PARAMS = RequestParams(GREEDY, max_tokens=COUNT)
ENDLESS = RequestParams(GREEDY)


def tiny(**limits: Any) -> Engine:
    def continuation(request: Request) -> list[int]:
        return reference_greedy(tuple(request.prompt_ids), COUNT)

    return make_engine(ScriptedDrafter(4, continuation, [0, 2, 4]), **limits)


@contextlib.asynccontextmanager
async def running(engine: Engine, max_queue: int | None = None) -> AsyncIterator[AsyncEngine]:
    """A started engine, which must have forgotten every request when it is stopped."""
    served = AsyncEngine(engine, max_queue)
    served.start()
    try:
        yield served
    finally:
        await asyncio.to_thread(served.stop)
    assert served._streams == {}


async def read(stream: Stream) -> list[Delta]:
    async with asyncio.timeout(DEADLINE_S):
        deltas = [delta async for delta in stream]
    assert [delta.last for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return deltas


async def ids(stream: Stream) -> list[int]:
    return [token for delta in await read(stream) for token in delta.token_ids]


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.002)


def expected(prompt: Sequence[int]) -> list[int]:
    return reference_greedy(tuple(prompt), COUNT)


async def test_streams_carry_their_own_texts() -> None:
    prompts = [make_prompt(length) for length in (3, 30, 17, 64, 5)]
    async with running(tiny(max_num_seqs=3)) as served:
        texts = await asyncio.gather(*(ids(served.submit(prompt, PARAMS)) for prompt in prompts))
        assert texts == [expected(prompt) for prompt in prompts]
        check_idle(served.engine)


async def test_a_stream_brings_text_while_the_request_runs() -> None:
    async with running(tiny()) as served:
        first = await anext(served.submit(PROMPT, ENDLESS))
        assert not first.last
        assert first.token_ids == expected(PROMPT)[: len(first.token_ids)]
        assert served.num_running == 1


async def test_a_bad_request_is_refused_at_once_and_leaves_nothing() -> None:
    async with running(tiny()) as served:
        with pytest.raises(RequestError):
            served.submit([], PARAMS)
        assert (served.num_running, served.num_waiting) == (0, 0)
        assert await ids(served.submit(PROMPT, PARAMS)) == expected(PROMPT)


async def test_an_abort_frees_the_place() -> None:
    """Case H1."""
    async with running(tiny(max_num_seqs=1)) as served:
        stream = served.submit(PROMPT, ENDLESS)
        await anext(stream)
        waiting = served.submit(PROMPT, PARAMS)
        await eventually(lambda: served.num_waiting == 1)
        stream.abort()
        assert await ids(waiting) == expected(PROMPT)
        deltas = await read(stream)
        assert deltas[-1].finish_reason == "abort"
        assert (served.num_running, served.num_waiting) == (0, 0)
        check_idle(served.engine)


async def test_an_abort_in_the_queue_frees_the_place() -> None:
    async with running(tiny(max_num_seqs=1)) as served:
        busy = served.submit(PROMPT, ENDLESS)
        queued = [served.submit(PROMPT, PARAMS) for _ in range(3)]
        queued[0].abort()
        queued[1].abort()
        for stream in queued[:2]:
            (delta,) = await read(stream)
            assert (delta.finish_reason, delta.token_ids) == ("abort", [])
        await eventually(lambda: served.num_waiting == 1)
        busy.abort()
        assert await ids(queued[2]) == expected(PROMPT)


@pytest.mark.parametrize("max_queue", [0, 2])
async def test_more_may_not_wait_than_the_queue_holds(max_queue: int) -> None:
    def full(served: AsyncEngine, count: int = 1) -> bool:
        with contextlib.suppress(QueueFullError):
            served.check_queue(count)
            return False
        return True

    async with running(tiny(max_num_seqs=2), max_queue) as served:
        with served._wake:  # the thread takes none of them before all have come
            streams = []
            for left in range(2 + max_queue, 0, -1):
                assert not full(served, left)
                assert left == 2 + max_queue or full(served, left + 1)
                streams.append(served.submit(PROMPT, ENDLESS))
            assert full(served)
        await eventually(lambda: served.num_running == 2)
        assert full(served)
        streams.pop(0).abort()
        await eventually(lambda: served.num_running + served.num_waiting == 1 + max_queue)
        assert not full(served)
        with served._wake:
            streams.pop().abort()
            assert not full(served), "an abort is no request"
        with pytest.raises(RequestError, match=f"^found {3 + max_queue} choices .*expected at most {2 + max_queue}"):
            served.check_queue(3 + max_queue)
        for stream in streams:
            stream.abort()


async def test_whoever_is_refused_comes_back_after_as_long_as_others_waited() -> None:
    async with running(tiny(max_num_seqs=1), 1) as served:
        streams = [served.submit(PROMPT, ENDLESS) for _ in range(2)]
        await eventually(lambda: served.num_waiting == 1)
        for waited, retry in ((6.5, 7), (10_000, MAX_RETRY_AFTER_S)):
            streams[1].request.arrived = time.monotonic() - waited
            with pytest.raises(QueueFullError) as refused:
                served.check_queue()
            assert refused.value.retry_after == retry
        for stream in streams:
            stream.abort()


async def test_aborts_are_harmless_twice_and_after_the_end() -> None:
    async with running(tiny()) as served:
        stream = served.submit(PROMPT, PARAMS)
        assert await ids(stream) == expected(PROMPT)
        stream.abort()
        twice = served.submit(PROMPT, ENDLESS)
        twice.abort()
        twice.abort()
        assert (await read(twice))[-1].finish_reason == "abort"
        ended = served.submit(PROMPT, PARAMS)
        await eventually(lambda: ended.request.finished and not served._streams)
        ended.abort()  # its last delta is on the way
        assert (await read(ended))[-1].finish_reason == "length"
        assert await ids(served.submit(PROMPT, PARAMS)) == expected(PROMPT)
    stream.abort()


async def test_a_stream_that_ended_stays_ended() -> None:
    async with running(tiny()) as served:
        stream = served.submit(PROMPT, PARAMS)
        await read(stream)
        assert [delta async for delta in stream] == []


async def test_nothing_is_remembered_of_fifty_requests() -> None:
    """Case H2."""
    async with running(tiny(max_num_seqs=4)) as served:
        streams = [served.submit(make_prompt(1 + i % 5), PARAMS) for i in range(50)]
        for stream in streams[::7]:
            stream.abort()
        for index, stream in enumerate(streams):
            reason = (await read(stream))[-1].finish_reason
            assert reason == "length" if index % 7 else reason in {"length", "abort"}
        await eventually(lambda: not served._commands)
        assert served._streams == {}
        check_idle(served.engine)


async def test_stop_ends_running_and_queued_streams() -> None:
    served = AsyncEngine(tiny(max_num_seqs=1))
    served.start()
    assert served.healthy
    streams = [served.submit(PROMPT, ENDLESS) for _ in range(3)]
    await anext(streams[0])
    await asyncio.to_thread(served.stop)
    assert not served.healthy
    for stream in streams:
        last = (await read(stream))[-1]
        assert last.error is not None
        assert "shutting down" in last.error
    with pytest.raises(EngineDeadError):
        served.submit(PROMPT, PARAMS)
    served.stop()


async def test_a_request_that_meets_the_end_of_the_thread_is_refused() -> None:
    """The thread ends between the check of its health and the queueing of the request."""
    served = AsyncEngine(tiny())
    served.start()
    make_request = served.engine.make_request

    def stop_meanwhile(prompt_ids: list[int], params: RequestParams) -> Request:
        served.stop()
        return make_request(prompt_ids, params)

    served.engine.make_request = stop_meanwhile  # type: ignore[method-assign,assignment]
    with pytest.raises(EngineDeadError):
        served.submit(PROMPT, PARAMS)


async def test_before_the_start_nothing_is_served() -> None:
    served = AsyncEngine(tiny())
    assert not served.healthy
    with pytest.raises(EngineDeadError):
        served.submit(PROMPT, PARAMS)
    served.stop()


def test_a_loop_that_closed_before_its_stream_ended_does_not_hurt_the_engine() -> None:
    served = AsyncEngine(tiny(max_num_seqs=1))
    served.start()

    async def submit_and_leave() -> None:
        await anext(served.submit(PROMPT, ENDLESS))

    async def next_client() -> None:
        await eventually(lambda: served.num_running == 0)
        assert await ids(served.submit(PROMPT, PARAMS)) == expected(PROMPT)

    asyncio.run(submit_and_leave())
    asyncio.run(next_client())
    served.stop()
