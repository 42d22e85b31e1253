"""The scheduler: requests draft, and are verified, as far as pays by the measured cost of steps, or not at all."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from dspark_core.arrays import Floats
from dspark_core.checkpoint.calibration import Calibration
from dspark_core.schedule import choose_draft_lens, choose_verify_lens
from dspark_core.step_cost import StepCost
from server.cost_watch import CostWatch
from server.history import History
from server.planner import Plan, make_plan
from server.policy import LengthPolicy, Rounds, StepOutcome, regimes_of
from server.request import Request
from server.trials import EXPLORE_SLOTS, Trials

logger = logging.getLogger(__name__)

CONTEXT_STEP = 64  # tokens that make no difference to costs
AGAIN = 32  # steps after which a plan is made anew: what they took says more of costs
# Where it would not pay even so much better, at none of some loads, one request in so many is still able to draft: by
# the first tokens of its prompt, drawn anew after a while.
LAST_HOPE, LOADS = 2.0, (1, 4, 16)
WATCHED, BEGINNING, REDRAWN = 8, 64, 512
# Rounds are learnt from at once while little is known, and then those of so many steps together: it takes as long for
# many as for one.
LITTLE, TOGETHER = 16, 8


class AutoPolicy(LengthPolicy):
    """Chooses by cost, earlier rounds and, with a confidence head, today's block.

    Who drafts and how far is decided from earlier rounds alone, by a search over the whole curve of costs that includes
    drafting nothing (paper §5.2). How much of it is verified is then decided by today's survival (Algorithm 1).
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
        self.history = History(cost.draft_len, calibration.acceptance if calibration else None)
        self.watch = CostWatch(cost)
        self._curves = lru_cache(256)(cost.at)
        self._question: object = None  # that the last plan answers
        self._plan: Plan | None = None
        self.trials = Trials()
        self.full_share, self._coins = 0.0, random.Random()
        self._hopeless = 0  # requests for which drafting could not pay
        self._unread: list[Rounds] = []  # of the last steps, not learnt from yet

    def may_draft(self, request: Request) -> bool:
        """Not where drafting would not pay with a draft far better than is known, whatever the load.

        Such requests cost what plain ones cost. Some are excepted, or nobody would learn that things have changed: by
        how their prompts begin, so that all turns of a conversation, which share cached pages, fall on one side.
        """
        survival = self.history.survival([request], hope=LAST_HOPE)
        size = len(request.tokens)
        for context in (size, size + request.max_tokens):
            for load in LOADS:
                limits, curves = [self.history.draft_len] * load, self.cost.at(context, load)
                if any(choose_draft_lens(np.repeat(survival, load, 0), limits, curves).lens):
                    return True
        if not self._hopeless:
            logger.info("no draft would pay here as things are: one request in %d may try, others are plain", WATCHED)
        self._hopeless += 1
        watch = hash((self._hopeless // REDRAWN, *request.tokens[:BEGINNING]))
        return watch % WATCHED == 0

    def plan(self, requests: Sequence[Request], limits: Sequence[int], prefill_tokens: int) -> list[int]:
        lens = [0] * len(limits)
        if self.trials.resting(requests) or not any(limits):
            return lens
        plan = self._planned(requests, limits, prefill_tokens)
        able = [i for i, limit in enumerate(limits) if limit]
        for i, length in zip(able, plan.draft.lens, strict=True):
            lens[i] = min(length + plan.spare, limits[i]) if length else 0
        if any(lens):
            self.trials.drafts([requests[i] for i in able if lens[i]])
            if self.trials.plain_step(self.watch.plain_steps, plan.draft.gain, alone=not prefill_tokens):
                return [0] * len(limits)
        self._add_in_full(plan, requests, lens, limits)
        if not any(lens) and not self._unread:  # else what a try has brought is learnt in this step
            self.trials.rest(requests)
        return lens

    def _add_in_full(self, plan: Plan, requests: Sequence[Request], lens: list[int], limits: Sequence[int]) -> None:
        """Blocks that are drafted and verified by a choice that has nothing to do with what they will be."""
        idle = {requests[i]: i for i, limit in enumerate(limits) if limit and not lens[i]}
        hopes = {request: plan.hopes[plan.able[request]] for request in idle}
        plan.in_full = self.trials.explore(hopes)
        for request in plan.in_full:
            lens[idle[request]] = min(hopes[request] or EXPLORE_SLOTS, limits[idle[request]])
        for i, length in enumerate(lens) if self.full_share else ():
            if length and self._coins.random() < self.full_share:
                lens[i] = limits[i]
                plan.in_full.add(requests[i])

    def _planned(self, requests: Sequence[Request], limits: Sequence[int], prefill_tokens: int) -> Plan:
        """The plan stands until something new is known or asked."""
        context = sum(request.table.kv_len for request in requests) // (len(requests) * CONTEXT_STEP)
        known = self.history.rounds, self.watch.steps // AGAIN
        question = (*known, tuple(requests), tuple(limits), context, prefill_tokens)
        if self._plan is None or self._question != question:
            curves = self._curves((context + 0.5) * CONTEXT_STEP, len(requests))
            self._question, self._plan = (
                question,
                make_plan(
                    self.history,
                    self.watch,
                    curves,
                    requests,
                    limits,
                    prefill_tokens=prefill_tokens,
                    reads_confidence=self.reads_confidence,
                ),
            )
            self.admits_by_confidence = self._plan.by_confidence
        return self._plan

    def admit(
        self, requests: Sequence[Request], slots: Sequence[int], logits: Floats | None, prefill_tokens: int
    ) -> list[int]:
        plan = self._plan
        assert plan is not None, "admit comes after plan"
        if not plan.by_confidence or logits is None:
            return list(slots)
        rows = np.array([plan.able[request] for request in requests])
        expected, drafted = plan.expected[rows], np.arange(plan.expected.shape[1]) < np.array(slots)[:, None]
        survival = self._survival(requests, logits, expected)
        whole = np.array([request in plan.in_full for request in requests])
        free, limits = np.flatnonzero(~whole), [0 if full else k for full, k in zip(whole, slots, strict=True)]
        # What is verified in full is no choice any more: its rows and tokens are in every step there is to choose from.
        fixed, count = sum(slots) - sum(limits), sum(limits)
        first = plan.requests + prefill_tokens + fixed
        seconds = plan.curves.verify_seconds(first + np.arange(count + 1.0))
        seconds += plan.curves.draft_seconds(np.array([float(len(slots))]), np.array([float(sum(slots))]))
        seconds *= self.watch.factors(first + np.arange(count + 1))
        corners = {*(tokens - first for tokens in plan.curves.tokens), count}
        lens = choose_verify_lens(
            survival[free],
            [limits[row] for row in free],
            seconds,
            others=plan.requests - len(free) + float(expected[whole][drafted[whole]].sum()),
            rate=plan.rate,
            expected=np.sort(expected[free][drafted[free]])[::-1],
            corners=sorted(corner for corner in corners if 0 < corner <= count),
        )
        chosen = list(slots)
        for row, length in zip(free, lens, strict=True):
            chosen[row] = length
        return chosen

    def _survival(self, requests: Sequence[Request], logits: Floats, expected: Floats) -> Floats:
        """[R, k] by today's confidence, corrected by earlier outcomes.

        A slot whose confidence is no number gets what earlier rounds say of it, given that those before it stand. Slots
        before it do not notice: it may be what it is because of their tokens.
        """
        assert self.calibration is not None
        confidence = self.calibration.confidence(regimes_of(requests), logits)
        confidence *= self.history.correction(requests)[:, None]
        if (missing := np.isnan(confidence)).any():
            before = np.concatenate((np.ones((len(expected), 1)), expected[:, :-1]), -1)
            usual = np.divide(expected, before, out=np.zeros_like(expected), where=before > 0)
            confidence[missing] = usual[:, : logits.shape[1]][missing]
        return np.minimum(confidence, 1.0).cumprod(-1)

    def in_full(self, request: Request) -> bool:
        """Whether this request's last block was verified by a choice made before it was drafted."""
        return self._plan is not None and request in self._plan.in_full

    def observe(self, rounds: Rounds) -> None:
        if self._plan is not None and not self._plan.by_confidence:
            rounds = replace(rounds, logits=None)  # all was verified: outcomes tell all
        self._unread.append(rounds)
        ended = any(request.finished for request in rounds.requests)  # the next ones should know
        if ended or self.history.rounds < LITTLE or len(self._unread) >= TOGETHER:
            self._learn()

    def _learn(self) -> None:
        steps, self._unread = self._unread, []
        rounds, confidence = Rounds.together(steps), None
        if self.calibration is not None and rounds.logits is not None:
            confidence = np.full((len(rounds.requests), self.history.draft_len), np.nan)
            size = rounds.logits.shape[1]
            confidence[:, :size] = self.calibration.confidence(regimes_of(rounds.requests), rounds.logits)
        self.history.observe(rounds, confidence, [len(step.requests) for step in steps])

    def observe_step(self, outcome: StepOutcome) -> None:
        if self._unread and not outcome.drafting:  # nobody may draft for long
            self._learn()
        self.watch.observe(outcome)
