"""What earlier rounds say: against sums written out, request by request and round by round."""

from __future__ import annotations

import gc
import math
from dataclasses import replace

import numpy as np
import pytest

from dspark_core.sampling import SamplingParams
from server.history import ALL_MEMORY, CORRECTION_PRIOR, KNOWN_WEIGHT, OWN_MEMORY, OWN_PRIOR, START, History
from server.policy import Rounds
from server.request import RequestParams
from tests.server.engines import GREEDY
from tests.server.policies import one_round
from tests.server.test_policy import some_request

K = 4


class Slow:
    """One request's sums, or those of all, without arrays."""

    def __init__(self, memory: float) -> None:
        self.keep, self.reached, self.stood = math.exp(-1 / memory), [0.0] * K, [0.0] * K

    def observe(self, decided: int, accepted: int) -> None:
        for k in range(K):
            self.reached[k] = self.reached[k] * self.keep + (k < decided)
            self.stood[k] = self.stood[k] * self.keep + (k < accepted)

    def rate(self, k: int, prior: float, weight: float) -> float:
        return (self.stood[k] + prior * weight) / (self.reached[k] + weight)


def test_outcomes_are_summed_by_request_and_over_all() -> None:
    random, history = np.random.default_rng(0), History(K)
    requests = [some_request() for _ in range(40)]  # more than there is room for at first
    own, everything = [Slow(OWN_MEMORY) for _ in requests], Slow(ALL_MEMORY)
    for _ in range(200):
        i = int(random.integers(len(requests)))
        accepted = int(random.integers(0, K + 1))
        decided = min(accepted + 1, K)
        history.observe(one_round(requests[i], None, drafted=K, verified=K, accepted=accepted), None)
        own[i].observe(decided, accepted)
        everything.observe(decided, accepted)
    base = [everything.rate(k, START, 1.0) for k in range(K)]
    expected = [np.cumprod([one.rate(k, base[k], OWN_PRIOR) for k in range(K)]) for one in own]
    assert history.survival(requests) == pytest.approx(np.array(expected))
    assert history.rounds == 200


def test_a_step_of_many_is_as_many_rounds() -> None:
    requests = [some_request(), some_request()]
    together, apart = History(K), History(K)
    counts = [np.array([4, 4]), np.array([4, 2]), np.array([3, 2]), np.array([2, 2])]
    together.observe(Rounds(requests, None, *counts), None)
    for row, request in enumerate(requests):
        apart.observe(Rounds([request], None, *(count[row : row + 1] for count in counts)), None)
    assert together.survival(requests) == pytest.approx(apart.survival(requests), rel=0.02)


def test_steps_that_are_learnt_from_together_fade_as_those_learnt_from_one_by_one() -> None:
    source, together, apart = np.random.default_rng(1), History(K), History(K)
    requests = [some_request(RequestParams(SamplingParams(seed=seed))) for seed in (None, None, 3)]
    steps = []
    for rows in ([0, 1, 2], [1], [2, 0], [1, 0]):
        accepted = source.integers(0, K + 1, len(rows))
        counts = [np.full(len(rows), K), np.full(len(rows), K), np.minimum(accepted + 1, K), accepted]
        steps.append(Rounds([requests[row] for row in rows], source.normal(size=(len(rows), K)), *counts))
    nobody_looked = [np.array([2]), np.array([2]), np.array([2]), np.array([1])]
    narrow = Rounds([requests[0]], np.array([[0.5, -0.5]]), *nobody_looked)
    for step in steps:
        assert step.logits is not None
        apart.observe(step, 1 / (1 + np.exp(-step.logits)))
    joined = Rounds.together(steps)
    assert joined.logits is not None
    mixed = Rounds.together([narrow, replace(narrow, logits=None), steps[0]])
    assert mixed.logits is not None
    assert mixed.logits.shape == (5, K)
    assert mixed.logits[0, :2].tolist() == [0.5, -0.5]
    assert np.isnan(mixed.logits[0, 2:]).all()
    assert np.isnan(mixed.logits[1]).all()
    assert mixed.drafted.tolist() == [2, 2, K, K, K]
    assert Rounds.together([replace(narrow, logits=None)] * 2).logits is None
    together.observe(joined, 1 / (1 + np.exp(-joined.logits)), [len(step.requests) for step in steps])
    assert together.correction(requests) == pytest.approx(apart.correction(requests))
    by_outcome = History(K), History(K)
    for step in steps:
        by_outcome[0].observe(step, None)
    by_outcome[1].observe(joined, None, [len(step.requests) for step in steps])
    assert by_outcome[1].survival(requests) == pytest.approx(by_outcome[0].survival(requests))
    assert together.rounds == apart.rounds == 8


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_rounds_without_confidence_are_not_corrected_for_what_others_promised(share: float) -> None:
    """Slots are promised 0.9 and stand with 0.6: whatever is looked at, that is what is expected."""
    source, history, request = np.random.default_rng(0), History(K), some_request()
    for _ in range(3000):
        accepted = int(np.argmin(np.append(source.random(K) < 0.6, False)))
        told = np.full((1, K), 0.9) if source.random() < share else None
        history.observe(one_round(request, None, drafted=K, verified=K, accepted=accepted), told)
    assert history.survival([some_request()])[0, 0] == pytest.approx(0.6, abs=0.07)


def test_confidence_counts_for_all_slots_whether_verified_or_not() -> None:
    history, request = History(K), some_request()
    for _ in range(300):
        history.observe(one_round(request, None, drafted=K, verified=0, accepted=0), np.array([[0.9, 0.8, 0.5, 0.1]]))
    assert history.survival([request])[0] == pytest.approx([0.9, 0.72, 0.36, 0.036], rel=0.1)
    assert history.correction([request]) == pytest.approx([1.0]), "nothing was verified: nothing to correct by"


def test_outcomes_correct_the_confidence() -> None:
    history, request = History(K), some_request()
    for _ in range(300):
        history.observe(
            one_round(request, None, drafted=2, verified=2, accepted=1), np.array([[0.9, 0.7, np.nan, 0.0]])
        )
    weight = 1 / (1 - math.exp(-1 / OWN_MEMORY))
    expected = (weight + CORRECTION_PRIOR * 0.64) / (1.6 * weight + CORRECTION_PRIOR)
    assert history.correction([request])[0] == pytest.approx(expected, rel=0.02)
    assert (np.diff(history.survival([request])[0]) <= 0).all()


def test_ends_of_texts_do_not_bias_the_correction() -> None:
    """A calibrated head needs none, however short the texts are."""
    random, history, request = np.random.default_rng(0), History(K), some_request()
    for _ in range(4000):
        confidence = random.random(K)
        stands, end = random.random(K) < confidence, int(random.integers(1, 3 * K))
        accepted = min(int(np.argmin(np.append(stands, False))), end)
        decided = accepted if accepted == end else min(accepted + 1, K)
        rounds = one_round(request, None, drafted=K, verified=K, accepted=accepted, decided=decided)
        history.observe(rounds, confidence[None])
    assert history._all.correction(np.array([0]), 1.0) == pytest.approx([1.0], abs=0.1)


def test_a_block_whose_confidence_is_no_number_is_judged_by_its_outcome() -> None:
    by_outcome, told = History(K), History(K)
    request = some_request()
    rounds = one_round(request, None, drafted=3, verified=3, accepted=1)
    by_outcome.observe(rounds, None)
    told.observe(rounds, np.array([[0.9, np.nan, 0.1, 0.1]]))
    assert told.survival([request]) == pytest.approx(by_outcome.survival([request]))


def test_places_of_requests_that_are_gone_are_used_again_and_clean() -> None:
    history = History(K)
    gc.freeze()  # all that other tests left behind is not looked through each time
    for _ in range(40):
        request = some_request()
        history.observe(one_round(request, None, drafted=K, verified=K, accepted=0), None)
        del request
        gc.collect()
    gc.unfreeze()
    assert len(history._own.predicted) == 16
    fresh, base = some_request(), History(K)
    base._all = history._all
    assert history.survival([fresh]) == pytest.approx(base.survival([some_request()]))


def test_what_calibration_knows_is_where_a_server_begins() -> None:
    known, ignorant = History(K, {"ratio": [0.3, 0.2, 0.1, 0.1], "greedy": [0.9, 0.5, 0.5, 0.5]}), History(K)
    requests = [some_request()]
    greedy, seeded = (some_request(RequestParams(sampling)) for sampling in (GREEDY, SamplingParams(seed=1)))
    assert known.survival([greedy])[0] == pytest.approx(np.cumprod([0.9, 0.5, 0.5, 0.5]))
    assert known.survival([seeded])[0] == pytest.approx(np.cumprod([0.3, 0.2, 0.1, 0.1])), (
        "as ratio, for want of its own"
    )
    assert known.survival(requests)[0] == pytest.approx(np.cumprod([0.3, 0.2, 0.1, 0.1]))
    assert ignorant.survival(requests)[0] == pytest.approx(np.cumprod([START] * K))
    for history in (known, ignorant):
        for _ in range(300):
            history.observe(one_round(some_request(), None, drafted=K, verified=K, accepted=K), None)
    assert known.survival(requests)[0, 0] > 0.8, "and learns"
    assert known.survival([greedy])[0, 0] == pytest.approx(0.9), "of the rule by which these were sampled"


def test_hope_is_for_what_is_not_known_yet() -> None:
    history, request = History(K, {"ratio": [0.4, 0.3, 0.2, 0.1]}), some_request()
    usual, hoped = history.survival([request]), history.survival([request], hope=1.0)
    assert hoped[0, 0] == pytest.approx(0.4 + math.sqrt(0.4 * 0.6 / KNOWN_WEIGHT))
    assert (hoped > usual).all()
    random = np.random.default_rng(0)
    for _ in range(300):
        accepted = int(random.random() < 0.4)
        history.observe(one_round(some_request(), None, drafted=K, verified=K, accepted=accepted), None)
    later = history.survival([request], hope=1.0) - history.survival([request])
    assert history.survival([request])[0, 0] == pytest.approx(0.4, abs=0.1)
    assert 0 < later[0, 0] < 0.6 * (hoped - usual)[0, 0], "less of it, the more is known"
