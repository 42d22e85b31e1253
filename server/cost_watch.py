"""Predicted against actual step time."""

from __future__ import annotations

import numpy as np

from dspark_core.arrays import Floats, Ints
from dspark_core.step_cost import StepCost
from server.policy import StepOutcome

MEMORY, PRIOR = 50, 8  # steps: for how many a mean is taken, and what "both alike" counts for
# What a mean over steps with, or without, drafting counts for fades with every one of the other kind, down to so many
# steps: it was taken a while ago, on a machine that may be another one by now.
STALE, LEAST_MEMORY = 0.99, 8
LEAST, MOST = 0.5, 2.0  # of the usual: a step that took longer was interrupted by something else
GRAIN_OF_CONTEXT, MOST_KNOWN = 64, 4096  # tokens that make no difference; predictions that are kept
MOST_ROWS = 256  # larger passes are taken to be alike
ENOUGH = 4  # of many plain steps in a row every fourth is looked at: looking takes time too
SETTLED = 4  # plain steps after a drafting one that are not looked at: the draft has taken the target's place in caches
FADES = 0.995  # what a size of pass is known by, from one drafting step to the next


class CostWatch:
    """How much longer steps take than was measured, with and without drafting.

    A step is more than the models' passes: sampling, verification and delivery come on top, and more of it where
    requests draft. Those shares depend on how tokens are sampled, so they are learnt and not measured beforehand.

    A plain step right after a draft takes up to a tenth more than one of many plain ones. Those are the alternative to
    drafting, so that only they count.

    Attributes:
        plain, drafting: actual / predicted seconds, running means; 1 before anything is known.
        predicted: seconds of the last step that was looked at.
        steps: that were looked at.
    """

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.plain = self.drafting = 1.0
        self.predicted, self.steps = 0.0, 0
        self._plain_run = SETTLED  # steps since somebody drafted
        self._counts = {False: 0, True: 0}  # of steps without and with drafting
        self._weights = {False: 0.0, True: 0.0}  # of how many of them it still is the mean
        self._known: dict[tuple[int, ...], float] = {}
        # [MOST_ROWS] the same as `drafting` for passes of so many rows, and of how many steps each is the mean.
        self._by_rows, self._seen = np.ones(MOST_ROWS), np.zeros(MOST_ROWS)

    @property
    def plain_steps(self) -> int:
        """How many steps without drafting were seen, up to a limit."""
        return self._counts[False]

    @property
    def _share(self) -> float:
        """How far the two means are to be trusted: as far as both are known, for what slows both down says nothing."""
        known = min(self._counts.values())
        return known / (known + PRIOR)

    def factors(self, batch_tokens: Ints) -> Floats:
        """[N] what the predicted seconds of passes of so many rows are to be multiplied by if somebody drafts in them,
        next to plain ones: what was measured may be further off for some sizes than for others.
        """
        rows = np.minimum(batch_tokens, MOST_ROWS - 1)
        seen = self._seen[rows]
        mean = (self._by_rows[rows] * seen + self.drafting * PRIOR) / (seen + PRIOR)
        found: Floats = 1 + (mean / self.plain - 1) * self._share
        return found

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step, if it is one like others."""
        drafts = outcome.drafting > 0
        self._plain_run = 0 if drafts else self._plain_run + 1
        if not (drafts or self._plain_run > SETTLED) or not outcome.steady:
            return
        if self._plain_run > MEMORY and self._plain_run % ENOUGH:
            return
        self.steps += 1
        place = int(outcome.context // GRAIN_OF_CONTEXT)
        key = (outcome.batch_tokens, place, outcome.decoding, outcome.drafting, outcome.drafted)
        if key not in self._known:  # steps are alike, and this is asked in every one
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = self.cost.seconds(key[0], (place + 0.5) * GRAIN_OF_CONTEXT, *key[2:])
        self.predicted = self._known[key]
        mean, found = (self.drafting if drafts else self.plain), outcome.seconds / self.predicted
        if self._counts[drafts] >= PRIOR:
            found = min(max(found, LEAST * mean), MOST * mean)
        self._counts[drafts] = min(self._counts[drafts] + 1, MEMORY)
        self._weights[drafts] = weight = min(self._weights[drafts] + 1, MEMORY)
        if self._weights[not drafts] > LEAST_MEMORY:
            self._weights[not drafts] *= STALE
        if drafts:
            self.drafting += (found - self.drafting) / weight
            rows = min(outcome.batch_tokens, MOST_ROWS - 1)
            self._seen *= FADES  # sizes that are not met are forgotten: the machine was another one then
            self._seen[rows] = seen = min(self._seen[rows] + 1, MEMORY)
            self._by_rows[rows] += (found - self._by_rows[rows]) / seen
        else:
            self.plain += (found - self.plain) / weight
