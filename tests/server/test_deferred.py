"""The draft's context of plainly decoded tokens: late, and complete whenever somebody may read it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from server.deferred import MOST, MOST_OF_ALL
from server.engine import Engine
from server.policy import LengthPolicy, StepOutcome
from server.request import Request, RequestParams
from tests.server.drafts import ScriptedDrafter, oracle
from tests.server.engines import GREEDY, check_invariants, make_engine, make_prompt, run
from tests.server.policies import Lengths
from tests.server.test_policy import continuation

PAGE = 16


class Counting(ScriptedDrafter):
    """Counts the rows and the calls of context that is written."""

    rows = calls = 0

    def absorb(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        super().absorb(features, positions, slots)
        self.rows, self.calls = self.rows + len(slots), self.calls + 1


def engine_of(drafter: ScriptedDrafter, every: int, **limits: int) -> Engine:
    """Each request drafts in one of so many rounds; the drafter checks its context when it does."""
    engine, rounds = make_engine(drafter, **limits), dict[int, int]()

    def lens(requests: Sequence[Request], most: Sequence[int]) -> list[int]:
        chosen = []
        for request, limit in zip(requests, most, strict=True):
            rounds[id(request)] = rounds.get(id(request), 0) + 1
            chosen.append(limit if every and rounds[id(request)] % every == 0 else 0)
        return chosen

    engine.policy = Lengths(lens)
    drafter.attach(engine)
    return engine


@pytest.mark.parametrize("every", [2, 5, 23])
def test_who_drafts_again_has_its_context(every: int) -> None:
    drafter = Counting(4, continuation, [-1, 0, 2])
    jobs = [(make_prompt(size), RequestParams(GREEDY, max_tokens=60)) for size in (3, 17, 40)]
    for result in run(engine_of(drafter, every), jobs, arrivals=[0, 1, 4]):
        assert result.ids == continuation(result.request)
        assert result.last.speculation.rounds


def test_a_step_tells_how_much_was_caught_up_on() -> None:
    engine, taken = engine_of(oracle(4, continuation), 6), list[StepOutcome]()
    engine.step_observers.append(taken.append)
    run(engine, [(make_prompt(PAGE), RequestParams(GREEDY, max_tokens=60))])
    drafting = [outcome for outcome in taken if outcome.drafting]
    assert len(drafting) > 2
    assert all(outcome.caught_up == 5 for outcome in drafting[1:]), "five plain steps"
    others = [outcome for outcome in taken if not outcome.drafting]
    assert not any(outcome.caught_up for outcome in others[:-1])
    assert not any(outcome.steady for outcome in drafting)
    assert sum(outcome.steady for outcome in others) == len(others) - 1 - bool(others[-1].caught_up), "but the prompt's"


def test_who_never_drafts_writes_many_at_a_time() -> None:
    drafter, taken = Counting(4, continuation, [-1]), list[StepOutcome]()
    engine = engine_of(drafter, 0)
    engine.step_observers.append(taken.append)
    (result,) = run(engine, [(make_prompt(10), RequestParams(GREEDY, max_tokens=240))])
    assert len(result.ids) == 240
    assert [outcome.caught_up for outcome in taken if outcome.caught_up] == [MOST, 239 - MOST]
    assert drafter.rows == 249
    assert drafter.calls == 3, "the prompt, what was much, the end"


@pytest.mark.parametrize("count", [20, 64])
def test_what_many_requests_leave_is_bounded(count: int) -> None:
    drafter, held, taken = Counting(4, continuation, [-1]), 0, list[StepOutcome]()
    engine = engine_of(drafter, 0, max_num_seqs=count, num_tokens=count * 112)
    engine.step_observers.append(taken.append)
    requests = [engine.make_request(make_prompt(5), RequestParams(GREEDY, max_tokens=100)) for _ in range(count)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        sizes = [engine.context.size(request) for request in engine.scheduler.running]
        assert sum(sizes) <= MOST_OF_ALL
        assert max(sizes, default=0) < MOST
        held = max(held, sum(sizes))
    assert held > MOST_OF_ALL - count
    assert sum(outcome.caught_up > 0 for outcome in taken) <= 100 * count // MOST_OF_ALL + 2, "other steps' times tell"


def test_nobody_writes_what_nobody_can_find() -> None:
    drafter = Counting(4, continuation, [-1])
    engine = engine_of(drafter, 0, prefix_cache=False)
    run(engine, [(make_prompt(10), RequestParams(GREEDY, max_tokens=70))])
    assert drafter.rows == 10, "the prompt's alone"


def test_shared_pages_have_their_context() -> None:
    """A prompt that begins with what another request decoded plainly drafts from it."""
    first = engine_of(oracle(4, continuation), 0)
    params = RequestParams(GREEDY, max_tokens=60)
    (result,) = run(first, [(make_prompt(10), params)])
    longer = make_prompt(10) + result.ids
    second = oracle(4, lambda request: plain_text(longer))
    second.pool = first.drafter.pool  # type: ignore[union-attr]
    second.attach(first)
    first.drafter = second  # type: ignore[assignment]
    first.policy = LengthPolicy()
    (again,) = run(first, [(longer, RequestParams(GREEDY, max_tokens=20))])
    assert again.request.speculation.accepted, "and its context was checked on the way"
    assert first.memory.shared_tokens >= 48


def plain_text(prompt: list[int]) -> list[int]:
    (result,) = run(make_engine(), [(prompt, RequestParams(GREEDY, max_tokens=20))])
    return result.ids


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_preemption_aborts_and_sharing(seed: int, prefix_cache: bool) -> None:
    source = random.Random(seed)
    drafter = Counting(4, continuation, [1, -1, 0])
    engine = engine_of(drafter, 3, num_tokens=256, max_model_len=128, max_num_seqs=5, prefix_cache=prefix_cache)
    requests = []
    for number in range(16):
        size = source.choice((5, 17, 17, 40))
        requests.append(engine.make_request(make_prompt(size), RequestParams(GREEDY, max_tokens=60)))
        engine.add(requests[-1])
        for _ in range(source.randint(0, 8)):
            engine.step()
        if number % 5 == 4:
            engine.abort(source.choice(requests))
    while engine.has_work:
        engine.step()
        check_invariants(engine)
    for request in requests:
        if request.finish_reason == "length":
            assert request.tokens[len(request.prompt_ids) :] == continuation(request)
