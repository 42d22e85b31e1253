"""Faults inside the engine thread: whom they hit, who lives on, and when it is over."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from server.async_engine import MAX_FAILED_STEPS, EngineDeadError
from server.engine import Engine, Outcome
from server.request import RequestParams
from tests.server.engines import GREEDY, check_idle
from tests.server.test_async_engine import ENDLESS, PARAMS, PROMPT, eventually, expected, ids, read, running, tiny


def break_steps(engine: Engine, breaks: Callable[[], bool]) -> None:
    """Make `step` raise whenever the condition holds, before it has done anything but schedule."""
    draft = engine._draft

    def step(*args: Any) -> Any:
        if breaks():
            raise RuntimeError("injected")
        return draft(*args)

    engine._draft = step  # type: ignore[method-assign,assignment]


def break_target(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Make every pass of the target raise, as a lost device does."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(engine.target, "forward", forward)


async def test_a_step_that_raises_fails_those_who_ran_in_it_alone() -> None:
    """Case N1."""
    engine, broken = tiny(max_num_seqs=2), threading.Event()
    break_steps(engine, broken.is_set)
    async with running(engine) as served:
        ran = [served.submit(PROMPT, ENDLESS) for _ in range(2)]
        for stream in ran:
            await anext(stream)
        waited = served.submit(PROMPT, PARAMS)
        await eventually(lambda: served.num_waiting == 1)
        fail_running = engine.fail_running

        def fail_and_heal(message: str) -> list[Outcome]:
            broken.clear()
            return fail_running(message)

        engine.fail_running = fail_and_heal  # type: ignore[method-assign]
        broken.set()
        for stream in ran:
            last = (await read(stream))[-1]
            assert last.error is not None
            assert "injected" not in last.error
            assert last.finish_reason is None
        assert await ids(waited) == expected(PROMPT)
        assert served.healthy
        check_idle(engine)


async def test_a_failing_request_does_not_take_the_end_of_another_with_it() -> None:
    """One request ends in the same step in which another raises: both must be told."""
    engine = tiny()
    async with running(engine) as served:

        def broken(token_id: int) -> str:
            raise RuntimeError("injected")

        with served._wake:  # the thread sees both at once
            ends = served.submit(PROMPT, RequestParams(GREEDY, max_tokens=1))
            raises = served.submit(PROMPT, PARAMS)
            raises.request.detokenizer.step = broken  # type: ignore[method-assign]
        for stream in (ends, raises):
            last = (await read(stream))[-1]
            assert (last.error is None) == (last.finish_reason is not None)
        assert await ids(served.submit(PROMPT, PARAMS)) == expected(PROMPT)
        check_idle(engine)


async def test_requests_that_keep_failing_do_not_end_an_engine_that_can_run() -> None:
    engine, broken = tiny(max_num_seqs=1), threading.Event()
    break_steps(engine, broken.is_set)
    async with running(engine) as served:
        broken.set()
        for _ in range(3 * MAX_FAILED_STEPS):
            assert (await read(served.submit(PROMPT, PARAMS)))[-1].error is not None
        broken.clear()
        assert await ids(served.submit(PROMPT, PARAMS)) == expected(PROMPT)
        assert served.healthy
        check_idle(engine)


async def test_a_target_that_cannot_run_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny(max_num_seqs=1)
    break_target(monkeypatch, engine)
    async with running(engine) as served:
        streams = [served.submit(PROMPT, PARAMS) for _ in range(MAX_FAILED_STEPS + 2)]
        for stream in streams:
            last = (await read(stream))[-1]
            assert last.error is not None
            assert last.finish_reason is None
        await eventually(lambda: not served.healthy)
        with pytest.raises(EngineDeadError):
            served.submit(PROMPT, PARAMS)
        streams[0].abort()


async def test_clients_that_leave_do_not_hide_steps_that_keep_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command runs the loop once more without work: that is no step that went well."""
    engine = tiny(max_num_seqs=1)
    break_target(monkeypatch, engine)
    async with running(engine) as served:
        for _ in range(MAX_FAILED_STEPS):
            stream = served.submit(PROMPT, PARAMS)
            assert (await read(stream))[-1].error is not None
            with contextlib.suppress(EngineDeadError):  # dead already, after the last
                served.abort(stream.request)
            await eventually(lambda: not served._commands)
        await eventually(lambda: not served.healthy)


async def test_now_and_then_a_failing_step_is_survived() -> None:
    engine, broken = tiny(), threading.Event()
    break_steps(engine, broken.is_set)
    async with running(engine) as served:
        for _ in range(MAX_FAILED_STEPS + 1):
            broken.set()
            assert (await read(served.submit(PROMPT, PARAMS)))[-1].error is not None
            broken.clear()
            assert await ids(served.submit(PROMPT, PARAMS)) == expected(PROMPT)
        assert served.healthy


async def test_a_dying_thread_ends_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny(max_num_seqs=1)
    async with running(engine) as served:
        streams = [served.submit(PROMPT, ENDLESS) for _ in range(3)]
        await anext(streams[0])

        def beyond_repair(message: str) -> list[Outcome]:
            raise RuntimeError("injected twice")

        monkeypatch.setattr(engine, "fail_running", beyond_repair)
        break_steps(engine, lambda: True)
        for stream in streams:
            assert (await read(stream))[-1].error is not None
        assert not served.healthy
        with pytest.raises(EngineDeadError):
            served.submit(PROMPT, PARAMS)
