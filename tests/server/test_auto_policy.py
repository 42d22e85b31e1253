"""The scheduler spends verification where it pays, by costs, earlier rounds and confidence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from dspark_core.checkpoint.calibration import Calibration
from dspark_core.step_cost import CostCurves, StepCost
from server.auto_policy import LITTLE, TOGETHER, AutoPolicy
from server.cost_watch import SETTLED
from server.policy import FixedLength, StepOutcome
from server.request import Request
from server.trials import (
    EXPLORE_EVERY,
    EXPLORE_SLOTS,
    FIRST_TIMES,
    PLAIN_EVERY,
    PLAIN_LATER,
    PLAIN_RARELY,
    PLAIN_RUN,
    PLAIN_SOON,
)
from tests.server.policies import cost_of, one_round
from tests.server.test_policy import some_request


def ask(policy: AutoPolicy, requests: Sequence[Request], logits: Sequence[Sequence[float]] | None) -> list[int]:
    """Plan and admit once; the verify lengths of all requests."""
    slots = policy.plan(requests, [policy.cost.draft_len] * len(requests), 0)
    drafting = [i for i, count in enumerate(slots) if count]
    if not drafting:
        return [0] * len(requests)
    given = None if logits is None else np.array([logits[i] for i in drafting], float)
    lens = policy.admit([requests[i] for i in drafting], [slots[i] for i in drafting], given, 0)
    found = dict(zip(drafting, lens, strict=True))
    return [found.get(i, 0) for i in range(len(requests))]


def tell(
    policy: AutoPolicy, request: Request, logits: Sequence[float] | None, verified: int, accepted: int, rounds: int
) -> None:
    drafted = len(logits) if logits else verified
    for _ in range(rounds):
        policy.observe(one_round(request, logits, drafted=drafted, verified=verified, accepted=accepted))


def test_once_something_is_known_steps_are_learnt_from_together_but_never_after_the_text() -> None:
    policy, request = AutoPolicy(cost_of(0.3, draft_len=4), Calibration.raw(4)), some_request()
    known = []
    for _ in range(LITTLE + 2 * TOGETHER):
        tell(policy, request, [1.0] * 4, verified=4, accepted=2, rounds=1)
        known.append(policy.history.rounds)
    assert known[:LITTLE] == list(range(1, LITTLE + 1))
    assert set(known[LITTLE:]) == {LITTLE, LITTLE + TOGETHER, LITTLE + 2 * TOGETHER}
    for ends in ("a step in which nobody drafts", "the text"):
        tell(policy, request, [1.0] * 4, verified=4, accepted=2, rounds=1)
        assert len(policy._unread) == 1
        if ends == "the text":
            request.finish_reason = "stop"
            tell(policy, request, None, verified=4, accepted=2, rounds=1)
        else:
            policy.observe_step(step(1.0))
        assert not policy._unread, "nothing keeps the request"
    assert policy.history.rounds == known[-1] + 3


def test_sure_blocks_are_verified_further_than_doubtful_ones() -> None:
    policy, requests = AutoPolicy(cost_of(0.3, draft_len=4), Calibration.raw(4)), [some_request(), some_request()]
    lens = ask(policy, requests, [[5.0] * 4, [-5.0] * 4])
    assert lens[0] > lens[1] == 0


def test_without_a_confidence_head_all_that_is_drafted_is_verified() -> None:
    policy, request = AutoPolicy(cost_of(0.1, draft_len=4)), some_request()
    assert not policy.reads_confidence
    slots = policy.plan([request], [4], 0)
    assert policy.admit([request], slots, None, 0) == slots
    assert slots[0] > 0


def test_a_head_that_promises_too_much_is_corrected_by_outcomes() -> None:
    policy, request = AutoPolicy(cost_of(0.3, draft_len=4), Calibration.raw(4)), some_request()
    sure = [3.0] * 4
    assert ask(policy, [request], [sure])[0] > 1
    tell(policy, request, sure, verified=4, accepted=0, rounds=40)
    assert policy.history.correction([request]) < 0.5
    assert ask(policy, [request], [sure]) == [0]


def test_a_head_that_promises_too_little_is_corrected_too() -> None:
    policy, request = AutoPolicy(cost_of(0.35, draft_len=4), Calibration.raw(4)), some_request()
    doubtful = [-0.5] * 4
    tell(policy, request, doubtful, verified=2, accepted=2, rounds=40)
    assert policy.history.correction([request]) > 1.5
    assert ask(policy, [request], [doubtful])[0] >= 1


def test_a_text_that_ends_in_its_block_teaches_of_the_slots_before_its_end_alone() -> None:
    policy, request = AutoPolicy(cost_of(0.3, draft_len=4), Calibration.raw(4)), some_request()
    for _ in range(300):
        policy.observe(one_round(request, [2.0, 9.0, 9.0, 9.0], drafted=4, verified=4, decided=1, accepted=1))
    assert policy.history.correction([request])[0] == pytest.approx(1 + math.exp(-2.0), rel=0.04), "1 of 0.88 promised"


def test_what_is_tried_is_verified_whatever_its_confidence() -> None:
    """Its outcome must not be one of good-looking blocks only."""
    policy, request = AutoPolicy(cost_of(0.9, draft=0.5, draft_len=4), Calibration.raw(4)), some_request()
    lens = [ask(policy, [request], [[-4.0] * 4])[0] for _ in range(EXPLORE_EVERY + 1)]
    assert max(lens) == EXPLORE_SLOTS


def test_what_is_verified_in_full_is_so_whatever_it_costs() -> None:
    """On a curve on which Algorithm 1 would stop at once; the others are judged as ever."""
    verify = [1.0, 3.0, 3.0, 3.0, 3.0, 30.0]
    cost = StepCost(CostCurves([1, 2, 3, 4, 5, 64], verify, [1, 8], [0.0] * 2, [0.0] * 2, 4))
    policy, requests = AutoPolicy(cost, Calibration.raw(4)), [some_request(), some_request()]
    policy.plan(requests, [4, 4], 0)
    assert policy._plan is not None
    policy._plan.in_full = {requests[1]}
    assert policy.admit(requests, [3, 3], np.full((2, 4), -9.0), 0) == [0, 3]


def test_now_and_then_a_step_is_plain_while_drafting_pays() -> None:
    """Or nobody would know what drafting costs beside it."""
    policy, request = AutoPolicy(cost_of(0.01, draft_len=4)), some_request()
    nearly = AutoPolicy(cost_of(0.0, draft=2.4, draft_len=4), Calibration({}, {"ratio": (0.85,) * 4}))
    lens = [policy.plan([request], [4], 100)[0] for _ in range(FIRST_TIMES * PLAIN_SOON)]
    assert all(lens), "not beside a prompt, where its time would not tell"
    lens = [policy.plan([request], [4], 0)[0] for _ in range(FIRST_TIMES * (PLAIN_SOON - 1 + PLAIN_RUN))]
    assert lens.count(0) == FIRST_TIMES * PLAIN_RUN, "soon, for the first times"
    assert lens[PLAIN_SOON - 1 :][:PLAIN_RUN] == [0] * PLAIN_RUN
    lens = [policy.plan([request], [4], 0)[0] for _ in range(3 * (PLAIN_EVERY - 1 + PLAIN_RUN))]
    assert lens.count(0) == 3 * PLAIN_RUN
    for _ in range(100):
        policy.observe_step(step(1.0))
    lens = [policy.plan([request], [4], 0)[0] for _ in range(2 * (PLAIN_RARELY - 1 + PLAIN_RUN))]
    assert lens.count(0) == 2 * PLAIN_RUN, "more rarely once it is known"
    for _ in range(100):
        nearly.observe_step(step(1.0))
    lens = [nearly.plan([request], [4], 0)[0] for _ in range(PLAIN_RARELY)]
    runs = PLAIN_RARELY // (PLAIN_LATER + PLAIN_RUN)
    assert runs <= lens.count(0) / PLAIN_RUN <= runs + FIRST_TIMES, "less rarely where it gains little"


@pytest.mark.parametrize("fixed", [0, 1, 3])
def test_a_fixed_length_is_an_upper_limit(fixed: int) -> None:
    requests = [some_request() for _ in range(3)]
    assert FixedLength(fixed).plan(requests, [7, 2, 0], 0) == [min(fixed, 7), min(fixed, 2), 0]


def step(seconds: float, drafting: int = 0, prefill: int = 0) -> StepOutcome:
    return StepOutcome(seconds, 1, drafting, 1 + drafting + prefill, drafting, prefill, context=0.0)


def test_what_drafting_costs_beyond_the_measured_makes_it_rarer() -> None:
    policy, request = AutoPolicy(cost_of(0.1, draft=0.4, draft_len=4)), some_request()
    assert policy.plan([request], [4], 0)[0] > 0
    for _ in range(400):
        for _ in range(SETTLED + 1):
            policy.observe_step(step(policy.cost.seconds(1, 0, 1)))
        policy.observe_step(step(3.0 * policy.cost.seconds(2, 0, 1, 1, 1), drafting=1))
    assert policy.plan([request], [4], 0) == [0]


def test_what_is_tried_is_learnt_from_by_its_outcome() -> None:
    """Nobody would draft by himself: all of a try is verified, and confidence has nothing to choose from."""
    policy, request = AutoPolicy(cost_of(0.9, draft=0.5, draft_len=4), Calibration.raw(4)), some_request()
    policy.plan([request], [4], 0)
    assert policy._plan is not None
    assert not any(policy._plan.draft.lens)
    assert not policy._plan.by_confidence
