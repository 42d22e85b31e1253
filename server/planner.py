"""What earlier rounds call for: who drafts in the next step and how far, before anything is drafted (paper §5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dspark_core.arrays import Floats
from dspark_core.schedule import DraftPlan, choose_draft_lens
from dspark_core.step_cost import CostCurves
from server.cost_watch import CostWatch
from server.history import History
from server.request import Request

HOPE = 1.0  # standard deviations of what is known of the draft, by which it may be better than that
# Slots are drafted beyond what earlier rounds say will pay, for today's confidence to choose from, as long as they take
# no more than this share of the step: where drafting is cheap (docs/LOG.md).
SPARE_SHARE = 0.02
CHOICE_SECONDS = 1e-3  # about what it takes to read confidence, choose by it and learn from it


@dataclass
class Plan:
    """Who drafts, and what is needed to choose how much of it is verified.

    Attributes:
        curves: costs at this length of context.
        requests: in the target's pass.
        able: requests that may draft, and their places in what follows.
        expected: [len(able), K] survival, from earlier rounds.
        draft: slots of those requests, and what such a step brings and takes.
        rate: tokens a second that such steps bring when they hold no prompt.
        spare: slots that each of them drafts besides.
        by_confidence: whether today's confidence decides what is verified: where there is something to choose from, or
            where choosing takes no time to speak of. Else all that is drafted is verified.
        hopes: what the slots would be if the draft were a little better than is known, where nobody drafts.
        in_full: requests whose blocks are verified whatever their confidence, by a choice made before drafting.
    """

    curves: CostCurves
    requests: int
    able: dict[Request, int]
    expected: Floats
    draft: DraftPlan
    rate: float
    spare: int
    by_confidence: bool
    hopes: list[int]
    in_full: set[Request] = field(default_factory=set)


def make_plan(
    history: History,
    watch: CostWatch,
    curves: CostCurves,
    requests: Sequence[Request],
    limits: Sequence[int],
    *,
    prefill_tokens: int,
    reads_confidence: bool,
) -> Plan:
    """Search the whole curve of costs for the lengths that bring the most tokens a second; none is among them.

    Args:
        requests: in the next pass.
        limits: most slots of each.
        prefill_tokens: of prompts in the same pass.
        reads_confidence: whether there will be confidence to choose by.
    """
    able = [request for request, limit in zip(requests, limits, strict=True) if limit]
    own_limits = [limit for limit in limits if limit]

    def best(survival: Floats, prefill_tokens: int) -> DraftPlan:
        rows = len(limits) + prefill_tokens + np.arange(1, sum(limits) + 1)
        return choose_draft_lens(
            survival,
            own_limits,
            curves,
            others=len(limits) - len(able),
            prefill_tokens=prefill_tokens,
            draft_factor=watch.factors(rows),
        )

    expected = history.survival(able)
    draft = best(expected, prefill_tokens)
    hopes = draft.lens if any(draft.lens) else best(history.survival(able, hope=HOPE), prefill_tokens).lens
    rate = (best(expected, 0) if prefill_tokens else draft).rate
    spare, by_confidence = _to_choose(draft, curves) if reads_confidence else (0, False)
    places = {request: place for place, request in enumerate(able)}
    return Plan(curves, len(requests), places, expected, draft, rate, spare, by_confidence, hopes)


def _to_choose(draft: DraftPlan, curves: CostCurves) -> tuple[int, bool]:
    """How many slots to draft beyond the plan, and whether confidence is to choose between slots at all."""
    drafting = sum(length > 0 for length in draft.lens)
    if not drafting:
        return 0, False
    little = SPARE_SHARE * draft.seconds
    spare = int(little / curves.slot_seconds(drafting))
    return spare, spare > 0 or little > CHOICE_SECONDS
