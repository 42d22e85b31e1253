"""What is tried though it does not seem to pay, and what is not even kept ready where nothing can."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace

import numpy as np
import pytest
from torch import Tensor

from dspark_core.checkpoint.calibration import Calibration
from dspark_core.sampling import SamplingParams
from dspark_core.step_cost import CostCurves, StepCost
from server.auto_policy import BEGINNING, LITTLE, REDRAWN, WATCHED, AutoPolicy
from server.policy import LengthPolicy
from server.request import Request, RequestParams
from server.trials import (
    EXPLORE_EVERY,
    EXPLORE_RARELY,
    EXPLORE_ROUNDS,
    EXPLORE_SLOTS,
    EXPLORE_SOON,
    PLAIN_EVERY,
    PLAIN_RUN,
    PLAIN_SOON,
    REST,
    Trials,
)
from tests.server.drafts import oracle
from tests.server.engines import GREEDY, make_engine, make_prompt, run
from tests.server.test_auto_policy import step
from tests.server.test_policy import COST, COUNT, choose, continuation, plain, some_request, tell


def test_who_gave_up_tries_again_and_recovers() -> None:
    policy, request = AutoPolicy(COST), some_request()
    tell(policy, request, drafted=4, accepted=0, rounds=60)
    lens = [choose(policy, [request], [4])[0] for _ in range(8 * EXPLORE_EVERY)]
    assert sorted(set(lens)) == [0, EXPLORE_SLOTS]
    began = [i for i in range(len(lens)) if lens[i] and not (i and lens[i - 1])]
    assert began == pytest.approx([EXPLORE_EVERY, 3 * EXPLORE_EVERY, 7 * EXPLORE_EVERY], abs=8), "ever more rarely"
    assert lens.count(EXPLORE_SLOTS) == 3 * EXPLORE_ROUNDS
    tell(policy, request, drafted=4, accepted=4, rounds=60)
    assert max(choose(policy, [request], [4])[0] for _ in range(REST + 2)) == 4


def test_short_requests_learn_for_those_after_them() -> None:
    """Each is over long before it alone would try again."""
    policy, drafted = AutoPolicy(COST), []
    for number in range(150):
        request = some_request()
        right = number >= 10  # the first ones' drafts are wrong, all others' right
        for _ in range(20):
            (length,) = choose(policy, [request], [4])
            drafted.append(length)
            if length:
                tell(policy, request, drafted=length, accepted=length if right else 0)
    assert max(drafted[120:180]) == 0, "given up"
    assert sorted(set(drafted[-200:])) in ([4], [0, 4]), "and found again"
    assert drafted[-200:].count(0) <= (200 // PLAIN_EVERY + 1) * PLAIN_RUN, "but for plain steps now and then"


def test_one_of_many_tries_at_a_time() -> None:
    policy, requests = AutoPolicy(COST), [some_request() for _ in range(5)]
    for request in requests:
        tell(policy, request, drafted=4, accepted=0, rounds=30)
    lens = [choose(policy, requests, [4] * 5) for _ in range(15 * EXPLORE_EVERY + 2 * EXPLORE_ROUNDS + 10 * REST)]
    tried = [sum(map(bool, step)) for step in lens]
    assert max(tried) == 1
    assert [sum(map(bool, column)) for column in zip(*lens, strict=True)] == [EXPLORE_ROUNDS] * 5, "each in turn"


def test_trying_gets_no_rarer_than_it_must() -> None:
    policy, request = AutoPolicy(COST), some_request()
    tell(policy, request, drafted=4, accepted=0, rounds=60)
    lens = [choose(policy, [request], [4])[0] for _ in range(10 * EXPLORE_RARELY)]
    assert EXPLORE_ROUNDS <= sum(map(bool, lens[-EXPLORE_RARELY - 2 * REST :])) <= 2 * EXPLORE_ROUNDS
    (length,) = {length for length in lens if length}
    assert length == EXPLORE_SLOTS
    tell(policy, request, drafted=4, accepted=4, rounds=60)
    lens = [choose(policy, [request], [4])[0] for _ in range(REST + 1)]
    assert max(lens) == 4
    tell(policy, request, drafted=4, accepted=0, rounds=200)
    lens = [choose(policy, [request], [4])[0] for _ in range(EXPLORE_EVERY + 2 * REST)]
    assert any(lens), "soon again, after drafting has paid"


def test_a_draft_that_may_pay_is_tried_soon() -> None:
    """A slot costs 0.4 of a plain step here, so that a draft known to be right in 0.37 of the rounds nearly pays."""
    for known, first in ((0.37, EXPLORE_SOON), (0.05, EXPLORE_EVERY)):
        policy, request = AutoPolicy(COST, Calibration({}, {"ratio": (known,) * 4})), some_request()
        lens = [choose(policy, [request], [4])[0] for _ in range(8 * EXPLORE_EVERY)]
        began = [i for i in range(len(lens)) if lens[i] and not (i and lens[i - 1])]
        assert began[0] == pytest.approx(first, abs=8)
        assert began[1] == pytest.approx(3 * first, abs=8), "ever more rarely"
    policy = AutoPolicy(COST, Calibration({}, {"ratio": (0.37,) * 4}))
    for _ in range(60):
        tell(policy, some_request(), drafted=4, accepted=0)
    lens = [choose(policy, [request], [4])[0] for _ in range(EXPLORE_EVERY + 2 * REST)]
    assert lens.index(EXPLORE_SLOTS) == pytest.approx(EXPLORE_EVERY, abs=8), "no hope is left"


def test_where_there_is_hope_all_try_together() -> None:
    policy = AutoPolicy(COST, Calibration({}, {"ratio": (0.51,) * 4}))
    requests = [some_request() for _ in range(3)]
    lens = [choose(policy, requests, [4] * 3) for _ in range(2 * EXPLORE_SOON)]
    assert policy._plan is not None
    assert any(policy._plan.hopes)
    tried = [step for step in lens if any(step)]
    assert tried == [policy._plan.hopes] * (EXPLORE_ROUNDS // 3), (
        "as far as they would if the draft were a little better"
    )


def test_all_that_have_hope_try_even_if_they_are_more_than_the_rounds() -> None:
    policy = AutoPolicy(COST, Calibration({}, {"ratio": (0.62,) * 4}))
    requests = [some_request() for _ in range(EXPLORE_ROUNDS + 1)]
    lens = [choose(policy, requests, [4] * len(requests)) for _ in range(2 * EXPLORE_SOON)]
    assert [all(step) for step in lens].count(True) == 1
    assert sum(map(any, lens)) == 1


def hopeless() -> AutoPolicy:
    """Even a sure draft of four slots would cost more than it brings."""
    cost = StepCost(CostCurves([1, 5, 40], [1.0, 9.0, 79.0], [1, 8], [2.0, 9.0], [4.0, 18.0], draft_len=4))
    return AutoPolicy(cost, Calibration({}, {"ratio": (0.4,) * 4}))


def request_of(*prompt: int) -> Request:
    return replace(some_request(), prompt_ids=list(prompt))


def test_where_no_draft_can_pay_requests_are_plain_but_for_some(caplog: pytest.LogCaptureFixture) -> None:
    policy, random = hopeless(), np.random.default_rng(0)
    with caplog.at_level(logging.INFO):
        able = [policy.may_draft(request_of(*random.integers(0, 99, 30))) for _ in range(2000)]
    assert sum(able) == pytest.approx(2000 / WATCHED, rel=0.2)
    assert caplog.text.count("no draft would pay here") == 1, "said once"


def test_turns_of_a_conversation_fall_on_one_side_until_it_is_drawn_anew() -> None:
    policy, start = hopeless(), tuple(range(BEGINNING))
    first = [policy.may_draft(request_of(*start, *range(turn))) for turn in range(20)]
    assert len(set(first)) == 1
    later = [policy.may_draft(request_of(*start)) for _ in range(60 * REDRAWN)]
    assert 0 < sum(later) < len(later), "nobody is shut out for good"
    changes = sum(one != two for one, two in itertools.pairwise(later))
    assert changes <= 60


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), GREEDY, SamplingParams(seed=1)], ids=["ratio", "greedy", "coupled"]
)
def test_where_a_draft_may_pay_every_request_may(sampling: SamplingParams, caplog: pytest.LogCaptureFixture) -> None:
    """Though it does not at the present load, or by what is known: loads fall, and estimates err."""
    policy, params = AutoPolicy(COST, Calibration({}, {"ratio": (0.3,) * 4})), RequestParams(sampling)
    requests = [some_request(params) for _ in range(20)]
    with caplog.at_level(logging.INFO):
        assert choose(policy, requests, [4] * 20) == [0] * 20
        assert all(policy.may_draft(some_request(params)) for _ in range(50))
        assert "no draft would pay" not in caplog.text
        for _ in range(100):
            tell(policy, some_request(params), drafted=4, accepted=0)
        assert not all(policy.may_draft(replace(some_request(params), prompt_ids=[i])) for i in range(50))
        for _ in range(40):
            tell(policy, some_request(params), drafted=4, accepted=4)
        assert all(policy.may_draft(some_request(params)) for _ in range(50)), "and again when it is not bad any more"


def test_steps_that_took_long_shut_nobody_out() -> None:
    """How much longer steps with drafts take is learnt from such steps: where there are none it would stay as it is."""
    policy = AutoPolicy(COST, Calibration({}, {"ratio": (0.8,) * 4}))
    policy.watch.drafting = 5.0
    assert all(policy.may_draft(request_of(i)) for i in range(50))


def test_requests_that_cannot_draft_cost_what_plain_ones_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(oracle(4, continuation))
    engine.policy = hopeless()
    assert engine.drafter is not None
    absorb, written = engine.drafter.absorb, list[int]()

    def noting(features: Tensor, positions: Tensor, slots: Tensor) -> None:
        written.append(len(features))
        absorb(features, positions, slots)

    monkeypatch.setattr(engine.drafter, "absorb", noting)
    params, able = RequestParams(GREEDY, max_tokens=COUNT), 0
    for size in range(5, 35):
        (result,) = run(engine, [(make_prompt(size), params)])
        assert result.ids == plain(GREEDY, size)
        able += bool(written)
        written.clear()
    assert 0 < able < 15, "kept for some alone"
    (result,) = run(engine, [(make_prompt(9), replace(params, whole_blocks=True))])
    assert result.ids == plain(GREEDY, 9)
    assert result.last.speculation.accepted > 0, "whose client wants blocks gets them"


def test_whether_a_request_may_draft_is_decided_once() -> None:
    engine = make_engine(oracle(4, continuation))
    request = engine.make_request(make_prompt(9), RequestParams(GREEDY, max_tokens=COUNT))
    engine.policy = hopeless()
    engine.add(request)
    engine.step()
    engine.policy = LengthPolicy()
    while engine.has_work:
        engine.step()
    assert request.output_ids == plain(GREEDY, 9)
    assert request.speculation.rounds == 0, "a context that was begun in the middle would have a hole"


def test_a_run_of_plain_steps_goes_on_beside_a_prompt_but_does_not_begin_there() -> None:
    trials, prompts = Trials(), [True] * 50 + [False] * PLAIN_SOON + [True, False] * PLAIN_RUN
    steps = [trials.plain_step(0, 2.0, alone=not prompt) for prompt in prompts]
    first = 50 + PLAIN_SOON - 1
    assert steps[: first + PLAIN_RUN + 1] == [False] * first + [True] * PLAIN_RUN + [False]


def test_a_try_that_succeeds_counts_at_once() -> None:
    policy, request = AutoPolicy(COST, Calibration({}, {"ratio": (0.37,) * 4})), some_request()
    for _ in range(LITTLE):  # so that rounds are learnt from together
        tell(policy, some_request(), drafted=4, accepted=0)
    while not (length := choose(policy, [request], [4])[0]):
        policy.observe_step(step(1.0))
    for _ in range(EXPLORE_ROUNDS):
        tell(policy, request, drafted=length, accepted=length)
        policy.observe_step(step(1.0, drafting=1))
        (length,) = choose(policy, [request], [4])
    assert not length
    policy.observe_step(step(1.0))
    assert not policy.trials.resting([request])
