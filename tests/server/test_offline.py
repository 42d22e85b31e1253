"""The engine without a server: every job is done, no more at once than there are places, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dspark_core.errors import RequestError
from dspark_core.models.decoder import TargetOutput
from dspark_core.sampling import SamplingParams
from server.engine import Engine
from server.offline import GenerationError, Job, complete
from server.request import RequestParams
from tests.server.engines import (
    GREEDY,
    MAX_MODEL_LEN,
    check_idle,
    check_invariants,
    make_engine,
    make_prompt,
    reference_greedy,
    tiny_draft,
)

LENGTHS = (9, 3, 14, 1, 6, 20, 2, 11)  # answers end out of order


def jobs(engine: Engine | None = None, drawn: list[int] | None = None) -> Iterator[Job[int]]:
    """One job per length; notes each as it is drawn, when a place must be free for it."""
    for number, length in enumerate(LENGTHS):
        if engine is not None and drawn is not None:
            assert len(engine.scheduler.running) + len(engine.scheduler.waiting) < engine.max_num_seqs
            drawn.append(number)
        yield number, make_prompt(10, seed=number), RequestParams(GREEDY, max_tokens=length)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 50])
@pytest.mark.parametrize("with_draft", [False, True])
def test_every_job_is_done_under_its_own_tag(with_draft: bool, max_num_seqs: int) -> None:
    draft = tiny_draft("vanilla", 3, agrees=True) if with_draft else None
    engine = make_engine(draft, max_num_seqs=max_num_seqs)
    found = {}
    for tag, request in complete(engine, jobs()):
        check_invariants(engine)
        assert tag not in found
        found[tag] = list(request.output_ids)
        assert request.finish_reason == "length"
    assert found == {n: reference_greedy(tuple(make_prompt(10, seed=n)), size) for n, size in enumerate(LENGTHS)}
    check_idle(engine)


def test_answers_come_in_the_order_they_are_ready() -> None:
    """A long one holds up nobody."""
    order = [tag for tag, _ in complete(make_engine(max_num_seqs=3), jobs())]
    # Places: 0, 1, 2 (9, 3, 14 tokens); 1 makes room for 3 and that for 4; and so on.
    assert order == [1, 3, 0, 4, 6, 2, 7, 5]


def test_jobs_are_drawn_only_as_places_become_free() -> None:
    engine, drawn = make_engine(max_num_seqs=3), list[int]()
    answers = complete(engine, jobs(engine, drawn))
    assert drawn == [], "nothing happens before the first answer is asked for"
    for done, _ in enumerate(answers, 1):
        assert len(drawn) <= done + 2, "those that are done, and at most two that run beside this one"
    assert drawn == list(range(len(LENGTHS)))


def test_no_jobs_are_done_at_once() -> None:
    engine = make_engine()
    assert list(complete(engine, iter(()))) == []
    check_idle(engine)


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_an_early_end_leaves_the_engine_empty(taken: int) -> None:
    engine = make_engine(max_num_seqs=3)
    answers = complete(engine, jobs())
    for _ in range(taken):
        next(answers)
    answers.close()
    check_idle(engine)
    assert len(list(complete(engine, jobs()))) == len(LENGTHS), "and fit for use"


def test_a_job_that_does_not_fit_ends_the_run_and_empties_the_engine() -> None:
    engine, params = make_engine(max_num_seqs=3), RequestParams(GREEDY, max_tokens=8)
    bad: list[Job[int]] = [*jobs(), (8, [1] * MAX_MODEL_LEN, params), (9, [2], params)]
    with pytest.raises(RequestError, match="context"):
        list(complete(engine, bad[5:]))
    check_idle(engine)
    with pytest.raises(RequestError, match="the prompt is empty"):
        next(complete(engine, [(0, [], params)]))
    check_idle(engine)


def test_an_error_in_the_source_of_jobs_empties_the_engine() -> None:
    def source() -> Iterator[Job[int]]:
        yield from list(jobs())[:2]
        raise KeyboardInterrupt

    engine = make_engine(max_num_seqs=3)
    with pytest.raises(KeyboardInterrupt):
        list(complete(engine, source()))
    check_idle(engine)


def test_a_step_that_raises_empties_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*given: Any, **named: Any) -> TargetOutput:
        raise RuntimeError("out of memory")

    engine = make_engine(max_num_seqs=3)
    answers = complete(engine, jobs())
    next(answers)
    monkeypatch.setattr(engine.target, "forward", forward)
    with pytest.raises(RuntimeError, match="out of memory"):
        next(answers)
    check_idle(engine)


def test_a_request_that_fails_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that are not finite end a request; without it the data would silently have a hole."""
    engine = make_engine(max_num_seqs=3)
    answers, original = complete(engine, jobs()), engine.target.forward
    next(answers)

    def forward(*given: Any, **named: Any) -> TargetOutput:
        output = original(*given, **named)
        return replace(output, logits=output.logits * float("nan"))

    monkeypatch.setattr(engine.target, "forward", forward)
    with pytest.raises(GenerationError, match="the target's scores are not finite"):
        next(answers)
    check_idle(engine)


def test_seeded_answers_do_not_depend_on_how_many_run_at_once() -> None:
    def seeded() -> Iterator[Job[int]]:
        for number, ids, _ in jobs():
            yield number, ids, RequestParams(SamplingParams(temperature=1.0, seed=number), max_tokens=12)

    found = [
        {tag: list(request.output_ids) for tag, request in complete(make_engine(max_num_seqs=size), seeded())}
        for size in (1, 3, 8)
    ]
    assert found[0] == found[1] == found[2]
