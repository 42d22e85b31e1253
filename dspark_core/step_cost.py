"""What steps cost: the target's pass by its tokens and their context, and drafting by its requests and slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dspark_core.arrays import Floats


@dataclass(frozen=True)
class CostCurves:
    """Seconds that steps take with one length of context.

    Attributes:
        tokens, verify: B and the seconds of the target's pass over B tokens, ascending in B.
        requests, first_slot, all_slots: R and the seconds of drafting one slot, or all `draft_len`, for R requests.
        draft_len: slots of a whole block.
    """

    tokens: Sequence[int]
    verify: Sequence[float] | Floats
    requests: Sequence[int]
    first_slot: Sequence[float] | Floats
    all_slots: Sequence[float] | Floats
    draft_len: int

    def verify_seconds(self, tokens: Floats) -> Floats:
        """Of passes over so many tokens; between and beyond what was measured on straight lines."""
        return _line(tokens, self.tokens, self.verify)

    def slot_seconds(self, requests: int) -> float:
        """Of a slot more for each of so many requests that draft; at least a nanosecond."""
        count = np.full(2, float(requests))
        one, two = self.draft_seconds(count, count * (1, 2))
        return max(float(two - one), 1e-9)

    def draft_seconds(self, requests: Floats, slots: Floats) -> Floats:
        """Of drafting so many slots in all for so many requests (0 for none)."""
        some = np.maximum(requests, 1)
        first, whole = _line(some, self.requests, self.first_slot), _line(some, self.requests, self.all_slots)
        share = (slots / some - 1) / max(self.draft_len - 1, 1)
        return np.where(requests > 0, first + (whole - first) * share, 0.0)


@dataclass(frozen=True)
class StepCost:
    """Seconds that steps take.

    Attributes:
        curves: as measured with a short context.
        context: that one, in tokens.
        block: passes of `curves` over rows of several requests had so many of each; B // block requests, at least one.
        request_seconds: what a request more, with the same rows in all, adds to the target's pass.
        per_request, per_row: seconds that a token more of context adds to the target's pass, for every request in it
            (its keys and values are read) and for every row (it is scored against them).
        draft_per_request: seconds that a token more of context adds to drafting, for every request.
    """

    curves: CostCurves
    context: int = 0
    block: int = 1
    request_seconds: float = 0.0
    per_request: float = 0.0
    per_row: float = 0.0
    draft_per_request: float = 0.0

    @property
    def draft_len(self) -> int:
        return self.curves.draft_len

    def at(self, context: float, requests: int) -> CostCurves:
        """The curves of steps of so many requests, which have so many tokens of context each, in the mean."""
        base, more = self.curves, max(context - self.context, 0)
        rows, drafting = np.array(base.tokens), np.array(base.requests) * self.draft_per_request
        others = np.maximum(requests - np.maximum(rows // self.block, 1), 0)  # than those of the pass that was measured
        return replace(
            base,
            verify=np.array(base.verify)
            + self.request_seconds * others
            + more * (self.per_request * requests + self.per_row * rows),
            first_slot=np.array(base.first_slot) + more * drafting,
            all_slots=np.array(base.all_slots) + more * drafting,
        )

    def seconds(self, batch_tokens: int, context: float, requests: int, drafting: int = 0, slots: int = 0) -> float:
        """Of one step.

        Args:
            batch_tokens: B, rows of the target's pass.
            context, requests: see `at`.
            drafting, slots: requests that draft, and slots of all of them together.
        """
        curves = self.at(context, requests)
        verify = curves.verify_seconds(np.array([float(batch_tokens)]))
        return float((verify + curves.draft_seconds(np.array([drafting]), np.array([slots])))[0])


def _line(x: Floats, places: Sequence[int], values: Sequence[float] | Floats) -> Floats:
    found = np.interp(x, places, values)
    if len(places) > 1:
        slope = (values[-1] - values[-2]) / (places[-1] - places[-2])
        found = found + np.maximum(x - places[-1], 0) * max(slope, 0.0)
    return found
