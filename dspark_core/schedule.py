"""How many tokens to draft for each request: as many as pay, by the measured cost of steps.

Decided before drafting from earlier rounds alone, so that it cannot depend on what a draft turns out to be: the output
distribution stays the target's whatever is chosen (paper §5.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StepCost:
    """Seconds that steps take, as measured.

    Attributes:
        tokens, verify: B and the seconds of the target's pass over B tokens, ascending in B.
        requests, first_slot, all_slots: R and the seconds of drafting one slot, or all `draft_len`, for R requests.
        draft_len: slots of a whole block.
    """

    tokens: Sequence[int]
    verify: Sequence[float]
    requests: Sequence[int]
    first_slot: Sequence[float]
    all_slots: Sequence[float]
    draft_len: int

    def verify_seconds(self, tokens: Floats) -> Floats:
        """Of passes over so many tokens; between and beyond what was measured on straight lines."""
        return _line(tokens, self.tokens, self.verify)

    def draft_seconds(self, requests: Floats, slots: Floats) -> Floats:
        """Of drafting so many slots in all for so many requests (0 for none)."""
        some = np.maximum(requests, 1)
        first, whole = _line(some, self.requests, self.first_slot), _line(some, self.requests, self.all_slots)
        share = (slots / some - 1) / max(self.draft_len - 1, 1)
        return np.where(requests > 0, first + (whole - first) * share, 0.0)


def _line(x: Floats, places: Sequence[int], values: Sequence[float]) -> Floats:
    found = np.interp(x, places, values)
    if len(places) > 1:
        slope = (values[-1] - values[-2]) / (places[-1] - places[-2])
        found = found + np.maximum(x - places[-1], 0) * max(slope, 0.0)
    return found


def choose_draft_lens(survival: Floats, limits: Sequence[int], cost: StepCost, *, other_tokens: int = 0) -> list[int]:
    """Draft slots of each request, which together bring the most tokens a second.

    Slots are admitted in order of their expected survival, as in Algorithm 1; but the whole curve is searched, for real
    ones are jagged, and no slots at all are among the choices.

    Args:
        survival: [R, K] expected probability that the draft at a slot is accepted, not rising along a row.
        limits: [R] most slots of each request.
        cost: of steps.
        other_tokens: tokens of requests that do not draft, in the same pass.
    """
    num_requests, num_slots = survival.shape
    allowed = np.arange(num_slots) < np.asarray(limits)[:, None]
    owner = np.repeat(np.arange(num_requests), num_slots)[allowed.ravel()]
    value = survival[allowed]
    order = np.argsort(-value, kind="stable")  # equal along a row stays in the order of slots
    owner, value = owner[order], value[order]
    admitted = np.arange(len(owner) + 1, dtype=np.float64)
    first_of_owner = np.zeros(len(owner))
    first_of_owner[np.unique(owner, return_index=True)[1]] = 1
    drafting = np.concatenate(([0.0], np.cumsum(first_of_owner)))
    tokens = num_requests + other_tokens + np.concatenate(([0.0], np.cumsum(value)))
    seconds = cost.verify_seconds(num_requests + other_tokens + admitted) + cost.draft_seconds(drafting, admitted)
    best = int(np.argmax(tokens / seconds))
    return np.bincount(owner[:best], minlength=num_requests).tolist()  # type: ignore[no-any-return]


class Acceptance:
    """Running estimate of the conditional acceptance by slot, of one request or of all.

    Args:
        draft_len: K.
        memory: rounds after which an observation counts for 1/e of a new one.
    """

    def __init__(self, draft_len: int, memory: float) -> None:
        self.accepted, self.decided = np.zeros(draft_len), np.zeros(draft_len)
        self._keep = float(np.exp(-1 / memory))

    def observe(self, decided: int, accepted: int) -> None:
        """A round in which the first `decided` slots were judged and the first `accepted` of them stand."""
        self.accepted *= self._keep
        self.decided *= self._keep
        self.accepted[:accepted] += 1
        self.decided[:decided] += 1

    def rates(self, prior: Floats | float, weight: float) -> Floats:
        """[K] estimates; `prior` counts as `weight` rounds."""
        rates: Floats = (self.accepted + prior * weight) / (self.decided + weight)
        return rates
