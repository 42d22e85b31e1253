"""The scheduler: requests draft, and are verified, as far as pays by the measured cost of steps, or not at all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from dspark_core.checkpoint.calibration import Calibration
from dspark_core.schedule import choose_draft_lens, choose_verify_lens
from dspark_core.step_cost import CostCurves, StepCost
from server.cost_watch import CostWatch
from server.history import History
from server.policy import LengthPolicy, Rounds, StepOutcome
from server.request import Request

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CONTEXT_STEP = 64  # tokens; costs are looked up anew after so many more
# Slots drafted beyond what earlier rounds say will pay, for today's confidence to choose from. One is cheap, and brings
# nearly all that a free choice brings (docs/LOG.md).
SPARE_SLOTS = 1
# After so many steps in which somebody did not draft, one of those does for some rounds, with few slots: or nobody
# would ever learn that drafts got better. After each vain try the next one comes twice as late, up to a
# limit, so that trying costs well under one percent where nothing pays.
EXPLORE_EVERY, EXPLORE_ROUNDS, EXPLORE_SLOTS, EXPLORE_RARELY = 192, 4, 2, 3072


@dataclass
class _Step:
    """What `plan` knew and answered; the next step takes it over if nothing has changed.

    Attributes:
        question: all that the answer depends on.
        curves: costs at this length of context.
        requests, prefill_tokens: in the target's pass.
        able: requests that may draft, and their places in what follows.
        expected: [len(able), K] survival, from earlier rounds.
        lens: draft slots of those requests.
        in_full: requests whose blocks are verified whatever their confidence, by a choice made before drafting.
    """

    question: object
    curves: CostCurves
    requests: int
    prefill_tokens: int
    able: dict[Request, int]
    expected: Floats
    lens: list[int]
    in_full: set[Request] = field(default_factory=set)


class AutoPolicy(LengthPolicy):
    """Chooses by cost, earlier rounds and, with a confidence head, today's block.

    Who drafts and how far is decided from earlier rounds alone, by a search over the whole curve of costs that includes
    drafting nothing (paper §5.2). How much of it is verified is then decided by Algorithm 1 over today's survival.
    Neither can touch a text's distribution, nor any text of a request with a seed. (Which of its texts an unseeded
    request gets does depend on it: times differ from run to run.)

    Args:
        cost: of steps.
        calibration: of the confidence; None for a draft without that head, which is verified as far as it drafts.

    Attributes:
        full_share: share of the rounds that draft in which whole blocks are drafted and verified.
    """

    def __init__(self, cost: StepCost, calibration: Calibration | None = None) -> None:
        self.cost, self.calibration = cost, calibration
        self.reads_confidence = calibration is not None
        self.history = History(cost.draft_len)
        self.watch = CostWatch(cost)
        self._step: _Step | None = None
        self._idle_steps, self._patience = 0, EXPLORE_EVERY
        self.full_share, self._coins = 0.0, random.Random()
        # Rounds left of those that are tried, and how many rounds there had been of all when one last began to.
        self._exploring: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._explored_at: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def plan(self, requests: Sequence[Request], limits: Sequence[int], prefill_tokens: int) -> list[int]:
        able = [i for i, limit in enumerate(limits) if limit]
        lens = [0] * len(limits)
        if not able:
            return lens
        step = self._step = self._search(requests, able, limits, prefill_tokens)
        spare = SPARE_SLOTS if self.reads_confidence else 0
        for i, length in zip(able, step.lens, strict=True):
            lens[i] = min(length + spare, limits[i]) if length else 0
        if any(step.lens):
            self._patience = EXPLORE_EVERY
        step.in_full = self._explore([requests[i] for i in able if not lens[i]])
        for i in able if step.in_full else ():
            if requests[i] in step.in_full:
                lens[i] = min(EXPLORE_SLOTS, limits[i])
        for i in able if self.full_share else ():
            if lens[i] and self._coins.random() < self.full_share:
                lens[i] = limits[i]
                step.in_full.add(requests[i])
        return lens

    def _search(
        self, requests: Sequence[Request], able: Sequence[int], limits: Sequence[int], prefill_tokens: int
    ) -> _Step:
        """The lengths that earlier rounds call for. While nobody drafts nothing new is learnt: then once is enough."""
        context = sum(request.table.kv_len for request in requests) / len(requests)
        place = context // CONTEXT_STEP
        question = (self.history.rounds, tuple(requests), tuple(limits), place, prefill_tokens, self.watch.factor)
        if self._step is not None and self._step.question == question:
            return self._step
        curves = self.cost.at(context, len(requests))
        may_draft = [requests[i] for i in able]
        expected = self.history.survival(may_draft)
        lens = choose_draft_lens(
            expected,
            [limits[i] for i in able],
            curves,
            others=len(limits) - len(able),
            prefill_tokens=prefill_tokens,
            draft_factor=self.watch.factor,
        )
        places = {request: place for place, request in enumerate(may_draft)}
        return _Step(question, curves, len(requests), prefill_tokens, places, expected, lens)

    def _explore(self, idle: Sequence[Request]) -> set[Request]:
        """Of those that would not draft, who does so all the same: one, now and then."""
        if not idle:
            return set()
        self._idle_steps += 1
        if self._idle_steps >= self._patience:
            self._idle_steps, self._patience = 0, min(2 * self._patience, EXPLORE_RARELY)
            chosen = min(idle, key=lambda request: self._explored_at.get(request, -1))
            self._explored_at[chosen], self._exploring[chosen] = self.history.rounds, EXPLORE_ROUNDS
        if not self._exploring:
            return set()
        explored = {request for request in idle if self._exploring.get(request)}
        for request in explored:
            self._exploring[request] -= 1
        return explored

    def admit(self, requests: Sequence[Request], slots: Sequence[int], logits: Floats | None) -> list[int]:
        step = self._step
        assert step is not None, "admit comes after plan"
        if self.calibration is None or logits is None:
            return list(slots)
        rows = np.array([step.able[request] for request in requests])
        survival = self._survival(requests, np.array(slots), logits, step.expected[rows])
        for row, request in enumerate(requests if step.in_full else ()):
            if request in step.in_full:  # so that its outcome is an unbiased one
                survival[row] = 1.0
        count, drafting, first = sum(slots), np.array([float(len(slots))]), step.requests + step.prefill_tokens
        seconds = step.curves.verify_seconds(first + np.arange(count + 1.0))
        seconds += step.curves.draft_seconds(drafting, np.array([float(count)]))
        drafted = np.arange(step.expected.shape[1]) < np.array(slots)[:, None]
        corners = {*(tokens - first for tokens in step.curves.tokens), count}
        return choose_verify_lens(
            survival,
            slots,
            seconds,
            others=step.requests - len(requests),
            expected=np.sort(step.expected[rows][drafted])[::-1],
            corners=sorted(corner for corner in corners if 0 < corner <= count),
        )

    def _survival(self, requests: Sequence[Request], slots: Ints, logits: Floats, expected: Floats) -> Floats:
        """[R, k] by today's confidence, corrected by earlier outcomes; by earlier rounds where it is not a number."""
        assert self.calibration is not None
        survival = self.calibration.survival([request.params.sampling.regime for request in requests], logits)
        survival *= self.history.correction(requests)[:, None]
        size = logits.shape[1]
        unknown = (np.isnan(logits) & (np.arange(size) < slots[:, None])).any(-1)
        survival[unknown] = expected[unknown, :size]
        return np.minimum(survival, 1.0)

    def in_full(self, request: Request) -> bool:
        """Whether this request's last block was verified by a choice made before it was drafted."""
        return self._step is not None and request in self._step.in_full

    def observe(self, rounds: Rounds) -> None:
        survival = None
        if self.calibration is not None and rounds.logits is not None:
            survival = np.full((len(rounds.requests), self.history.draft_len), np.nan)
            size = rounds.logits.shape[1]
            survival[:, :size] = self.calibration.survival(rounds.regimes, rounds.logits)
        self.history.observe(rounds, survival)

    def observe_step(self, outcome: StepOutcome) -> None:
        self.watch.observe(outcome)
