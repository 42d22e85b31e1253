"""What earlier rounds tell about the next one: of one request, and of all."""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from dspark_core.schedule import Acceptance
from server.policy import RoundOutcome
from server.request import Request

Floats = NDArray[np.float64]

START = 0.6  # acceptance that a draft is trusted with before anything is known
ALL_MEMORY, OWN_MEMORY = 100.0, 30.0  # rounds
OWN_PRIOR = 6.0  # rounds that the estimate over all requests counts for in a request's own
# How far outcomes may correct the confidence, and for how many tokens "as predicted" counts before there are any.
LEAST_CORRECTION, MOST_CORRECTION, CORRECTION_PRIOR = 0.25, 2.0, 8.0


class Estimate:
    """Running figures over rounds.

    Attributes:
        acceptance: by slot.
        predicted, accepted: tokens that the confidence promised and that were accepted, of those verified.
    """

    def __init__(self, draft_len: int, memory: float) -> None:
        self.acceptance = Acceptance(draft_len, memory)
        self.predicted = self.accepted = 0.0
        self._keep = math.exp(-1 / memory)

    def observe(self, outcome: RoundOutcome, survival: Floats | None) -> None:
        """Add a round; `survival` [drafted] is what the confidence said of it, None if it said nothing."""
        if survival is None:
            self.acceptance.observe([1.0] * outcome.decided, [1.0] * outcome.accepted)
            return
        # By what was expected of all slots, verified or not: judging by outcomes those slots alone that looked good
        # enough to be verified would flatter the others.
        self.acceptance.observe(np.concatenate(([1.0], survival[:-1])), survival)
        if outcome.decided == outcome.accepted < outcome.verified:
            return  # the text ended in its block: nobody knows how far that would have gone
        self.predicted = self.predicted * self._keep + float(survival[: outcome.verified].sum())
        self.accepted = self.accepted * self._keep + outcome.accepted

    def correction(self, prior: float) -> float:
        """What the confidence's promises are to be multiplied by; `prior` counts for some tokens."""
        found = (self.accepted + prior * CORRECTION_PRIOR) / (self.predicted + CORRECTION_PRIOR)
        return min(max(found, LEAST_CORRECTION), MOST_CORRECTION)


class History:
    """Estimates over all requests, and of each."""

    def __init__(self, draft_len: int) -> None:
        self.draft_len, self.rounds = draft_len, 0
        self._all = Estimate(draft_len, ALL_MEMORY)
        self._own: WeakKeyDictionary[Request, Estimate] = WeakKeyDictionary()

    def observe(self, outcome: RoundOutcome, survival: Floats | None) -> None:
        self._all.observe(outcome, survival)
        self._of(outcome.request).observe(outcome, survival)
        self.rounds += 1

    def survival(self, request: Request) -> Floats:
        """[K] probability that the drafts up to each slot of the next block are all accepted."""
        base = self._all.acceptance.rates(START, 1.0)
        rates = self._of(request).acceptance.rates(base, OWN_PRIOR)
        return np.minimum(rates.cumprod() * self.correction(request), 1.0)

    def correction(self, request: Request) -> float:
        """What this request's confidence is to be multiplied by, by what became of earlier blocks."""
        return self._of(request).correction(self._all.correction(1.0))

    def _of(self, request: Request) -> Estimate:
        return self._own.setdefault(request, Estimate(self.draft_len, OWN_MEMORY))
