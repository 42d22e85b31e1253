"""What earlier rounds tell about the next one: of one request, and of all."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence

import numpy as np

from dspark_core.arrays import Floats, Ints
from dspark_core.sampling import REGIMES, Regime
from server.policy import Rounds, regimes_of
from server.request import Request

# Acceptance that a draft is trusted with before anything is known, for one round. High: a bad draft is found out in
# some rounds, once for all requests, but a good one that is not tried is not found.
START = 0.85
KNOWN_WEIGHT = 60.0  # rounds that what is known from calibration counts for
ALL_MEMORY, OWN_MEMORY = 400.0, 30.0  # rounds after which one counts for 1/e of a new one
OWN_PRIOR = 6.0  # rounds that the estimate over all requests counts for in a request's own
# How far outcomes may correct the confidence, and for how many slots "as predicted" counts before there are any.
LEAST_CORRECTION, MOST_CORRECTION, CORRECTION_PRIOR = 0.25, 2.0, 8.0


class Sums:
    """Fading sums over the rounds of some groups (requests, or all together).

    Attributes:
        table: [G, 2 K + 2] all of them side by side, in the order of what follows, which are views.
        reached, stood: [G, K] rounds, or their probability, in which a slot was reached, and in which it stood.
        predicted, accepted: [G] slots that the confidence promised and that were accepted, of those that were judged.
    """

    def __init__(self, groups: int, draft_len: int) -> None:
        self.draft_len = draft_len
        self._show(np.zeros((groups, 2 * draft_len + 2)))

    def _show(self, table: Floats) -> None:
        size, self.table = self.draft_len, table
        self.reached, self.stood = table[:, :size], table[:, size : 2 * size]
        self.predicted, self.accepted = table[:, -2], table[:, -1]

    def grow(self) -> None:
        """Twice as many groups."""
        self._show(np.concatenate((self.table, np.zeros_like(self.table))))

    def rates(self, groups: Ints, prior: Floats | float, weight: float) -> Floats:
        """[G, K] conditional acceptance; `prior` counts as `weight` rounds."""
        rates: Floats = (self.stood[groups] + prior * weight) / (self.reached[groups] + weight)
        return rates

    def correction(self, groups: Ints, prior: Floats | float) -> Floats:
        """[G] what the confidence of a slot is to be multiplied by; `prior` counts for some slots."""
        found = (self.accepted[groups] + prior * CORRECTION_PRIOR) / (self.predicted[groups] + CORRECTION_PRIOR)
        return np.clip(found, LEAST_CORRECTION, MOST_CORRECTION)


class History:
    """Sums over all requests of a regime, and of each request.

    Args:
        known: [K] conditional acceptance as it was when the draft was calibrated; a regime that is not there is taken
            to be like the ratio rule.
    """

    def __init__(self, draft_len: int, known: Mapping[Regime, Sequence[float]] | None = None) -> None:
        self.draft_len, self.rounds = draft_len, 0
        self._known, self._weight = np.full((len(REGIMES), draft_len), START), 1.0
        if known is not None:
            self._known = np.array([known.get(regime, known["ratio"]) for regime in REGIMES])
            self._weight = KNOWN_WEIGHT
        self._all, self._own = Sums(len(REGIMES), draft_len), Sums(16, draft_len)
        self._rows: weakref.WeakKeyDictionary[Request, int] = weakref.WeakKeyDictionary()
        self._free = list(range(16))

    def observe(self, rounds: Rounds, confidence: Floats | None, steps: Sequence[int] = ()) -> None:
        """Learn from rounds.

        Args:
            confidence: [R, K] what the head said of them, NaN where it said nothing.
            steps: how many of the rounds are of one step, of the next one, and so on; by default all are of one.
        """
        slots, count = np.arange(self.draft_len), len(rounds.requests)
        # By outcomes, slots that were judged. With confidence, by what was expected of all slots, verified or not:
        # those alone that looked good enough to be verified would flatter the others.
        judged = slots < rounds.decided[:, None]
        reached, stood = judged.astype(float), (slots < rounds.accepted[:, None]).astype(float)
        predicted, accepted = np.zeros(count), np.zeros(count)
        if confidence is not None:
            drafted = slots < rounds.drafted[:, None]
            told = ~np.isnan(np.where(drafted, confidence, 0)).any(-1)
            corrected = np.minimum(confidence * self.correction(rounds.requests)[:, None], 1.0)
            survival = np.where(drafted, corrected, 0).cumprod(-1)
            before = np.concatenate((np.ones((count, 1)), survival[:, :-1]), -1)
            reached[told], stood[told] = np.where(drafted, before, 0)[told], survival[told]
            # Slot by slot, given that those before it stood: so that the end of a text cuts nothing off that would have
            # counted on one side only.
            predicted[told] = np.where(judged, confidence, 0)[told].sum(-1)
            accepted[told] = rounds.accepted[told]
        new = np.concatenate((reached, stood, predicted[:, None], accepted[:, None]), -1)
        rows, regimes, first = self._rows_of(rounds.requests), _regimes(rounds.requests), 0
        for size in steps or (count,):
            step = slice(first, first := first + size)
            self._own.table[rows[step]] = self._own.table[rows[step]] * math.exp(-1 / OWN_MEMORY) + new[step]
            for regime in set(regimes[step].tolist()):
                mine = new[step][regimes[step] == regime]
                faded = self._all.table[regime] * math.exp(-len(mine) / ALL_MEMORY)
                self._all.table[regime] = faded + mine.sum(0)
        self.rounds += count

    def survival(self, requests: Sequence[Request], *, hope: float = 0.0) -> Floats:
        """[R, K] probability that the drafts up to each slot of the next block are all accepted.

        Args:
            hope: how many standard deviations better than what is known of all requests it may be for these.
        """
        regimes = _regimes(requests)
        base = self._all.rates(regimes, self._known[regimes], self._weight)
        if hope:
            base += hope * np.sqrt(base * (1 - base) / (self._all.reached[regimes] + self._weight))
        rates = self._own.rates(self._rows_of(requests), base, OWN_PRIOR)
        return np.minimum(rates, 1.0).cumprod(-1)

    def correction(self, requests: Sequence[Request]) -> Floats:
        """[R] what the confidence of these requests' slots is to be multiplied by, by what became of earlier blocks."""
        return self._own.correction(self._rows_of(requests), self._all.correction(_regimes(requests), 1.0))

    def _rows_of(self, requests: Sequence[Request]) -> Ints:
        return np.array([self._row_of(request) for request in requests])

    def _row_of(self, request: Request) -> int:
        if (known := self._rows.get(request)) is not None:
            return known
        if not self._free:
            size = len(self._own.predicted)
            self._own.grow()
            self._free += range(size, 2 * size)  # the same list: requests that end give their place back to it
        row = self._rows[request] = self._free.pop()
        self._own.table[row] = 0
        weakref.finalize(request, self._free.append, row)
        return row


def _regimes(requests: Sequence[Request]) -> Ints:
    """[R] index into REGIMES."""
    return np.array([REGIMES.index(regime) for regime in regimes_of(requests)])
