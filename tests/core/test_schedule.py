"""The choice of draft lengths: the best of all, by brute force; and the estimates it is made from."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dspark_core.schedule import admit_above, choose_draft_lens, choose_verify_lens
from dspark_core.step_cost import CostCurves, StepCost


def cost_of(verify: dict[int, float], draft: tuple[float, float] = (0.0, 0.0), draft_len: int = 3) -> CostCurves:
    """A draft costs `draft[0]` and, for each slot after the first, a share of `draft[1]`, whatever the requests."""
    return CostCurves(list(verify), list(verify.values()), [1, 8], [draft[0]] * 2, [sum(draft)] * 2, draft_len)


LINEAR = cost_of({1: 1.0, 64: 64.0})
FLAT = cost_of({1: 1.0, 64: 1.0})


def rate(survival: np.ndarray, lens: tuple[int, ...], cost: CostCurves, other: int = 0) -> float:
    """Tokens a second of a choice."""
    tokens = len(lens) + other + sum(survival[i, :length].sum() for i, length in enumerate(lens))
    batch, drafting = len(lens) + other + sum(lens), sum(length > 0 for length in lens)
    as_array = [np.array(float(value)) for value in (batch, drafting, sum(lens))]
    return float(tokens / (cost.verify_seconds(as_array[0]) + cost.draft_seconds(as_array[1], as_array[2])))


@pytest.mark.parametrize("seed", range(40))
def test_no_prefix_of_the_ranking_is_better(seed: int) -> None:
    random = np.random.default_rng(seed)
    requests, slots = random.integers(1, 4), 3
    survival = random.random((requests, slots)).cumprod(-1)
    verify = dict(zip((1, 2, 4, 7, 12), np.cumsum(random.random(5)) + 0.2, strict=True))
    cost = cost_of(verify, tuple(random.random(2) * 0.5))
    limits, other = random.integers(0, slots + 1, requests).tolist(), int(random.integers(0, 3))
    chosen = tuple(choose_draft_lens(survival, limits, cost, others=other).lens)
    assert all(length <= limit for length, limit in zip(chosen, limits, strict=True))
    ranked = sorted((-survival[i, k], i, k) for i in range(requests) for k in range(limits[i]))
    prefixes = [
        tuple(sum(owner == i for _, owner, _ in ranked[:size]) for i in range(requests))
        for size in range(len(ranked) + 1)
    ]
    best = max(rate(survival, lens, cost, other) for lens in prefixes)
    assert rate(survival, chosen, cost, other) == pytest.approx(best)


def test_where_tokens_cost_nothing_all_are_drafted_and_where_they_cost_most_none() -> None:
    survival = np.array([[0.9, 0.8, 0.7], [0.3, 0.1, 0.01]])
    assert choose_draft_lens(survival, [3, 3], FLAT).lens == [3, 3]
    assert choose_draft_lens(survival, [3, 3], LINEAR).lens == [0, 0]


def test_easy_and_hard_requests_share_a_batch() -> None:
    survival = np.array([[0.9, 0.8, 0.7], [0.1, 0.01, 0.001]])
    halfway = cost_of({1: 1.0, 64: 1.0 + 63 * 0.4})
    assert choose_draft_lens(survival, [3, 3], halfway).lens == [3, 0]


def test_the_draft_s_own_cost_counts() -> None:
    survival = np.array([[0.5, 0.2, 0.1]])
    assert choose_draft_lens(survival, [3], cost_of({1: 1.0, 64: 1.0}, (0.4, 0.0))).lens == [3]
    assert choose_draft_lens(survival, [3], cost_of({1: 1.0, 64: 1.0}, (0.4, 1.0))).lens == [1]
    assert choose_draft_lens(survival, [3], cost_of({1: 1.0, 64: 1.0}, (0.9, 0.0))).lens == [0]


def test_a_jagged_curve_does_not_trap_the_search() -> None:
    """Two tokens cost more than four, as on some CPUs."""
    jagged = cost_of({1: 1.0, 2: 2.5, 3: 2.5, 4: 1.1})
    survival = np.array([[0.6, 0.5, 0.4]])
    assert choose_draft_lens(survival, [3], jagged).lens == [3]


def test_costs_between_and_beyond_what_was_measured() -> None:
    cost = CostCurves([1, 3], [1.0, 2.0], [1, 4], [1.0, 4.0], [3.0, 12.0], draft_len=5)
    assert cost.verify_seconds(np.array([1.0, 2.0, 5.0])).tolist() == [1.0, 1.5, 3.0]
    assert cost.draft_seconds(np.array([0.0, 1.0, 1.0, 2.0, 8.0]), np.array([0.0, 1.0, 5.0, 6.0, 8.0])).tolist() == [
        0.0, 1.0, 3.0, 4.0, 8.0,
    ]  # fmt: skip


def test_every_choice_is_quick_enough_to_try() -> None:
    """256 requests of 7 slots: the whole curve of 1792 points, with ties."""
    survival = np.tile(np.linspace(0.9, 0.1, 7), (256, 1))
    lens = choose_draft_lens(survival, [7] * 256, cost_of({1: 1.0, 512: 2.0, 2048: 9.0}, draft_len=7)).lens
    assert len(lens) == 256
    assert sum(lens) in range(1, 1793)
    assert all(len(set(pair)) <= 2 for pair in itertools.pairwise(lens))


def instance(seed: int) -> tuple[np.ndarray, list[int]]:
    random = np.random.default_rng(seed)
    requests, slots = int(random.integers(1, 4)), 3
    survival = random.choice([0.0, 0.25, 0.5, 0.9, 1.0], (requests, slots)) * random.choice([1.0, random.random()])
    return survival.cumprod(-1), random.integers(0, slots + 1, requests).tolist()


def algorithm_1(survival: np.ndarray, limits: list[int], seconds: np.ndarray, others: float = 0) -> list[int]:
    """As the paper writes it down, one candidate after the other."""
    ranked = sorted((-survival[r, k], r, k) for r in range(len(survival)) for k in range(limits[r]))
    lens, tokens, admitted = [0] * len(survival), len(survival) + others, 0
    for negative, r, k in ranked:
        if (tokens - negative) / seconds[admitted + 1] <= tokens / seconds[admitted]:
            break
        assert lens[r] == k, "a prefix"
        lens[r], tokens, admitted = k + 1, tokens - negative, admitted + 1
    return lens


@pytest.mark.parametrize("seed", range(60))
def test_verify_lengths_are_those_of_algorithm_1(seed: int) -> None:
    """Ties and saturated confidence included."""
    survival, limits = instance(seed)
    random = np.random.default_rng(seed + 1000)
    seconds = np.cumsum(random.random(sum(limits) + 1) * random.choice([0.1, 1.0])) + 1
    for others in (0, 2.0):
        assert choose_verify_lens(survival, limits, seconds, others=others) == algorithm_1(
            survival, limits, seconds, others
        )


@pytest.mark.parametrize("seed", range(60))
def test_verify_lengths_are_the_best_of_all_where_the_rate_rises_and_then_falls(seed: int) -> None:
    survival, limits = instance(seed)
    for slope in (0.05, 0.2, 0.5, 0.9):
        seconds = 1 + slope * np.arange(sum(limits) + 1.0)  # on a straight line it does
        chosen = choose_verify_lens(survival, limits, seconds)

        def rate_of(lens: tuple[int, ...], seconds: np.ndarray = seconds) -> float:
            gain = sum(survival[i, :length].sum() for i, length in enumerate(lens))
            return float((len(lens) + gain) / seconds[sum(lens)])

        best = max(map(rate_of, itertools.product(*(range(limit + 1) for limit in limits))))
        assert rate_of(tuple(chosen)) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(60))
def test_with_a_rate_what_is_admitted_is_worth_most_at_it(seed: int) -> None:
    """Tokens less what the seconds would bring elsewhere: over many steps that brings the most tokens a second."""
    survival, limits = instance(seed)
    for slope, rate in itertools.product((0.05, 0.2, 0.5, 0.9), (0.3, 1.0, 2.5)):
        seconds = 1 + slope * np.arange(sum(limits) + 1.0)
        chosen = choose_verify_lens(survival, limits, seconds, rate=rate)

        def worth_of(lens: tuple[int, ...], seconds: np.ndarray = seconds, rate: float = rate) -> float:
            gain = sum(survival[i, :length].sum() for i, length in enumerate(lens))
            return float(gain - rate * seconds[sum(lens)])

        best = max(map(worth_of, itertools.product(*(range(limit + 1) for limit in limits))))
        assert worth_of(tuple(chosen)) == pytest.approx(best)


def test_at_the_rate_of_many_steps_blocks_bring_more_than_each_for_itself() -> None:
    """Good blocks and doubtful ones in turn, with a draft that is paid for either way: by the paper's rule fewer
    tokens a second."""
    blocks = [np.array([[0.91, 0.85, 0.78, 0.12]]), np.array([[0.51, 0.51, 0.33, 0.01]])]
    seconds = 1.0 + 0.5 * np.arange(5.0)

    def rate_of(lens: list[int]) -> float:
        tokens = sum(1 + float(block[0, :length].sum()) for block, length in zip(blocks, lens, strict=True))
        return tokens / sum(seconds[length] for length in lens)

    by_step = [choose_verify_lens(block, [4], seconds)[0] for block in blocks]
    best = max(map(rate_of, map(list, itertools.product(range(5), repeat=2))))
    in_the_long_run = [choose_verify_lens(block, [4], seconds, rate=best)[0] for block in blocks]
    assert rate_of(in_the_long_run) == pytest.approx(best)
    assert rate_of(by_step) < 0.96 * best


def test_equal_survival_is_admitted_in_order() -> None:
    """Case V7."""
    ones = np.ones((3, 4))
    seconds = np.array([1.0] * 6 + [50.0] * 7)
    assert choose_verify_lens(ones, [4, 4, 4], seconds) == [4, 1, 0]


def test_a_threshold_acts_on_survival() -> None:
    """Case V6: conditional confidences 0.9, 0.5, 0.99 survive with 0.9, 0.45, 0.4455."""
    survival = np.array([[0.9, 0.5, 0.99]]).cumprod(-1)
    assert survival[0].tolist() == pytest.approx([0.9, 0.45, 0.4455])
    assert admit_above(survival, [3], 0.45) == [2]
    assert admit_above(survival, [3], 0.4) == [3]
    assert admit_above(survival, [1], 0.4) == [1]
    assert admit_above(survival, [3], 0.95) == [0]
    assert admit_above(np.array([[0.9, np.nan, np.nan]]), [3], 0.1) == [1], "what is unknown is not verified"


STAIRS = np.array([1.0, 1.9, 1.9, 1.9, 1.1, 3.0, 3.0])  # tokens 1 to 3 cost more than 4


def test_looking_ahead_crosses_a_jag_and_stops_before_a_stair() -> None:
    survival, expected = np.array([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4]]), np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    assert choose_verify_lens(survival, [6], STAIRS) == [0], "Algorithm 1 alone is trapped"
    assert choose_verify_lens(survival, [6], STAIRS, expected=expected, corners=[3, 4, 6]) == [4]
    doubtful = np.array([[0.01] * 6])
    assert choose_verify_lens(doubtful, [6], STAIRS, expected=doubtful[0], corners=[3, 4, 6]) == [0]
    assert choose_verify_lens(survival, [0], STAIRS[:1], expected=expected[:0], corners=[]) == [0]


@pytest.mark.parametrize("seed", range(80))
def test_admission_does_not_look_at_what_comes_after(seed: int) -> None:
    """Whatever slots of lower rank say, a slot is admitted or not: their survival may tell of this slot's own token."""
    random = np.random.default_rng(seed)
    survival = random.random((3, 4)).cumprod(-1)
    seconds = 1 + np.cumsum(random.random(13) * random.choice([0.05, 0.5]))
    ahead = {"expected": np.sort(random.random(12))[::-1], "corners": [2, 5, 12]} if seed % 2 else {}
    lens = choose_verify_lens(survival, [4] * 3, seconds, **ahead)
    for r, k in itertools.product(range(3), range(4)):
        changed = survival.copy()
        later = survival < survival[r, k]
        changed[later] = 0 if seed % 4 < 2 else np.minimum(0.999 * survival[r, k], changed[later] * 50)
        changed = np.minimum.accumulate(changed, -1)
        again = choose_verify_lens(changed, [4] * 3, seconds, **ahead)
        assert (again[r] > k) == (lens[r] > k)


def test_a_retrospective_choice_would_look_at_what_comes_after() -> None:
    """The control: taking the best place of the whole curve by today's survival does depend on later slots."""

    def best_of_all(survival: np.ndarray, seconds: np.ndarray) -> int:
        rates = (1 + np.concatenate(([0.0], survival[0].cumsum()))) / seconds
        return int(np.argmax(rates))

    seconds = np.array([1.0, 1.6, 1.7])
    assert best_of_all(np.array([[0.5, 0.5]]), seconds) == 2
    assert best_of_all(np.array([[0.5, 0.0]]), seconds) == 0


def test_context_costs_by_request_and_by_row() -> None:
    curves = CostCurves([1, 9], [1.0, 2.0], [1, 4], [0.5, 0.8], [1.0, 1.6], draft_len=4)
    cost = StepCost(curves, context=100, per_request=0.01, per_row=0.001, draft_per_request=0.002)
    assert cost.seconds(1, 50, 1) == pytest.approx(1.0), "a shorter context costs what the short one costs"
    assert cost.seconds(1, 200, 1) == pytest.approx(1.0 + 100 * (0.01 + 0.001))
    assert cost.seconds(9, 200, 3) == pytest.approx(2.0 + 100 * (0.03 + 0.009))
    assert cost.seconds(9, 200, 4, drafting=4, slots=16) == pytest.approx(
        2.0 + 100 * (0.04 + 0.009) + 1.6 + 100 * 0.008
    )


def test_prompts_in_the_same_pass_count_as_rows_and_not_as_tokens() -> None:
    survival = np.array([[0.6, 0.5, 0.4]])
    stair = cost_of({1: 1.0, 8: 1.0, 9: 9.0, 64: 9.0})
    assert choose_draft_lens(survival, [3], stair).lens == [3]
    assert choose_draft_lens(survival, [3], stair, prefill_tokens=5).lens == [2], "the ninth row costs most"


def test_a_step_that_drafts_may_cost_more_than_was_measured() -> None:
    survival = np.array([[0.5, 0.2, 0.1]])
    cost = cost_of({1: 1.0, 64: 1.0}, (0.4, 0.0))
    assert choose_draft_lens(survival, [3], cost, draft_factor=1.2).lens == [3]
    assert choose_draft_lens(survival, [3], cost, draft_factor=1.4).lens == [0]


@pytest.mark.parametrize("seed", range(40))
def test_looking_ahead_is_that_of_a_slow_loop(seed: int) -> None:
    random = np.random.default_rng(seed)
    survival, limits = random.random((3, 3)).cumprod(-1), random.integers(0, 4, 3).tolist()
    count = sum(limits)
    seconds, expected = 1 + np.cumsum(random.random(count + 1)), np.sort(random.random(count))[::-1]
    corners = [corner for corner in (1, 4, count) if 0 < corner <= count]
    ranked = sorted((-survival[r, k], r, k) for r in range(3) for k in range(limits[r]))
    lens, tokens = [0, 0, 0], 3.0
    for m, (negative, r, _) in enumerate(ranked):
        rates = [(tokens - negative) / seconds[m + 1]]
        for corner in corners:
            if corner > m:
                hope = sum(min(-negative, expected[j]) for j in range(m, corner))
                rates.append((tokens + hope) / seconds[corner])
        if max(rates) <= tokens / seconds[m]:
            break
        lens[r], tokens = lens[r] + 1, tokens - negative
    assert choose_verify_lens(survival, limits, seconds, expected=expected, corners=corners) == lens
