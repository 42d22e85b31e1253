"""What earlier rounds and costs call for: slots to spare, whether confidence decides, what a prompt changes."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_core.checkpoint.calibration import Calibration
from dspark_core.step_cost import CostCurves, StepCost
from server.auto_policy import AutoPolicy
from tests.server.policies import cost_of, one_round
from tests.server.test_policy import some_request


@pytest.mark.parametrize(("slot", "spare"), [(0.0, 2), (0.03, 1), (0.1, 0)])
def test_slots_are_to_spare_where_they_cost_little(slot: float, spare: int) -> None:
    """For today's confidence to choose from: of a step of about 2 seconds they take 2 % at most."""
    curves = CostCurves([1, 64], [1.0, 1 + 63 * 0.5], [1, 64], [0.1] * 2, [0.1 + 3 * slot] * 2, 4)
    known, request = {"ratio": (0.75,) * 4}, some_request()
    with_head = AutoPolicy(StepCost(curves), Calibration(Calibration.raw(2).regimes, known))
    without = AutoPolicy(StepCost(curves))
    without.history = with_head.history
    plans = [policy.plan([request], [4], 0)[0] for policy in (with_head, without)]
    assert 0 < plans[1] < 4
    assert plans[0] == min(plans[1] + spare, 4)
    assert with_head.plan([request], [plans[1]], 0) == [plans[1]], "within the limit"


def test_a_longer_context_may_make_drafting_pay_less() -> None:
    curves = cost_of(0.1, draft_len=4).curves
    policy, request = AutoPolicy(StepCost(curves, per_row=0.01)), some_request()
    short = policy.plan([request], [4], 0)
    request.table.kv_len = 2000
    assert policy.plan([request], [4], 0)[0] < short[0]


@pytest.mark.parametrize(("scale", "slot", "chooses"), [(1.0, 0.1, True), (0.02, 0.1, False), (0.02, 0.0, True)])
def test_confidence_decides_where_that_takes_no_time_to_speak_of(scale: float, slot: float, chooses: bool) -> None:
    """Steps of some 40 ms with dear slots are verified as they were drafted, and learnt from by their outcomes."""
    curves = CostCurves([1, 64], [scale, 3 * scale], [1, 64], [0.1 * scale] * 2, [(0.1 + 3 * slot) * scale] * 2, 4)
    policy, request = AutoPolicy(StepCost(curves), Calibration.raw(4)), some_request()
    (slots,) = policy.plan([request], [4], 0)
    assert slots
    (length,) = policy.admit([request], [slots], np.full((1, slots), -9.0), 0)
    assert length == (0 if chooses else slots)
    policy.observe(one_round(request, [-9.0] * slots, drafted=slots, verified=length, accepted=length))
    promised = policy.history.survival([request])[0, 0]
    assert (promised < 0.7) == chooses, "by what it promised, or by what it kept"


def test_a_prompt_in_the_pass_is_no_reason_to_verify_more() -> None:
    policy, request = AutoPolicy(cost_of(0.2, draft_len=4), Calibration.raw(4)), some_request()
    policy.plan([request], [4], 0)
    assert policy._plan is not None
    alone = policy._plan.rate
    policy.plan([request], [4], 500)
    assert policy._plan.draft.rate < alone / 10
    assert policy._plan.rate == alone
