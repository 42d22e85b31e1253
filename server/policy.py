"""Which requests draft in a step, and how far: what earlier rounds accepted, against what steps cost here."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from dspark_core.schedule import Acceptance, StepCost, choose_draft_lens
from server.request import Request

START = 0.6  # acceptance that a draft is trusted with before anything is known
ALL_MEMORY, OWN_MEMORY = 100.0, 30.0  # rounds
OWN_PRIOR = 6.0  # rounds that the estimate over all requests counts for in a request's own
# After so many steps in which somebody did not draft, one of those does for some rounds, with few slots: or nobody
# would ever learn that drafts got better.
EXPLORE_EVERY, EXPLORE_ROUNDS, EXPLORE_SLOTS = 192, 4, 2


class DraftPolicy:
    """Chooses draft lengths. Only earlier rounds enter: no text's distribution depends on it, and no text
    at all of a request with a seed. (Which of the texts an unseeded one gets does: times differ from run to run.)

    Args:
        cost: of steps, as `server.profile` measures it.
    """

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self._all = Acceptance(cost.draft_len, ALL_MEMORY)
        self._observed = self._idle_steps = 0
        self._answered: tuple[object, list[int]] | None = None
        self._own: WeakKeyDictionary[Request, _Record] = WeakKeyDictionary()

    def choose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[int]:
        """Draft slots of requests that decode in this step, at most `limits` (0: does not speculate)."""
        records = [self._record(request) for request in requests]
        drafting = [i for i, limit in enumerate(limits) if limit]
        lens = [0] * len(limits)
        if not drafting:
            return lens
        question = (self._observed, tuple(records), tuple(limits))
        if self._answered is None or self._answered[0] != question:  # while nobody drafts, nothing new is learnt
            self._answered = question, self._search(records, drafting, limits)
        for i, length in zip(drafting, self._answered[1], strict=True):
            lens[i] = length
        self._explore([(records[i], i) for i in drafting if not lens[i]], lens, limits)
        return lens

    def _explore(self, idle: Sequence[tuple[_Record, int]], lens: list[int], limits: Sequence[int]) -> None:
        """Let one of those that would not draft do so, now and then."""
        if not idle:
            return
        self._idle_steps += 1
        if self._idle_steps >= EXPLORE_EVERY:
            self._idle_steps = 0
            min((record for record, _ in idle), key=lambda record: record.explored_at).explore(self._observed)
        for record, i in idle:
            if record.to_explore:
                record.to_explore -= 1
                lens[i] = min(EXPLORE_SLOTS, limits[i])

    def _search(self, records: Sequence[_Record], drafting: Sequence[int], limits: Sequence[int]) -> list[int]:
        base = self._all.rates(START, 1.0)
        survival = np.stack([records[i].acceptance.rates(base, OWN_PRIOR) for i in drafting]).cumprod(-1)
        own_limits, others = [limits[i] for i in drafting], len(limits) - len(drafting)
        return choose_draft_lens(survival, own_limits, self.cost, other_tokens=others)

    def _record(self, request: Request) -> _Record:
        """The request's record, with the rounds since it was last looked at."""
        record = self._own.setdefault(request, _Record(self.cost.draft_len))
        for decided, accepted in request.decided_and_accepted[record.seen :]:
            record.acceptance.observe(decided, accepted)
            self._all.observe(decided, accepted)
            self._observed += 1
        record.seen = len(request.decided_and_accepted)
        return record


class _Record:
    """What is known of one request.

    Attributes:
        seen: rounds of its that were taken in.
        to_explore: rounds in which it is to draft although that seems not to pay.
        explored_at: observations there were when it last began to.
    """

    def __init__(self, draft_len: int) -> None:
        self.acceptance, self.seen = Acceptance(draft_len, OWN_MEMORY), 0
        self.to_explore, self.explored_at = 0, -1

    def explore(self, observed: int) -> None:
        self.to_explore, self.explored_at = EXPLORE_ROUNDS, observed
