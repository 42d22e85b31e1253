"""What is counted and compared in service, and what the log makes of it."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest

from dspark_core.checkpoint.calibration import Calibration
from server.auto_policy import AutoPolicy
from server.policy import Rounds, StepOutcome
from server.watch import ENOUGH, Watch
from tests.server.drafts import ConfidentDrafter
from tests.server.engines import make_engine, run, tiny_target
from tests.server.policies import Eager, cost_of, one_round
from tests.server.test_policy import GREEDY, RequestParams, make_prompt, some_request

K = 2


def logit(token: int) -> float:
    return 1.0 if token % 2 else -1.0


def watched(engine_policy: AutoPolicy | None = None) -> Watch:
    engine = make_engine(ConfidentDrafter(K, tiny_target(), logit))
    engine.policy = engine_policy or AutoPolicy(cost_of(0.1), Calibration.raw(K))
    return Watch(engine)


def test_counts_are_those_of_the_requests() -> None:
    watch = watched(Eager(cost_of(0.05, start=10.0), Calibration.raw(K)))
    jobs = [(make_prompt(size), RequestParams(GREEDY, max_tokens=30)) for size in (3, 20)]
    spent = [result.last.speculation for result in run(watch.engine, jobs)]
    counts = watch.counts
    assert counts.rounds == sum(one.rounds for one in spent)
    assert counts.drafted == sum(one.drafted for one in spent)
    assert counts.verified == sum(one.verified for one in spent)
    assert counts.accepted == sum(one.accepted for one in spent) == sum(counts.accepted_at)
    assert counts.plain_rounds == 2 * 30 - counts.accepted - counts.rounds
    assert counts.predicted > 0
    assert counts.seconds > 0
    assert counts.predicted_seconds > 0


def test_what_was_read_is_of_one_moment() -> None:
    watch, request = watched(), some_request()
    watch.observe(one_round(request, [1.0, 1.0], drafted=2, verified=2, accepted=2))
    counts, errors = watch.read()
    assert (counts.rounds, counts.accepted, counts.accepted_at) == (1, 2, [1, 1])
    before = errors.copy()
    watch.observe(one_round(request, [1.0, 1.0], drafted=2, verified=2, accepted=0))
    assert (counts.rounds, counts.accepted, counts.accepted_at) == (1, 2, [1, 1])
    assert errors.tolist() == before.tolist() != watch.errors.tolist()


def test_nobody_reads_half_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watched()
    reader = threading.Thread(target=watch.read)
    count = watch._count

    def while_somebody_reads(rounds: Rounds) -> None:
        reader.start()
        reader.join(0.05)
        assert reader.is_alive()
        count(rounds)

    monkeypatch.setattr(watch, "_count", while_somebody_reads)
    watch.observe(one_round(some_request(), [1.0, 1.0], drafted=2, verified=2, accepted=2))
    reader.join()


def test_the_running_error_is_that_of_the_last_rounds() -> None:
    watch, request = watched(), some_request()
    assert np.isnan(watch.errors).all()
    one, half = 1 / (1 + np.exp(-1.0)), 0.5
    for number in range(300):
        watch.observe(one_round(request, [1.0, 0.0], drafted=2, verified=2, accepted=number % 2))
    assert watch.errors == pytest.approx([one - half, one * half], abs=0.01)
    assert watch.counts.predicted == pytest.approx(300 * (one + one * half))


def test_what_nobody_knows_is_not_compared() -> None:
    """Slots that were not verified, and those after the end of a text."""
    watch, request = watched(), some_request()
    watch.observe(one_round(request, [1.0, 1.0], drafted=2, verified=1, accepted=1))
    watch.observe(one_round(request, [1.0, 1.0], drafted=2, verified=2, accepted=1, decided=1))
    watch.observe(one_round(request, [1.0, np.nan], drafted=2, verified=2, accepted=2))
    assert watch._sums[0].sum(-1) == pytest.approx([3, 0], rel=0.01)


def test_a_drift_of_confidence_is_said_once_with_advice(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, request, now = watched(), some_request(), [0.0]
    monkeypatch.setattr("server.watch.time.monotonic", lambda: now[0])
    watch._next_look = 0.0
    for number in range(3 * ENOUGH):
        now[0] += 0.1
        watch.observe(one_round(request, [3.0, 3.0], drafted=2, verified=2, accepted=2 * (number % 3 > 0)))
    assert caplog.text.count("drift") == 1
    assert re.search(r"0\.\d\d of the drafts that confidence promised were accepted; run dspark-calibrate", caplog.text)
    now[0] += 700
    watch.observe(one_round(request, [3.0, 3.0], drafted=2, verified=2, accepted=0))
    assert caplog.text.count("drift") == 2, "and again after a while"


def test_a_position_that_is_wrong_both_ways_is_noticed_too() -> None:
    watch, request = watched(), some_request()
    for number in range(3 * ENOUGH):
        sure = number % 2 == 0
        kept = number % 4 < 2  # whatever the confidence
        watch.observe(one_round(request, [2.0 if sure else -2.0] * 2, drafted=2, verified=1, accepted=int(kept)))
    assert ["position 1" in text for text in watch.complaints()] == [True]


def test_steps_that_take_longer_than_measured_are_noticed() -> None:
    watch = watched()
    policy = watch.engine.policy
    for factor, expected in ((1.2, []), (1.9, ["dspark-calibrate profile"])):
        for _ in range(8000):
            outcome = StepOutcome(factor * policy.cost.seconds(1, 0, 1), 1, 0, 1, 0, 0, 0.0)
            policy.observe_step(outcome)
            watch.observe_step(outcome)
        assert [text[-len(expected[0]) :] if expected else text for text in watch.complaints()] == expected


def test_a_calibrated_server_has_nothing_to_complain_of() -> None:
    watch, request, random = watched(), some_request(), np.random.default_rng(0)
    for _ in range(3 * ENOUGH):
        logits = random.normal(size=2)
        stands = random.random(2) < 1 / (1 + np.exp(-logits))
        accepted = int(stands[0]) + int(stands.all())
        watch.observe(one_round(request, logits.tolist(), drafted=2, verified=2, accepted=accepted))
    assert watch.complaints() == []
