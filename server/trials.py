"""Doing now and then what does not seem to pay: or nobody would ever learn that it does by now.

All of it is decided before anything is drafted, by counting steps: no text's distribution depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from server.cost_watch import SETTLED
from server.request import Request

# After so many steps in which somebody did not draft, one of those does for some rounds, with few slots. After each
# vain try the next one comes twice as late, up to a limit: in the long run trying costs well under one percent. Several
# that try together share the rounds: as much is learnt.
EXPLORE_EVERY, EXPLORE_ROUNDS, EXPLORE_SLOTS, EXPLORE_RARELY = 768, 4, 2, 3072
# Much sooner where drafting would pay if the draft were only a little better than is known.
EXPLORE_SOON = 32
# While drafting seems to pay, so many steps go by until some are plain: few for the first times, for what was measured
# before may be wrong by more than drafting would gain; and more once many plain steps are known, above all where they
# would lose much: machines change. They come in a row, since the first ones after a draft take longer than others.
PLAIN_SOON, FIRST_TIMES, PLAIN_EVERY, PLAIN_KNOWN, PLAIN_LATER, PLAIN_RARELY = 4, 2, 48, 16, 128, 1024
PLAIN_RUN, MUCH = SETTLED + 4, 1.2
REST = 63  # steps in which the answer "nobody drafts" stands without being asked again, if no try is due


class Trials:
    """Whose turn it is to try drafting, and when a step is to be plain although drafting pays."""

    def __init__(self) -> None:
        self._idle_steps = self._drafting_steps = self._plain_runs = self._plain_left = 0
        self._patience = self._fresh_patience()
        self._due, self._rest, self._resting = 0, 0, list[Request]()
        self._turn = 0
        # Rounds left of those that are trying; and when each last began to, until it drafts by itself.
        self._left: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._began: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    @staticmethod
    def _fresh_patience() -> dict[bool, int]:
        """Idle steps until the next try, by whether there is hope."""
        return {True: EXPLORE_SOON, False: EXPLORE_EVERY}

    def resting(self, requests: Sequence[Request]) -> bool:
        """Whether these did not draft in the step before and need not be asked again yet."""
        if not self._rest or self._resting != requests:
            return False
        self._rest -= 1
        self._idle_steps += 1
        return True

    def rest(self, requests: Sequence[Request]) -> None:
        """Nobody of these drafts."""
        self._rest, self._resting = min(REST, self._due), list(requests)

    def explore(self, idle: Mapping[Request, int]) -> set[Request]:
        """Of those that would not draft, who does so all the same.

        Args:
            idle: them, and how many slots each would draft if the draft were a little better than is known.
        """
        if not idle:
            return set()
        hopeful = [request for request, slots in idle.items() if slots]
        hope = bool(hopeful)
        self._idle_steps += 1
        if self._idle_steps >= self._patience[hope]:
            self._idle_steps, self._turn = 0, self._turn + 1
            self._patience[hope] = min(2 * self._patience[hope], EXPLORE_RARELY)
            # Where there is hope all that have it try together: then it costs little, for together they nearly pay.
            trying = hopeful or [min(idle, key=lambda request: self._began.get(request, 0))]
            for request in trying:
                self._began[request], self._left[request] = self._turn, max(EXPLORE_ROUNDS // len(trying), 1)
        self._due = max(self._patience[hope] - self._idle_steps, 0)
        if not self._left:
            return set()
        tries = {request for request in idle if request in self._left}
        for request in tries:
            self._left[request] -= 1
            if not self._left[request]:
                del self._left[request]
        return tries

    def drafts(self, requests: Sequence[Request]) -> None:
        """These draft because it pays. If one of them had tried, trying is worth while again."""
        for request in requests if self._began else ():
            if self._began.pop(request, None) is not None:
                self._patience = self._fresh_patience()

    def plain_step(self, known: int, gain: float, *, alone: bool) -> bool:
        """Whether this step, in which drafting pays, is to be a plain one: what it costs beside it is not known else.

        Args:
            known: plain steps that were timed.
            gain: tokens a second with drafting, by those of plain steps.
            alone: no prompt is in this step. Beside one its time would not tell, so that none begins there; but those
                that have begun go on, for a draft among them would make the others worthless.
        """
        if not self._plain_left:
            if not alone:
                return False
            self._drafting_steps += 1
            later = PLAIN_EVERY if known < PLAIN_KNOWN else PLAIN_RARELY if gain > MUCH else PLAIN_LATER
            if self._drafting_steps < (PLAIN_SOON if self._plain_runs < FIRST_TIMES else later):
                return False
            self._drafting_steps, self._plain_runs, self._plain_left = 0, self._plain_runs + 1, PLAIN_RUN
        self._plain_left -= 1
        return True
