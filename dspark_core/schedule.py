"""How far to draft and to verify: as far as pays, by the measured cost of steps.

Verified is what is admitted; the admission of a draft token never depends on that token or on one after it, so that
the output distribution stays the target's (paper, appendix A). `choose_draft_lens` decides before anything is drafted,
from earlier rounds alone (paper §5.2); `choose_verify_lens` decides by the confidence of today's block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from dspark_core.arrays import Floats, Ints
from dspark_core.step_cost import CostCurves


@dataclass(frozen=True)
class _Path:
    """Draft slots in the order in which they are admitted: by survival, and equal ones by request and slot."""

    owner: Ints
    gain: Floats
    first: Floats  # 1 where a slot is its request's first one, else 0

    @classmethod
    def of(cls, survival: Floats, limits: Sequence[int]) -> _Path:
        num_slots = survival.shape[1]
        allowed = np.arange(num_slots) < np.asarray(limits)[:, None]
        place, gain = np.flatnonzero(allowed), survival[allowed]
        # Stable: confidence saturates to exactly 1, and a tie must not put a slot before the one it builds on.
        order = np.argsort(-gain, kind="stable")
        owner, slot = np.divmod(place[order], num_slots)
        return cls(owner, gain[order], (slot == 0).astype(np.float64))

    def tokens(self, others: float) -> Floats:
        """Expected tokens of the step, after none, one, two ... admissions."""
        return others + np.concatenate(([0.0], np.cumsum(self.gain)))

    def lens(self, count: int, num_requests: int) -> list[int]:
        """Lengths of all requests once `count` slots are admitted."""
        return cast(list[int], np.bincount(self.owner[:count], minlength=num_requests).tolist())


def choose_verify_lens(
    survival: Floats,
    limits: Sequence[int],
    seconds: Floats,
    *,
    others: float = 0,
    rate: float | None = None,
    expected: Floats | None = None,
    corners: Sequence[int] = (),
) -> list[int]:
    """Verify lengths by Algorithm 1 of the paper: admit by survival while tokens per second rise, then stop.

    With `rate` a slot is admitted while it brings more tokens than its seconds bring in other steps. The paper's rule
    compares with this step alone, where the draft is paid for already: over many steps it asks too much of blocks that
    look good, and too little of the others.

    Real curves are jagged (two tokens may cost more than eight), and the first fall may be no reason to stop. With
    `expected` it is one only if no later place is better either, as far as earlier rounds tell: whether a token is
    admitted still depends on nothing but earlier rounds and the survival of slots up to it.

    Args:
        survival: [R, K] probability that the drafts up to a slot are all accepted, not rising along a row.
        limits: [R] slots that were drafted.
        seconds: [sum(limits) + 1] of the step with so many draft tokens admitted (1 / SPS of B = R + admitted).
        others: tokens that the step gives besides one for each of these requests.
        rate: tokens a second that steps bring by earlier rounds; None for the paper's rule.
        expected: [sum(limits)] survival of the slots by rank, falling, from earlier rounds; None looks one slot ahead.
        corners: numbers of admitted tokens to look ahead to, up to sum(limits).
    """
    path = _Path.of(survival, limits)
    tokens = path.tokens(len(survival) + others)
    value = _value(tokens, seconds, rate)
    onward = value[1:]
    if expected is not None and len(corners):
        hoped, places = _hoped(path.gain, expected, tokens, np.array(corners)), np.array(corners)
        ahead = np.where(places > np.arange(len(path.gain))[:, None], _value(hoped, seconds[places], rate), -np.inf)
        onward = np.maximum(onward, ahead.max(-1))
    stops = np.flatnonzero(onward <= value[:-1])
    return path.lens(int(stops[0]) if len(stops) else len(path.gain), len(survival))


def _value(tokens: Floats, seconds: Floats, rate: float | None) -> Floats:
    """What is to be as large as it can be."""
    return tokens / seconds if rate is None else tokens - rate * seconds


def _hoped(gain: Floats, expected: Floats, tokens: Floats, corners: Ints) -> Floats:
    """[M, corners] tokens at each corner, as far as it lies ahead, before each of M admissions.

    What is still to come is known to survive no better than the next slot; up to that, it is what was expected.
    """
    here = np.arange(len(gain))[:, None]
    total = np.concatenate(([0.0], np.cumsum(expected)))
    # From this rank on, less is expected than the next slot's survival.
    lower = np.searchsorted(-expected, -gain, side="left")[:, None]
    lower = np.clip(lower, here, np.maximum(corners, here))
    ahead = gain[:, None] * (lower - here) + total[corners] - total[lower]
    return cast(Floats, tokens[:-1, None] + ahead)


def admit_above(survival: Floats, limits: Sequence[int], threshold: float) -> list[int]:
    """Verify lengths under a static threshold: slots that survive with at least this probability."""
    allowed = np.arange(survival.shape[1]) < np.asarray(limits)[:, None]
    return cast(list[int], np.logical_and.accumulate(allowed & (survival >= threshold), -1).sum(-1).tolist())


class DraftPlan(NamedTuple):
    """Draft slots of each request, the tokens a second that they should bring, how many times as many as without any,
    and the seconds of the step.
    """

    lens: list[int]
    rate: float
    gain: float
    seconds: float


def choose_draft_lens(
    survival: Floats,
    limits: Sequence[int],
    cost: CostCurves,
    *,
    others: int = 0,
    prefill_tokens: int = 0,
    draft_factor: Floats | float = 1.0,
) -> DraftPlan:
    """Draft slots of each request, which together bring the most tokens a second.

    Slots are admitted in order of their expected survival, as in Algorithm 1; but the whole curve is searched, for real
    ones are jagged, and no slots at all are among the choices.

    Args:
        survival: [R, K] expected probability that the draft at a slot is accepted, not rising along a row.
        limits: [R] most slots of each request.
        cost: of steps.
        others: requests that do not draft, in the same pass.
        prefill_tokens: of prompts, in the same pass.
        draft_factor: what the seconds of a step with one, two ... slots [sum(limits)] are to be multiplied by.
    """
    path, num_requests = _Path.of(survival, limits), len(survival)
    admitted = np.arange(len(path.owner) + 1, dtype=np.float64)
    drafting = np.concatenate(([0.0], np.cumsum(path.first)))
    batch_tokens = num_requests + others + prefill_tokens + admitted
    seconds = cost.verify_seconds(batch_tokens) + cost.draft_seconds(drafting, admitted)
    seconds[1:] *= draft_factor
    rates = path.tokens(num_requests + others) / seconds
    best = int(np.argmax(rates))
    return DraftPlan(
        path.lens(best, num_requests), float(rates[best]), float(rates[best] / rates[0]), float(seconds[best])
    )
