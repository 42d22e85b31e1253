"""The three verification rules on single cases, and against a loop that reads like the paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark_core import verify
from dspark_core.distributions import Probabilities
from dspark_core.kernels import NO_CHOICE
from dspark_core.verify import Verified, greedy_choices, verify_choices

LARGEST_U = 1 - 2.0**-53


def outcome(verified: Verified) -> list[tuple[int, int]]:
    """(accepted, next token) of each request."""
    return list(zip(verified.num_accepted.tolist(), verified.next_ids.tolist(), strict=True))


def starts(lens: list[int]) -> tuple[Tensor, Tensor]:
    """Row starts and lengths of requests with l + 1 rows each."""
    sizes = torch.tensor(lens) + 1
    return sizes.cumsum(0) - sizes, torch.tensor(lens)


def ratio_one(
    target: list[list[float]],
    drafted: list[int],
    draft: list[list[float]],
    accept_u: list[float],
    residual_u: float = 0.5,
    verify_len: int | None = None,
) -> tuple[int, int]:
    start, lens = starts([len(drafted) if verify_len is None else verify_len])
    verified = Probabilities(torch.tensor(target)).verify(
        torch.tensor([drafted]),
        [Probabilities(rows) for rows in torch.tensor([draft]).unbind(1)],
        start,
        lens,
        accept_u=torch.tensor([accept_u], dtype=torch.float64),
        residual_u=torch.tensor([residual_u], dtype=torch.float64),
    )
    return outcome(verified)[0]


def test_choices_stand_while_they_equal_the_targets() -> None:
    choices = torch.tensor([5, 6, 7, 8] * 4)
    drafts = torch.tensor([[5, 6, 7], [5, 6, 0], [0, 6, 7], [5, 0, 7]])
    start, lens = starts([3, 3, 3, 3])
    assert outcome(verify_choices(choices, drafts, start, lens)) == [(3, 8), (2, 7), (0, 5), (1, 6)]


def test_only_admitted_tokens_can_stand() -> None:
    choices = torch.tensor([5, 6, 9, 5, 6, 7, 8, 5])
    drafts = torch.tensor([[5, 6, 7], [5, 0, 7], [5, 6, 7], [5, 6, 7]])
    start, lens = starts([1, 0, 3, 0])
    assert start.tolist() == [0, 2, 3, 7]
    assert outcome(verify_choices(choices, drafts, start, lens)) == [(1, 6), (0, 9), (3, 8), (0, 5)]


def test_greedy_rejects_a_likely_token_that_is_not_the_most_likely() -> None:
    """Case A8: p = {a: .3, b: .5}, the draft proposes a."""
    logits = torch.tensor([[0.3, 0.5, 0.2], [0.1, 0.1, 0.8]]).log()
    start, lens = starts([1])
    assert outcome(verify_choices(greedy_choices(logits), torch.tensor([[0]]), start, lens)) == [(0, 1)]
    assert outcome(verify_choices(greedy_choices(logits), torch.tensor([[1]]), start, lens)) == [(1, 2)]


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert greedy_choices(torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]])).tolist() == [1, 0]


def test_acceptance_is_strict() -> None:
    target, draft = [[0.5, 0.5], [0.0, 1.0]], [[1.0, 0.0]]
    assert ratio_one(target, [0], draft, [0.4999]) == (1, 1)
    assert ratio_one(target, [0], draft, [0.5]) == (0, 1), "u p_draft = p_target is a rejection"
    assert ratio_one([[0.0, 1.0]] * 2, [0], draft, [0.0]) == (0, 1), "a token the target never says, even at u = 0"


def test_rejection_draws_from_the_positive_part_of_the_difference() -> None:
    # Target minus draft is (-.5, .2, .3).
    target, draft = [[0.1, 0.4, 0.5], [1.0, 0.0, 0.0]], [[0.6, 0.2, 0.2]]
    for u, expected in ((0.0, 1), (0.39, 1), (0.41, 2), (LARGEST_U, 2)):
        assert ratio_one(target, [0], draft, [0.9], u) == (0, expected)


def test_a_full_pass_draws_from_the_row_after_the_last_admitted_token() -> None:
    target = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.5, 0.5]]
    draft = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    assert ratio_one(target, [0, 1], draft, [0.5, 0.5], 0.6) == (2, 2)
    # With one admitted token of two, row 1 is drawn from as it is: what slot 1 proposed was not looked at.
    half = [[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]]
    for u, expected in ((0.2, 1), (0.7, 2)):
        assert ratio_one(half, [0, 1], draft, [0.5, 0.5], u, verify_len=1) == (1, expected)
    assert ratio_one([[0.2, 0.8, 0.0]], [0, 1], draft, [0.5, 0.5], 0.1, verify_len=0) == (0, 0)


@pytest.mark.parametrize("u", [0.0, 0.3, 0.6, LARGEST_U])
def test_a_residual_without_mass_falls_back_to_the_target(u: float) -> None:
    """Case B12: rounding makes the draft's probability a hair larger everywhere, and u sits in that hair."""
    target = torch.tensor([[0.25, 0.25, 0.5], [1.0, 0.0, 0.0]])
    draft = target[:1] * (1 + 1e-6)
    accepted, following = ratio_one(target.tolist(), [2], draft.tolist(), [LARGEST_U], u)
    assert accepted == 0
    assert following == (0 if u < 0.25 else 1 if u < 0.5 else 2)


def paper_loop(
    target: np.ndarray, drafted: np.ndarray, draft: np.ndarray, length: int, accept_u: np.ndarray, residual_u: float
) -> tuple[int, int]:
    """Speculative sampling of one request, token by token."""
    for slot in range(length):
        token = drafted[slot]
        if float(accept_u[slot]) * float(draft[slot, token]) < float(target[slot, token]):
            continue
        weights = np.maximum(target[slot] - draft[slot], np.float32(0))
        return slot, invert(weights if weights.sum() > 0 else target[slot], residual_u)
    return length, invert(target[length], residual_u)


def invert(weights: np.ndarray, u: float) -> int:
    cumulative = weights.astype(np.float64).cumsum()
    return int(np.searchsorted(cumulative, min(u * cumulative[-1], np.nextafter(cumulative[-1], 0)), side="right"))


def test_batches_equal_the_loop_over_single_requests() -> None:
    generator = torch.Generator().manual_seed(5)
    for slots, vocab in ((1, 3), (4, 5), (7, 50)):
        lens = torch.randint(0, slots + 1, (300,), generator=generator).tolist()
        start, lengths = starts(lens)
        target = torch.softmax(2 * torch.randn(sum(lens) + 300, vocab, generator=generator), -1)
        target[:, 1:][torch.rand(len(target), vocab - 1, generator=generator) < 0.1] = 0
        draft = torch.softmax(2 * torch.randn(300, slots, vocab, generator=generator), -1)
        for request in range(0, 300, 2):  # half of the drafts are the target itself, and are mostly accepted
            first, length = int(start[request]), lens[request]
            draft[request, :length] = target[first : first + length] + 1e-3
        drafted = torch.multinomial(draft.flatten(0, 1), 1, generator=generator).view(300, slots)
        accept_u = torch.rand(300, slots, dtype=torch.float64, generator=generator)
        residual_u = torch.rand(300, dtype=torch.float64, generator=generator)
        drafts = [Probabilities(rows) for rows in draft.unbind(1)]
        numbers = {"accept_u": accept_u, "residual_u": residual_u}
        found = Probabilities(target).verify(drafted, drafts, start, lengths, **numbers)
        expected = [
            paper_loop(
                target[start[r] : start[r] + lens[r] + 1].numpy(),
                drafted[r].numpy(),
                draft[r].numpy(),
                lens[r],
                accept_u[r].numpy(),
                float(residual_u[r]),
            )
            for r in range(300)
        ]
        assert outcome(found) == expected
        assert {accepted for accepted, _ in expected} == set(range(slots + 1)), "every outcome must occur"


def test_a_row_with_some_nan_chooses_nothing_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the largest value is found by `amax`, nothing equals a NaN."""
    logits = torch.randn(3, 100)
    logits[0, 5], logits[1, 99] = torch.nan, torch.inf
    monkeypatch.setattr(verify, "in_kernels", lambda rows: False)
    assert greedy_choices(logits).tolist() == [NO_CHOICE, NO_CHOICE, int(logits[2].argmax())]
    monkeypatch.setattr(verify, "argmax", lambda rows: torch.full((3,), 99))
    assert greedy_choices(logits).tolist() == [NO_CHOICE, NO_CHOICE, 99], "whatever index is given for it"
