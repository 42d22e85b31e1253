"""Predicted against actual step time."""

from __future__ import annotations

import math

from dspark_core.step_cost import StepCost
from server.policy import StepOutcome

MEMORY = 50.0  # steps
LEAST, MOST = 0.5, 2.0  # a step that took longer was interrupted by something else
GRAIN = 50  # the factor moves in steps of 2 %, for every change of it means a new search


class CostWatch:
    """How much longer steps take than was measured, with and without drafting.

    A step is more than the models' passes: sampling, verification and delivery come on top, and more of it where
    requests draft. Those shares depend on how tokens are sampled, so they are learnt and not measured beforehand.

    Attributes:
        plain, drafting: actual / predicted seconds, running means; 1 before anything is known.
        predicted: seconds of the last step that was looked at.
    """

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.plain = self.drafting = 1.0
        self.predicted = 0.0
        self._keep = math.exp(-1 / MEMORY)

    @property
    def factor(self) -> float:
        """What a step's predicted seconds are to be multiplied by if somebody drafts in it, next to a plain one."""
        return round(self.drafting / self.plain * GRAIN) / GRAIN

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step. Those with prompts in them are left out: their cost is not measured as closely."""
        if outcome.prefill_tokens or not outcome.decoding:
            return
        self.predicted = self.cost.seconds(
            outcome.batch_tokens, outcome.context, outcome.decoding, outcome.drafting, outcome.drafted
        )
        found = min(max(outcome.seconds / self.predicted, LEAST), MOST)
        if outcome.drafting:
            self.drafting += (found - self.drafting) * (1 - self._keep)
        else:
            self.plain += (found - self.plain) * (1 - self._keep)
