"""The scheduler: requests draft, and are verified, as far as pays by the measured cost of steps, or not at all."""

from __future__ import annotations

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
from server.policy import LengthPolicy, RoundOutcome, StepOutcome
from server.request import Request

Floats = NDArray[np.float64]

CONTEXT_STEP = 64  # tokens; costs are looked up anew after so many more
# Slots drafted beyond what earlier rounds say will pay, for today's confidence to choose from. One is cheap, and brings
# nearly all that a free choice brings (docs/LOG.md).
SPARE_SLOTS = 1
# After so many steps in which somebody did not draft, one of those does for some rounds, with few slots: or nobody
# would ever learn that drafts got better.
EXPLORE_EVERY, EXPLORE_ROUNDS, EXPLORE_SLOTS = 192, 4, 2


@dataclass
class _Step:
    """What `plan` knew and answered; the next step takes it over if nothing has changed.

    Attributes:
        question: all that the answer depends on.
        curves: costs at this length of context.
        requests, prefill_tokens: in the target's pass.
        expected: [K] survival by request, from earlier rounds.
        lens: draft slots of those requests.
        explored: requests that draft although that seems not to pay.
    """

    question: object
    curves: CostCurves
    requests: int
    prefill_tokens: int
    expected: dict[Request, Floats]
    lens: list[int]
    explored: set[Request] = field(default_factory=set)


class AutoPolicy(LengthPolicy):
    """Chooses by cost, earlier rounds and, with a confidence head, today's block.

    Who drafts and how far is decided from earlier rounds alone, by a search over the whole curve of costs that includes
    drafting nothing (paper §5.2). How much of it is verified is then decided by Algorithm 1 over today's survival.
    Neither can touch a text's distribution, nor any text of a request with a seed. (Which of its texts an unseeded
    request gets does depend on it: times differ from run to run.)

    Args:
        cost: of steps.
        calibration: of the confidence; None for a draft without that head, which is verified as far as it drafts.
    """

    def __init__(self, cost: StepCost, calibration: Calibration | None = None) -> None:
        self.cost, self.calibration = cost, calibration
        self.reads_confidence = calibration is not None
        self.history = History(cost.draft_len)
        self.watch = CostWatch(cost)
        self._step: _Step | None = None
        self._idle_steps = 0
        self._explorers: WeakKeyDictionary[Request, _Explorer] = WeakKeyDictionary()

    def plan(self, requests: Sequence[Request], limits: Sequence[int], prefill_tokens: int) -> list[int]:
        able = [i for i, limit in enumerate(limits) if limit]
        lens = [0] * len(limits)
        if not able:
            return lens
        step = self._step = self._search(requests, able, limits, prefill_tokens)
        spare = SPARE_SLOTS if self.reads_confidence else 0
        for i, length in zip(able, step.lens, strict=True):
            lens[i] = min(length + spare, limits[i]) if length else 0
        step.explored = self._explore({i: requests[i] for i in able if not lens[i]})
        for i in able:
            if requests[i] in step.explored:
                lens[i] = min(EXPLORE_SLOTS, limits[i])
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
        expected = {requests[i]: self.history.survival(requests[i]) for i in able}
        lens = choose_draft_lens(
            np.stack(list(expected.values())),
            [limits[i] for i in able],
            curves,
            others=len(limits) - len(able),
            prefill_tokens=prefill_tokens,
            draft_factor=self.watch.factor,
        )
        return _Step(question, curves, len(requests), prefill_tokens, expected, lens)

    def _explore(self, idle: dict[int, Request]) -> set[Request]:
        """Of those that would not draft, who does so all the same: one, now and then."""
        if not idle:
            return set()
        explorers = {request: self._explorers.setdefault(request, _Explorer()) for request in idle.values()}
        self._idle_steps += 1
        if self._idle_steps >= EXPLORE_EVERY:
            self._idle_steps = 0
            chosen = min(explorers.values(), key=lambda explorer: explorer.began)
            chosen.rounds_left, chosen.began = EXPLORE_ROUNDS, self.history.rounds
        explored = {request for request, explorer in explorers.items() if explorer.rounds_left}
        for request in explored:
            explorers[request].rounds_left -= 1
        return explored

    def admit(self, requests: Sequence[Request], slots: Sequence[int], logits: Floats | None) -> list[int]:
        step = self._step
        assert step is not None, "admit comes after plan"
        if self.calibration is None or logits is None:
            return list(slots)
        survival = self._survival(requests, slots, logits, step)
        for row, request in enumerate(requests):
            if request in step.explored:  # what is tried is tried in full: its outcome is to be an unbiased one
                survival[row] = 1.0
        count, drafting = sum(slots), np.array([float(len(slots))])
        first = step.requests + step.prefill_tokens
        seconds = step.curves.verify_seconds(first + np.arange(count + 1.0))
        seconds += step.curves.draft_seconds(drafting, np.array([float(count)]))
        ranked = np.sort(np.concatenate([step.expected[r][:k] for r, k in zip(requests, slots, strict=True)]))[::-1]
        corners = [*(tokens - first for tokens in step.curves.tokens), count]
        return choose_verify_lens(
            survival,
            slots,
            seconds,
            others=step.requests - len(requests),
            expected=ranked,
            corners=[corner for corner in corners if 0 < corner <= count],
        )

    def _survival(self, requests: Sequence[Request], slots: Sequence[int], logits: Floats, step: _Step) -> Floats:
        """[R, K] by today's confidence, corrected by earlier outcomes; by earlier rounds where it is not a number."""
        assert self.calibration is not None
        survival = self.calibration.survival([request.params.sampling.regime for request in requests], logits)
        survival *= np.array([[self.history.correction(request)] for request in requests])
        for row in np.flatnonzero(np.isnan(logits).any(-1)).tolist():
            size = slots[row]
            if np.isnan(logits[row, :size]).any():
                survival[row, :size] = step.expected[requests[row]][:size]
        return np.minimum(survival, 1.0)

    def observe(self, outcome: RoundOutcome) -> None:
        survival = None
        if self.calibration is not None and outcome.logits is not None and not np.isnan(outcome.logits).any():
            regime = outcome.request.params.sampling.regime
            survival = self.calibration.survival([regime], np.array([outcome.logits]))[0]
        self.history.observe(outcome, survival)

    def observe_step(self, outcome: StepOutcome) -> None:
        self.watch.observe(outcome)


class _Explorer:
    """Rounds in which a request is to draft although that seems not to pay, and how many rounds there had been of all
    requests when it last began to."""

    rounds_left, began = 0, -1
