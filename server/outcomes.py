"""What a step came to, for those who learn from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark_core.arrays import Floats
from server.layout import Layout
from server.policy import Rounds, StepOutcome
from server.scheduler import Work


def rounds_of(drafting: Sequence[Work], verify_lens: Sequence[int], confidence: Floats | None) -> Rounds | None:
    """The blocks of a step, once they are delivered; without those whose request failed, None if there is none left.

    Args:
        confidence: [R, k] logits of the requests that drafted, if somebody reads them.
    """
    told = [row for row, item in enumerate(drafting) if not item.request.error]
    if not told:
        return None
    outcomes = np.array([drafting[row].request.decided_and_accepted[-1] for row in told])
    return Rounds(
        requests=[drafting[row].request for row in told],
        logits=None if confidence is None else confidence[told],
        drafted=np.array([drafting[row].num_slots for row in told]),
        verified=np.array([verify_lens[row] for row in told]),
        decided=outcomes[:, 0],
        accepted=outcomes[:, 1],
    )


def step_outcome(work: Sequence[Work], layout: Layout, prefill_tokens: int, seconds: float) -> StepOutcome:
    """What was run, and how long it took."""
    return StepOutcome(
        seconds=seconds,
        decoding=sum(item.decides for item in work),
        drafting=sum(item.num_slots > 0 for item in work),
        batch_tokens=len(layout.slots),
        drafted=sum(item.num_slots for item in work),
        prefill_tokens=prefill_tokens,
        context=sum(segment.limit for segment in layout.batch.segments) / len(work),
    )
