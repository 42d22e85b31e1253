"""Steps are compared with what was measured beforehand, by what they hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from server.cost_watch import SETTLED, CostWatch
from tests.server.policies import cost_of
from tests.server.test_auto_policy import step


def factor(watch: CostWatch) -> float:
    """Of a size of pass that nobody has seen."""
    return float(watch.factors(np.array([100_000]))[0])


def see_plain(watch: CostWatch, seconds: float) -> None:
    """One that counts."""
    for _ in range(SETTLED + 1):
        watch.observe(step(seconds))


def test_step_times_are_compared_with_what_was_predicted() -> None:
    watch = CostWatch(cost_of(0.0))
    assert factor(watch) == 1.0
    for _ in range(400):
        see_plain(watch, 1.1)
        watch.observe(step(1.32, drafting=1))
        watch.observe(step(9.0, drafting=1, prefill=50))
        watch.observe(replace(step(9.0, drafting=1), caught_up=17))
    assert watch.plain == pytest.approx(1.1, rel=0.01)
    assert factor(watch) == pytest.approx(1.17, rel=0.01), "nearly: eight steps in which both are alike count too"
    see_plain(watch, 1.1)
    watch.observe(step(500.0))
    assert watch.plain < 1.15, "one interrupted step says little"


def test_plain_steps_right_after_a_draft_do_not_count() -> None:
    watch = CostWatch(cost_of(0.0))
    watch.observe(step(1.0))
    for _ in range(50):
        watch.observe(step(2.0, drafting=1))
        for _ in range(SETTLED):
            watch.observe(step(1.3))
    assert (watch.plain, watch.plain_steps) == (1.0, 1)


def test_a_machine_that_became_another_one_is_noticed() -> None:
    """Plain steps were slow once; a few looks at them, long after, tell that they are not any more."""
    watch = CostWatch(cost_of(0.0))
    for _ in range(100):
        watch.observe(step(1.3))
    for _ in range(10):
        for _ in range(128):
            watch.observe(step(1.2, drafting=1))
        for _ in range(SETTLED + 4):
            watch.observe(step(1.0))
    assert watch.plain == pytest.approx(1.0, rel=0.01)
    assert factor(watch) == pytest.approx(1.17, abs=0.01)


def test_a_slow_machine_is_no_reason_not_to_draft() -> None:
    watch = CostWatch(cost_of(0.0))
    for _ in range(100):
        watch.observe(step(1.8, drafting=1))
    assert factor(watch) == 1.0, "plain steps may be as slow: nobody has seen one"
    see_plain(watch, 1.8)
    assert factor(watch) < 1.1


def test_a_size_of_pass_that_was_measured_badly_is_found_out_by_itself() -> None:
    watch = CostWatch(cost_of(0.0))
    for _ in range(200):
        see_plain(watch, 1.0)
        watch.observe(replace(step(1.1, drafting=1), batch_tokens=6))
        watch.observe(replace(step(1.5, drafting=1), batch_tokens=9))
    found = watch.factors(np.array([6, 9, 20, 100_000]))
    assert found[0] == pytest.approx(1.1, rel=0.05)
    assert found[1] == pytest.approx(1.4, rel=0.05), "nearly: fifty steps count, and eight in which both are alike"
    for _ in range(2000):
        see_plain(watch, 1.0)
        watch.observe(replace(step(1.1, drafting=1), batch_tokens=6))
    assert watch.factors(np.array([9]))[0] == pytest.approx(1.1, rel=0.03), "and what was long ago is forgotten"
    watch = CostWatch(cost_of(0.0))
    for _ in range(200):
        see_plain(watch, 1.0)
        watch.observe(replace(step(1.1, drafting=1), batch_tokens=6))
        watch.observe(replace(step(1.5, drafting=1), batch_tokens=9))
    found = watch.factors(np.array([20, 100_000]))
    assert found[0] == found[1] == pytest.approx(1.26, rel=0.05), "sizes that nobody saw are like all others"
