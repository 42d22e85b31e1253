"""The choice of draft lengths: the best of all, by brute force; and the estimates it is made from."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dspark_core.schedule import Acceptance, StepCost, choose_draft_lens


def cost_of(verify: dict[int, float], draft: tuple[float, float] = (0.0, 0.0), draft_len: int = 3) -> StepCost:
    """A draft costs `draft[0]` and, for each slot after the first, a share of `draft[1]`, whatever the requests."""
    return StepCost(list(verify), list(verify.values()), [1, 8], [draft[0]] * 2, [sum(draft)] * 2, draft_len)


LINEAR = cost_of({1: 1.0, 64: 64.0})
FLAT = cost_of({1: 1.0, 64: 1.0})


def rate(survival: np.ndarray, lens: tuple[int, ...], cost: StepCost, other: int = 0) -> float:
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
    chosen = tuple(choose_draft_lens(survival, limits, cost, other_tokens=other))
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
    assert choose_draft_lens(survival, [3, 3], FLAT) == [3, 3]
    assert choose_draft_lens(survival, [3, 3], LINEAR) == [0, 0]


def test_easy_and_hard_requests_share_a_batch() -> None:
    survival = np.array([[0.9, 0.8, 0.7], [0.1, 0.01, 0.001]])
    halfway = cost_of({1: 1.0, 64: 1.0 + 63 * 0.4})
    assert choose_draft_lens(survival, [3, 3], halfway) == [3, 0]


def test_the_draft_s_own_cost_counts() -> None:
    survival = np.array([[0.5, 0.2, 0.1]])
    assert choose_draft_lens(survival, [3], cost_of({1: 1.0, 64: 1.0}, (0.4, 0.0))) == [3]
    assert choose_draft_lens(survival, [3], cost_of({1: 1.0, 64: 1.0}, (0.4, 1.0))) == [1]
    assert choose_draft_lens(survival, [3], cost_of({1: 1.0, 64: 1.0}, (0.9, 0.0))) == [0]


def test_a_jagged_curve_does_not_trap_the_search() -> None:
    """Two tokens cost more than four, as on some CPUs."""
    jagged = cost_of({1: 1.0, 2: 2.5, 3: 2.5, 4: 1.1})
    survival = np.array([[0.6, 0.5, 0.4]])
    assert choose_draft_lens(survival, [3], jagged) == [3]


def test_costs_between_and_beyond_what_was_measured() -> None:
    cost = StepCost([1, 3], [1.0, 2.0], [1, 4], [1.0, 4.0], [3.0, 12.0], draft_len=5)
    assert cost.verify_seconds(np.array([1.0, 2.0, 5.0])).tolist() == [1.0, 1.5, 3.0]
    assert cost.draft_seconds(np.array([0.0, 1.0, 1.0, 2.0, 8.0]), np.array([0.0, 1.0, 5.0, 6.0, 8.0])).tolist() == [
        0.0, 1.0, 3.0, 4.0, 8.0,
    ]  # fmt: skip


def test_acceptance_is_conditional_and_forgets() -> None:
    acceptance = Acceptance(3, memory=5)
    for _ in range(60):
        acceptance.observe(decided=2, accepted=1)
    rates = acceptance.rates(0.5, 1.0)
    assert rates[0] > 0.9
    assert rates[1] < 0.1
    assert rates[2] == 0.5, "never judged: the prior"
    for _ in range(20):
        acceptance.observe(decided=1, accepted=0)
    assert acceptance.rates(0.5, 1.0)[0] < 0.2


def test_every_choice_is_quick_enough_to_try() -> None:
    """256 requests of 7 slots: the whole curve of 1792 points, with ties."""
    survival = np.tile(np.linspace(0.9, 0.1, 7), (256, 1))
    lens = choose_draft_lens(survival, [7] * 256, cost_of({1: 1.0, 512: 2.0, 2048: 9.0}, draft_len=7))
    assert len(lens) == 256
    assert sum(lens) in range(1, 1793)
    assert all(len(set(pair)) <= 2 for pair in itertools.pairwise(lens))
