"""How far requests draft and how far their drafts are verified: the choices a step leaves open.

A policy is asked twice in a step. `plan` gives draft slots, before anything is drafted. `admit` gives verify lengths,
when the block is there; the admission of a draft token must not depend on that token or on one after it (paper,
appendix A), so all it may look at is the confidence of slots up to there, and earlier rounds. `observe` tells it what
became of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark_core.arrays import Floats, Ints
from dspark_core.checkpoint.calibration import Calibration
from dspark_core.sampling import Regime
from dspark_core.schedule import admit_above
from server.request import Request


@dataclass(frozen=True)
class Rounds:
    """What became of the blocks of a step, one of each of R requests.

    Attributes:
        logits: [R, k] raw confidence logits, meaningless beyond `drafted`; None if nobody reads them.
        drafted, verified, accepted: [R] slots; `accepted` were delivered to the client.
        decided: [R] slots that were found accepted or rejected: none after a rejection, none after the end of the text.
    """

    requests: Sequence[Request]
    logits: Floats | None
    drafted: Ints
    verified: Ints
    decided: Ints
    accepted: Ints

    @classmethod
    def together(cls, steps: Sequence[Rounds]) -> Rounds:
        """Those of several steps, one after the other; logits that only some have are NaN for the others."""
        width = max((step.logits.shape[1] for step in steps if step.logits is not None), default=0)
        logits = np.full((sum(len(step.requests) for step in steps), width), np.nan)
        first = 0
        for step in steps:
            if step.logits is not None:
                logits[first : first + len(step.requests), : step.logits.shape[1]] = step.logits
            first += len(step.requests)
        return cls(
            [request for step in steps for request in step.requests],
            logits if width else None,
            *(np.concatenate([getattr(step, name) for step in steps]) for name in COUNTS),
        )


COUNTS = ("drafted", "verified", "decided", "accepted")


def regimes_of(requests: Sequence[Request]) -> list[Regime]:
    """[R] the rules by which their drafts stand."""
    return [request.params.sampling.regime for request in requests]


@dataclass(frozen=True)
class StepOutcome:
    """What a step did, and how long it took.

    Attributes:
        seconds: from its planning to its delivery.
        decoding, drafting: requests that chose a token, and those of them that drafted.
        batch_tokens, drafted: rows of the target's pass, and draft slots of all requests.
        prefill_tokens: rows of prompts.
        context: tokens of context, in the mean over the requests.
        caught_up: tokens whose context the draft had still to be given, since their requests did not draft before.
    """

    seconds: float
    decoding: int
    drafting: int
    batch_tokens: int
    drafted: int
    prefill_tokens: int
    context: float
    caught_up: int = 0

    @property
    def steady(self) -> bool:
        """Whether it is one like others, whose time tells: no prompt in it, and nothing that was left undone before."""
        return self.decoding > 0 and not self.prefill_tokens and not self.caught_up


class LengthPolicy:
    """Whole blocks, and the base of all others.

    Attributes:
        reads_confidence: whether `admit` or `observe` wants confidence logits.
        admits_by_confidence: whether `admit` wants those of the step that was planned last.
        calibration: by which it understands them, if it does.
    """

    reads_confidence = admits_by_confidence = False
    calibration: Calibration | None = None

    def may_draft(self, request: Request) -> bool:
        """Whether a new request may ever draft: then the draft's context is kept for it, which costs some percent."""
        return True

    def plan(self, requests: Sequence[Request], limits: Sequence[int], prefill_tokens: int) -> list[int]:
        """Draft slots of requests that decode in this step, at most `limits` (0: does not speculate).

        Args:
            prefill_tokens: of prompts in the same pass, as far as is known.
        """
        return list(limits)

    def admit(
        self, requests: Sequence[Request], slots: Sequence[int], logits: Floats | None, prefill_tokens: int
    ) -> list[int]:
        """Verify lengths of the requests that drafted, at most `slots`.

        Args:
            logits: [R, K] raw confidence logits, meaningless beyond a request's slots; None if there are none.
            prefill_tokens: of prompts in the same pass.
        """
        return list(slots)

    def observe(self, rounds: Rounds) -> None:
        """Learn from the blocks of a step."""

    def observe_step(self, outcome: StepOutcome) -> None:
        """Learn from a step."""


class FixedLength(LengthPolicy):
    """The same length for all, at most; 0 drafts nothing."""

    def __init__(self, length: int) -> None:
        self.length = length

    def may_draft(self, request: Request) -> bool:
        return self.length > 0

    def plan(self, requests: Sequence[Request], limits: Sequence[int], prefill_tokens: int) -> list[int]:
        return [min(limit, self.length) for limit in limits]


class Threshold(LengthPolicy):
    """Whole blocks are drafted; what is verified is as much as will survive with at least this probability."""

    reads_confidence = admits_by_confidence = True

    def __init__(self, threshold: float, calibration: Calibration) -> None:
        self.threshold = threshold
        self.calibration: Calibration = calibration

    def admit(
        self, requests: Sequence[Request], slots: Sequence[int], logits: Floats | None, prefill_tokens: int
    ) -> list[int]:
        assert logits is not None
        return admit_above(self.calibration.survival(regimes_of(requests), logits), slots, self.threshold)


def plan_step(
    policy: LengthPolicy, requests: Sequence[Request], limits: Sequence[int], prefill_tokens: int
) -> list[int]:
    """Draft slots by the policy, but whole blocks for requests whose clients asked for them."""
    whole = [limit if request.params.whole_blocks else 0 for request, limit in zip(requests, limits, strict=True)]
    free = [0 if fixed else limit for fixed, limit in zip(whole, limits, strict=True)]
    slots = policy.plan(requests, free, prefill_tokens + sum(whole))
    return [fixed or length for fixed, length in zip(whole, slots, strict=True)]


def admit_step(
    policy: LengthPolicy, requests: Sequence[Request], slots: Sequence[int], logits: Floats | None, prefill_tokens: int
) -> list[int]:
    """Verify lengths by the policy, but all of the whole blocks that `plan_step` gave."""
    lens = list(slots)
    free = [row for row, request in enumerate(requests) if not request.params.whole_blocks]
    if free:
        fixed = sum(slots) - sum(slots[row] for row in free)
        own = None if logits is None else logits[free]
        found = policy.admit([requests[r] for r in free], [slots[r] for r in free], own, prefill_tokens + fixed)
        for row, length in zip(free, found, strict=True):
            lens[row] = length
    return lens
