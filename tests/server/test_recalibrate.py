"""Recalibration in service: by rounds that a coin chose before drafting, in a process of its own, and never fatal."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from dspark_core.checkpoint.calibration import Calibration, Scaling
from dspark_core.checkpoint.origin import Origin
from dspark_core.sampling import SamplingParams
from server.auto_policy import AutoPolicy
from server.policy import Rounds
from server.recalibrate import OnlineRecalibration
from tests.server.drafts import ConfidentDrafter
from tests.server.engines import make_engine, run, tiny_target
from tests.server.policies import Eager, cost_of
from tests.server.test_policy import GREEDY, RequestParams, make_prompt, plain, some_request

K = 2
ORIGIN = Origin("a", "b", K, "float32", "exact", "cpu", "", 2)
RAW = Calibration.raw(K)


def feed(
    online: OnlineRecalibration,
    policy: AutoPolicy,
    count: int,
    seed: int = 0,
    sampling: SamplingParams | None = None,
) -> None:
    """Blocks that survive more rarely than the head says, by a nearly constant amount."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        request = some_request()
        request.params = RequestParams(sampling or SamplingParams())
        request.key = int(random.integers(2**40))
        while policy.plan([request], [K], 0) == [0]:  # plain steps, now and then
            pass
        logits = random.normal(size=(1, K))
        assert policy.admit([request], [K], logits, 0) == [K], "whole blocks, whatever their confidence"
        stands = random.random(K) < 1 / (1 + np.exp(-(logits[0] - 1.5)))
        accepted = int(stands[0]) + int(stands.all())
        counts = (np.array([n]) for n in (K, K, min(accepted + 1, K), accepted))
        online.observe(Rounds([request], logits, *counts))


def finish(online: OnlineRecalibration) -> None:
    """Look at the process as steps would."""
    empty = Rounds([], None, *(np.array([], int) for _ in range(4)))
    for _ in range(600):
        online.observe(empty)
        if online._fit is None:
            return
        time.sleep(0.05)
    pytest.fail("the fit does not end")


def test_a_head_that_promises_too_much_is_brought_down() -> None:
    policy = AutoPolicy(cost_of(0.01), RAW)
    online = OnlineRecalibration(policy, ORIGIN, share=1.0, every=1500)
    feed(online, policy, 1500)
    assert online._fit is not None
    finish(online)
    assert policy.calibration is not None
    assert policy.calibration is not RAW
    assert policy.calibration.regimes["ratio"].biases == pytest.approx((-1.5, -1.5), abs=0.5)


def test_a_way_of_sampling_that_was_hardly_used_keeps_what_was_known_of_it() -> None:
    known = Calibration({"ratio": Scaling((1.0, 1.0), (0.5, 0.5)), "greedy": Scaling((2.0, 2.0), (0.0, 0.0))})
    policy = AutoPolicy(cost_of(0.01), known)
    online = OnlineRecalibration(policy, ORIGIN, share=1.0, every=1200)
    feed(online, policy, 1150)
    feed(online, policy, 50, seed=1, sampling=GREEDY)
    finish(online)
    assert policy.calibration is not None
    assert policy.calibration.regimes["greedy"] == known.regimes["greedy"]
    assert policy.calibration.regimes["ratio"].biases[0] < 0
    assert policy.calibration.source.count("refitted") == 1


def test_traffic_of_one_kind_is_enough() -> None:
    policy = AutoPolicy(cost_of(0.01), RAW)
    online = OnlineRecalibration(policy, ORIGIN, share=1.0, every=1200)
    feed(online, policy, 1200, sampling=GREEDY)
    finish(online)
    assert policy.calibration is not None
    assert policy.calibration.regimes["greedy"].biases[0] == pytest.approx(-1.5, abs=0.5)
    assert policy.calibration.regimes["ratio"] == RAW.regimes["ratio"]


def test_a_full_disk_fails_no_request(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(**_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("server.recalibrate.tempfile.mkdtemp", full)
    policy = AutoPolicy(cost_of(0.01), RAW)
    online = OnlineRecalibration(policy, ORIGIN, share=1.0, every=10)
    feed(online, policy, 10)
    assert "No space left" in caplog.text
    assert policy.calibration is RAW


def test_what_was_not_verified_in_full_is_not_kept() -> None:
    policy = AutoPolicy(cost_of(0.01), RAW)
    online = OnlineRecalibration(policy, ORIGIN, share=1.0)
    request = some_request()
    policy.plan([request], [K], 0)
    counts = (np.array([n]) for n in (K, K - 1, K - 1, K - 1))
    online.observe(Rounds([request], np.zeros((1, K)), *counts))
    assert not online._records


def test_a_fit_that_fails_leaves_things_as_they_were(caplog: pytest.LogCaptureFixture) -> None:
    policy = AutoPolicy(cost_of(0.01), RAW)
    online = OnlineRecalibration(policy, ORIGIN, share=1.0, every=1)
    request = some_request()
    policy.plan([request], [K], 0)
    policy.admit([request], [K], np.zeros((1, K)), 0)
    online.observe(Rounds([request], np.full((1, K), np.nan), *(np.array([1]) for _ in range(4))))
    finish(online)
    assert policy.calibration is RAW
    assert "recalibration failed, the calibration stays as it was" in caplog.text


def test_only_what_the_coin_chose_is_kept_and_texts_are_the_same() -> None:
    policy = Eager(cost_of(0.05, start=10.0), RAW)
    engine = make_engine(ConfidentDrafter(K, tiny_target(), lambda token: -6.0))
    engine.policy = policy
    online = OnlineRecalibration(policy, ORIGIN, share=0.3, every=10**9)
    engine.observers.append(online.observe)
    jobs = [(make_prompt(size), RequestParams(GREEDY, max_tokens=40)) for size in (1, 17, 64, 130)]
    for result in run(engine, jobs):
        assert result.ids == plain(GREEDY, len(result.request.prompt_ids))
    kept = [record["rounds"][0] for record in online._records]
    assert kept
    assert all(record["decided"] >= 1 for record in kept), "verified, though the confidence says it is in vain"
    assert json.dumps(list(online._records))
    skipped = [slots for slots, length in policy.seen if length == 0]
    assert len(skipped) > len(kept), "the others were left to their confidence"
