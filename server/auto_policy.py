"""The scheduler: requests draft, and are verified, as far as pays by the measured cost of steps, or not at all."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dspark_core.arrays import Floats
from dspark_core.checkpoint.calibration import Calibration
from dspark_core.schedule import DraftPlan, choose_draft_lens, choose_verify_lens
from dspark_core.step_cost import CostCurves, StepCost
from server.cost_watch import CostWatch
from server.history import History
from server.policy import LengthPolicy, Rounds, StepOutcome, regimes_of
from server.request import Request
from server.trials import EXPLORE_SLOTS, Trials

logger = logging.getLogger(__name__)

CONTEXT_STEP = 64  # tokens; costs are looked up anew after so many more
# Slots are drafted beyond what earlier rounds say will pay, for today's confidence to choose from, as long as they take
# no more than this share of the step: where drafting is cheap (docs/LOG.md).
SPARE_SHARE = 0.02
CHOICE_SECONDS = 1e-3  # about what it takes to read confidence, choose by it and learn from it
HOPE = 1.0  # standard deviations of what is known of the draft, by which it may be better than that
# Where it would not pay even so much better, at none of some loads, one request in so many is still able to draft: by
# the first tokens of its prompt, drawn anew after a while.
LAST_HOPE, LOADS = 2.0, (1, 4, 16)
WATCHED, BEGINNING, REDRAWN = 8, 64, 512
# Rounds are learnt from at once while little is known, and then those of so many steps together: it takes as long for
# many as for one.
LITTLE, TOGETHER = 16, 4


@dataclass
class _Step:
    """What `plan` knew and answered; the next step takes it over if nothing has changed.

    Attributes:
        question: all that the answer depends on.
        curves: costs at this length of context.
        requests: in the target's pass.
        able: requests that may draft, and their places in what follows.
        expected: [len(able), K] survival, from earlier rounds.
        usual: [len(able), K] the same of a slot, given that those before it stand.
        correction: [len(able)] what the confidence is to be multiplied by.
        plan: draft slots of those requests.
        rate: tokens a second that such steps bring when they hold no prompt.
        spare: slots that each of them drafts besides.
        by_confidence: whether today's confidence decides what is verified: where there is something to choose from, or
            where choosing takes no time to speak of. Else all that is drafted is verified.
        hopes: what the slots would be if the draft were a little better than is known, where nobody drafts.
        in_full: requests whose blocks are verified whatever their confidence, by a choice made before drafting.
    """

    question: object
    curves: CostCurves
    requests: int
    able: dict[Request, int]
    expected: Floats
    usual: Floats
    correction: Floats
    plan: DraftPlan
    rate: float
    spare: int
    by_confidence: bool
    hopes: list[int]
    in_full: set[Request] = field(default_factory=set)


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
        self._step: _Step | None = None
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
        able = [i for i, limit in enumerate(limits) if limit]
        step = self._step = self._search(requests, able, limits, prefill_tokens)
        for i, length in zip(able, step.plan.lens, strict=True):
            lens[i] = min(length + step.spare, limits[i]) if length else 0
        if any(lens):
            self.trials.drafts([requests[i] for i in able if lens[i]])
            if self.trials.plain_step(self.watch.plain_steps):
                return [0] * len(limits)
        self._add_in_full(step, requests, lens, limits)
        if not any(lens):
            self.trials.rest(requests)
        return lens

    def _add_in_full(self, step: _Step, requests: Sequence[Request], lens: list[int], limits: Sequence[int]) -> None:
        """Blocks that are drafted and verified by a choice that has nothing to do with what they will be."""
        idle = {requests[i]: i for i, limit in enumerate(limits) if limit and not lens[i]}
        hopes = {request: step.hopes[step.able[request]] for request in idle}
        step.in_full = self.trials.explore(hopes)
        for request in step.in_full:
            lens[idle[request]] = min(hopes[request] or EXPLORE_SLOTS, limits[idle[request]])
        for i, length in enumerate(lens) if self.full_share else ():
            if length and self._coins.random() < self.full_share:
                lens[i] = limits[i]
                step.in_full.add(requests[i])

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

        def best(survival: Floats, prefill_tokens: int) -> DraftPlan:
            rows = len(limits) + prefill_tokens + np.arange(1, sum(limits) + 1)
            return choose_draft_lens(
                survival,
                [limits[i] for i in able],
                curves,
                others=len(limits) - len(able),
                prefill_tokens=prefill_tokens,
                draft_factor=self.watch.factors(rows),
            )

        expected = self.history.survival(may_draft)
        before = np.concatenate((np.ones((len(expected), 1)), expected[:, :-1]), -1)
        usual = np.divide(expected, before, out=np.zeros_like(expected), where=before > 0)
        plan = best(expected, prefill_tokens)
        hopes = plan.lens if any(plan.lens) else best(self.history.survival(may_draft, hope=HOPE), prefill_tokens).lens
        places = {request: place for place, request in enumerate(may_draft)}
        correction = self.history.correction(may_draft)
        rate = (best(expected, 0) if prefill_tokens else plan).rate
        spare, chooses = self._to_choose(plan, curves)
        return _Step(
            question, curves, len(requests), places, expected, usual, correction, plan, rate, spare, chooses, hopes
        )

    def _to_choose(self, plan: DraftPlan, curves: CostCurves) -> tuple[int, bool]:
        """How many slots to draft beyond the plan, and whether confidence is to choose between slots at all."""
        drafting = sum(length > 0 for length in plan.lens)
        if not self.reads_confidence or not drafting:
            return 0, False
        little = SPARE_SHARE * plan.seconds
        spare = int(little / curves.slot_seconds(drafting))
        return spare, spare > 0 or little > CHOICE_SECONDS

    def admit(
        self, requests: Sequence[Request], slots: Sequence[int], logits: Floats | None, prefill_tokens: int
    ) -> list[int]:
        step = self._step
        assert step is not None, "admit comes after plan"
        if not step.by_confidence or logits is None:
            return list(slots)
        rows = np.array([step.able[request] for request in requests])
        expected, drafted = step.expected[rows], np.arange(step.expected.shape[1]) < np.array(slots)[:, None]
        survival = self._survival(requests, logits, step.usual[rows], step.correction[rows])
        whole = np.array([request in step.in_full for request in requests])
        free, limits = np.flatnonzero(~whole), [0 if full else k for full, k in zip(whole, slots, strict=True)]
        # What is verified in full is no choice any more: its rows and tokens are in every step there is to choose from.
        fixed, count = sum(slots) - sum(limits), sum(limits)
        first = step.requests + prefill_tokens + fixed
        seconds = step.curves.verify_seconds(first + np.arange(count + 1.0))
        seconds += step.curves.draft_seconds(np.array([float(len(slots))]), np.array([float(sum(slots))]))
        seconds *= self.watch.factors(first + np.arange(count + 1))
        corners = {*(tokens - first for tokens in step.curves.tokens), count}
        lens = choose_verify_lens(
            survival[free],
            [limits[row] for row in free],
            seconds,
            others=step.requests - len(free) + float(expected[whole][drafted[whole]].sum()),
            rate=step.rate,
            expected=np.sort(expected[free][drafted[free]])[::-1],
            corners=sorted(corner for corner in corners if 0 < corner <= count),
        )
        chosen = list(slots)
        for row, length in zip(free, lens, strict=True):
            chosen[row] = length
        return chosen

    def _survival(self, requests: Sequence[Request], logits: Floats, usual: Floats, correction: Floats) -> Floats:
        """[R, k] by today's confidence, corrected by earlier outcomes.

        A slot whose confidence is no number gets what earlier rounds say of it. Slots before it do not notice: it may
        be what it is because of their tokens.
        """
        assert self.calibration is not None
        confidence = self.calibration.confidence(regimes_of(requests), logits)
        confidence *= correction[:, None]
        usual = usual[:, : logits.shape[1]]
        return np.minimum(np.where(np.isnan(confidence), usual, confidence), 1.0).cumprod(-1)

    def in_full(self, request: Request) -> bool:
        """Whether this request's last block was verified by a choice made before it was drafted."""
        return self._step is not None and request in self._step.in_full

    def observe(self, rounds: Rounds) -> None:
        if self._step is not None and not self._step.by_confidence:
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
