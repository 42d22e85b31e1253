"""Length policies that tests can steer or look into, and costs for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dspark_core.arrays import Floats
from dspark_core.checkpoint.calibration import Calibration
from dspark_core.step_cost import CostCurves, StepCost
from server.auto_policy import AutoPolicy
from server.cost_watch import GRAIN_OF_CONTEXT
from server.policy import LengthPolicy, Rounds, StepOutcome
from server.request import Request

Plan = Callable[[Sequence[Request], Sequence[int]], list[int]]
Admit = Callable[[Sequence[int], Floats | None], list[int]]


class Lengths(LengthPolicy):
    """Asks functions: draft slots from requests and limits, verify lengths from slots and confidence logits."""

    reads_confidence = admits_by_confidence = True

    def __init__(self, plan: Plan | None = None, admit: Admit | None = None) -> None:
        self._plan, self._admit = plan, admit

    def plan(self, requests: Sequence[Request], limits: Sequence[int], prefill_tokens: int) -> list[int]:
        return self._plan(requests, limits) if self._plan else list(limits)

    def admit(
        self, requests: Sequence[Request], slots: Sequence[int], logits: Floats | None, prefill_tokens: int
    ) -> list[int]:
        return self._admit(slots, logits) if self._admit else list(slots)


def cost_of(slope: float, draft: float = 0.0, draft_len: int = 2, start: float = 1.0) -> StepCost:
    """A pass costs `start` for one token and `slope` for every other, whatever it is of."""
    verify = [start, start + 63 * slope]
    return StepCost(CostCurves([1, 64], verify, [1, 64], [draft] * 2, [draft] * 2, draft_len))


class Timeless(AutoPolicy):
    """For which steps take what its costs say: how long they really took decides nothing."""

    def observe_step(self, outcome: StepOutcome) -> None:
        context = (outcome.context // GRAIN_OF_CONTEXT + 0.5) * GRAIN_OF_CONTEXT
        seconds = self.cost.seconds(outcome.batch_tokens, context, outcome.decoding, outcome.drafting, outcome.drafted)
        super().observe_step(replace(outcome, seconds=seconds))


class Noting(Timeless):
    """Remembers the lengths."""

    def __init__(self, cost: StepCost, calibration: Calibration | None = None) -> None:
        super().__init__(cost, calibration)
        self.seen: list[tuple[int, int]] = []

    def admit(
        self, requests: Sequence[Request], slots: Sequence[int], logits: Floats | None, prefill_tokens: int
    ) -> list[int]:
        lens = super().admit(requests, slots, logits, prefill_tokens)
        self.seen += zip(slots, lens, strict=True)
        return lens


class Eager(Noting):
    """Drafts whole blocks, though they seldom pay: `admit` has something to choose from."""

    def plan(self, requests: Sequence[Request], limits: Sequence[int], prefill_tokens: int) -> list[int]:
        super().plan(requests, limits, prefill_tokens)
        return list(limits)


def one_round(
    request: Request, logits: Sequence[float] | None, *, drafted: int, verified: int, accepted: int, decided: int = -1
) -> Rounds:
    """A step in which one request drafted; `decided` is what no early end of the text would leave it."""
    decided = min(accepted + 1, verified) if decided < 0 else decided
    given = None if logits is None else np.array([logits], float)
    return Rounds([request], given, *(np.array([count]) for count in (drafted, verified, decided, accepted)))
