"""Choices made from logits, against the same made from probabilities by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark_core.distributions import Probabilities
from dspark_core.kernels import NO_CHOICE
from dspark_core.kernels.rows import most_likely, softmax
from dspark_core.kernels.source.sampling import BLOCK
from dspark_core.logit_rows import LogitRows
from dspark_core.sampling import argmax
from dspark_core.verify import Verified, greedy_choices

SIZES = [1, 5, 16, 100, BLOCK, BLOCK + 1, 5000, 49152]
LARGEST_U = 1 - 2.0**-53


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def logits_of(rows: int, size: int, seed: int) -> Tensor:
    """Peaked, flat, nearly empty and single-token rows in turn."""
    generator = torch.Generator().manual_seed(seed)
    logits = (
        torch.randn(rows, size, generator=generator) * torch.tensor([3.0, 0.1, 3.0, 20.0]).repeat(rows)[:rows, None]
    )
    few = torch.rand(rows, size, generator=generator) < 0.98
    few[:, size // 2] = False
    logits[2::4][few[2::4]] = -torch.inf
    return logits


@pytest.mark.parametrize("size", SIZES)
def test_draws_invert_the_cumulative_sum(size: int) -> None:
    for seed in range(10):
        logits, temperature = logits_of(4, size, seed), torch.tensor([1.0, 0.7, 1.5, 1e-5])
        for divisors in (None, temperature):
            weights = softmax(logits, divisors).double()
            cumulative = weights.cumsum(-1)
            for u in (0.0, LARGEST_U, *random(5, seed=seed).tolist()):
                chosen = LogitRows(logits, divisors).draw(torch.full((4,), u, dtype=torch.float64))
                rows = torch.arange(4)
                assert (weights[rows, chosen] > 0).all(), "an index without weight is never drawn"
                point, slack = u * cumulative[:, -1], 1e-12 * cumulative[:, -1]
                assert (cumulative[rows, chosen] >= point - slack).all()
                assert (cumulative[rows, chosen] - weights[rows, chosen] <= point + slack).all()


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.1, 0.2, 0.0, 0.4, 0.3]).log().expand(100_000, -1).contiguous()
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000  # a grid leaves no room for chance
    counts = torch.bincount(LogitRows(logits, None).draw(u), minlength=5)
    assert (counts - torch.tensor([10_000, 20_000, 0, 40_000, 30_000])).abs().max() <= 2


@pytest.mark.parametrize("size", SIZES)
def test_the_most_likely_token_is_the_first_of_the_largest(size: int) -> None:
    for seed in range(10):
        logits = logits_of(8, size, seed).round()
        assert torch.equal(most_likely(logits), argmax(logits))


@pytest.mark.parametrize("place", [0, 999])
@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan])
def test_scores_that_are_no_numbers_choose_nothing(value: float, place: int) -> None:
    u, number = torch.tensor([0.0, 0.9], dtype=torch.float64), torch.arange(2)
    logits, good = torch.zeros(2, 1000), torch.zeros(1, 1000)
    logits[:, place] = value
    if value == -torch.inf:
        logits[:] = value
    drafts, one, zero = LogitRows(good, None), torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    drafted = drafts.draw(u[:1]).unsqueeze(-1)
    for kind in (LogitRows, materialised):
        rows = kind(logits, None)
        assert rows.draw(u).tolist() == rows.couple(number, number).tolist() == [NO_CHOICE] * 2
        own = drafts if kind is LogitRows else materialised(good, None)
        for scores, expected in ((logits, (0, NO_CHOICE)), (torch.cat((good, logits[:1])), (1, NO_CHOICE))):
            numbers = {"accept_u": torch.zeros(1, 1, dtype=torch.float64), "residual_u": u[:1]}
            found = kind(scores, None).verify(drafted, [own], zero, one, **numbers)
            assert (int(found.num_accepted), int(found.next_ids)) == expected, "nothing stands that was not seen to"
    assert most_likely(logits).tolist() == greedy_choices(logits.double()).tolist() == [NO_CHOICE] * 2


def test_no_token_is_lost_or_gained_where_blocks_meet() -> None:
    """What float32 sums of blocks would round away: 17 tokens of one block, and a token with hardly any weight."""
    weights = torch.full((512,), 2.9e-8)
    weights[0] = 1
    logits = torch.cat((weights.log(), torch.full((512,), -40.0)))[None]
    tail = torch.arange(490, 512)
    probs = softmax(logits, None)[0].double()
    before = probs.cumsum(0) - probs
    middle = ((before + 0.5 * probs) / probs.sum())[tail]
    found = LogitRows(logits.expand(len(tail), -1).contiguous(), None).draw(middle)
    assert torch.equal(found, tail)
    logits = torch.randn(300, 1024, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, 511] = logits.amax(-1) - 60
    logits[:, 512:] -= 40
    probs = softmax(logits, None).double()
    before = probs[:, :511].sum(-1) / probs.sum(-1)
    for less in (1e-7, 1e-9, 1e-11):
        assert (LogitRows(logits, None).draw(before - less) < 511).all()


def test_what_would_be_read_outside_the_rows_is_refused() -> None:
    rows, zero, u = torch.zeros(9, 40), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    draft, target = LogitRows(rows[:1], None), LogitRows(rows, None)
    ids = draft.draw(u).unsqueeze(-1)
    for drafted, start, length in (
        (ids, zero, zero + 2), (ids, zero, zero - 1), (ids, zero - 1, zero), (ids, zero + 8, zero + 1),
        (ids + 40, zero, zero + 1), (ids * 0 - 1, zero, zero + 1),
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            target.verify(drafted, [draft], start, length, accept_u=u.unsqueeze(-1), residual_u=u)
    with pytest.raises(AssertionError):
        LogitRows(rows, torch.ones(9, dtype=torch.float64))
    with pytest.raises(AssertionError):
        LogitRows(rows.T, None)


def test_a_row_that_is_not_looked_at_may_be_anything() -> None:
    logits = torch.stack((torch.tensor([0.0, -100.0]), torch.full((2,), torch.nan)))
    numbers = torch.tensor([[0.5]], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
    draft, one = LogitRows(torch.tensor([[-100.0, 0.0]]), None), torch.ones(1, dtype=torch.int64)
    drafted = draft.draw(numbers[1]).unsqueeze(-1)
    accepted, following = LogitRows(logits, None).verify(
        drafted, [draft], one - 1, one, accept_u=numbers[0], residual_u=numbers[1]
    )
    assert (int(accepted), int(following)) == (0, 0)


class Case:
    """Blocks of random lengths, a half of whose drafts resemble the target."""

    def __init__(self, requests: int, slots: int, vocab: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lens = torch.randint(0, slots + 1, (requests,), generator=generator)
        self.starts = (self.lens + 1).cumsum(0) - self.lens - 1
        owner = torch.repeat_interleave(torch.arange(requests), self.lens + 1)
        self.target, drafts = logits_of(len(owner), vocab, seed), logits_of(slots * requests, vocab, seed + 1)
        self.drafts = list(drafts.view(slots, requests, vocab).unbind(0))
        for request in range(0, requests, 2):
            for slot in range(int(self.lens[request])):
                own = self.target[self.starts[request] + slot]
                self.drafts[slot][request] = own + 0.3 * torch.randn(vocab, generator=generator)
        self.temperature = torch.rand(requests, generator=generator) + 0.3 if seed % 2 else None
        self.of_rows = None if self.temperature is None else self.temperature[owner]
        self.draft_u = torch.rand(slots, requests, dtype=torch.float64, generator=generator)
        self.accept_u = torch.rand(requests, slots, dtype=torch.float64, generator=generator)
        self.residual_u = torch.rand(requests, dtype=torch.float64, generator=generator)

    def play(self, kind: Any) -> tuple[Tensor, Verified]:
        """Draft and verify with rows made by `kind`."""
        drafts = [kind(logits, self.temperature) for logits in self.drafts]
        ids = torch.stack([draft.draw(u) for draft, u in zip(drafts, self.draft_u, strict=True)], -1)
        numbers = {"accept_u": self.accept_u, "residual_u": self.residual_u}
        return ids, kind(self.target, self.of_rows).verify(ids, drafts, self.starts, self.lens, **numbers)


def materialised(logits: Tensor, temperature: Tensor | None) -> Probabilities:
    return Probabilities(softmax(logits, temperature))


@pytest.mark.parametrize(
    ("requests", "slots", "vocab"), [(1, 3, 7), (40, 1, 2), (300, 7, 50), (60, 4, BLOCK + 1), (9, 7, 49152)]
)
def test_verification_is_the_one_of_probabilities(requests: int, slots: int, vocab: int) -> None:
    seen = set()
    for seed in range(4):
        case = Case(requests, slots, vocab, seed)
        (ids, found), (expected_ids, expected) = case.play(LogitRows), case.play(materialised)
        assert torch.equal(ids, expected_ids)
        assert torch.equal(found.num_accepted, expected.num_accepted)
        assert torch.equal(found.next_ids, expected.next_ids)
        seen |= set(found.num_accepted.tolist())
    assert seen >= set(range(slots + 1)) or requests < 40, "every outcome must occur"


def test_a_residual_without_mass_falls_back_to_the_target() -> None:
    """Case B12: a draft whose logits are the target's and a constant, so that rounding alone tells them apart."""
    fallen = 0
    for seed in range(3000):
        logits = torch.randn(1, 3, generator=torch.Generator().manual_seed(seed))
        p, q = softmax(logits, None), softmax(logits + 0.7, None)
        token = int((q - p).argmax())
        if (p > q).any() or not LARGEST_U * float(q[0, token]) >= float(p[0, token]):
            continue
        draft = LogitRows(logits + 0.7, None)
        before = float(p[0, :token].sum() / p.sum())
        assert draft.draw(torch.tensor([before + 0.5 * float(p[0, token])], dtype=torch.float64)).tolist() == [token]
        u, zero = random(1, seed=seed), torch.zeros(1, dtype=torch.int64)
        accepted, following = LogitRows(torch.cat((logits, logits)), None).verify(
            torch.tensor([[token]]),
            [draft],
            zero,
            zero + 1,
            accept_u=torch.tensor([[LARGEST_U]], dtype=torch.float64),
            residual_u=u,
        )
        assert accepted.tolist() == [0]
        assert following.tolist() == LogitRows(logits, None).draw(u).tolist()
        fallen += 1
    assert fallen > 10, "the case must occur"


@pytest.mark.parametrize("size", SIZES)
def test_coupled_choices_are_those_of_probabilities(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for seed in range(10):
        logits, temperature = logits_of(8, size, seed), torch.rand(8, generator=generator) + 0.3
        keys = torch.randint(0, 2**62, (8,), generator=generator)
        positions = torch.randint(0, 10_000, (8,), generator=generator)
        for divisors in (None, temperature):
            found = LogitRows(logits, divisors).couple(keys, positions)
            assert torch.equal(found, materialised(logits, divisors).couple(keys, positions))


def test_a_row_depends_on_itself_alone() -> None:
    case, number = Case(24, 5, 300, seed=1), torch.arange(24)
    ids, whole = case.play(LogitRows)
    coupled = LogitRows(case.drafts[0], case.temperature).couple(number, number)
    assert case.temperature is not None
    for r in range(24):
        rows = slice(int(case.starts[r]), int(case.starts[r] + case.lens[r]) + 1)
        own = case.temperature[r : r + 1]
        drafts = [LogitRows(logits[r : r + 1], own) for logits in case.drafts]
        alone = torch.stack([d.draw(u[r : r + 1]) for d, u in zip(drafts, case.draft_u, strict=True)], -1)
        assert torch.equal(alone[0], ids[r])
        target = LogitRows(case.target[rows], own.repeat(rows.stop - rows.start))
        numbers = {"accept_u": case.accept_u[r : r + 1], "residual_u": case.residual_u[r : r + 1]}
        accepted, following = target.verify(
            alone, drafts, torch.zeros(1, dtype=torch.int64), case.lens[r : r + 1], **numbers
        )
        assert (int(accepted), int(following)) == (int(whole.num_accepted[r]), int(whole.next_ids[r]))
        assert drafts[0].couple(number[r : r + 1], number[r : r + 1]).tolist() == [int(coupled[r])]
