"""What a step came to, for those who learn from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from dspark_core.arrays import Floats
from dspark_core.checkpoint.calibration import Calibration
from server.layout import Layout
from server.policy import Rounds, StepOutcome
from server.scheduler import Work


@dataclass(frozen=True)
class Drafted:
    """The blocks of a step.

    Attributes:
        ids: [R, K] proposals, on the device.
        verify_lens: [R] how many of each block are sent to the target.
        confidence_logits: [R, k], if somebody reads them, on the device or not.
    """

    ids: Tensor
    verify_lens: Sequence[int]
    confidence_logits: Tensor | None

    @cached_property
    def confidence(self) -> Floats | None:
        """[R, k] logits on the host; waits for the device unless they are there."""
        return None if self.confidence_logits is None else self.confidence_logits.cpu().double().numpy()

    def verified(self, index: int) -> int:
        """Of a step's work item: those that draft come first."""
        return self.verify_lens[index] if index < len(self.verify_lens) else 0

    def block(
        self, index: int, item: Work, calibration: Calibration | None
    ) -> tuple[list[int], list[float | None] | None]:
        """Proposals of a work item and the confidence in each, as calibrated, where there is a head that has any."""
        if not item.num_slots:
            return [], None
        ids: list[int] = self.ids[index, : item.num_slots].tolist()
        if self.confidence is None:
            return ids, None
        logits = self.confidence[index : index + 1, : item.num_slots]
        scale = calibration or Calibration.raw(item.num_slots)
        found: list[float] = scale.confidence([item.request.params.sampling.regime], logits)[0].tolist()
        return ids, [None if math.isnan(value) else value for value in found]  # a head may compute anything


def rounds_of(drafting: Sequence[Work], drafted: Drafted) -> Rounds | None:
    """The blocks of a step, once they are delivered; without those whose request failed, None if there is none left."""
    told = [row for row, item in enumerate(drafting) if not item.request.error]
    if not told:
        return None
    outcomes = np.array([drafting[row].request.decided_and_accepted[-1] for row in told])
    return Rounds(
        requests=[drafting[row].request for row in told],
        logits=None if drafted.confidence is None else drafted.confidence[told],
        drafted=np.array([drafting[row].num_slots for row in told]),
        verified=np.array([drafted.verify_lens[row] for row in told]),
        decided=outcomes[:, 0],
        accepted=outcomes[:, 1],
    )


def step_outcome(
    work: Sequence[Work], layout: Layout, caught_up: int, prefill_tokens: int, seconds: float
) -> StepOutcome:
    """What was run, and how long it took."""
    return StepOutcome(
        seconds=seconds,
        decoding=sum(item.decides for item in work),
        drafting=sum(item.num_slots > 0 for item in work),
        batch_tokens=len(layout.slots),
        drafted=sum(item.num_slots for item in work),
        prefill_tokens=prefill_tokens,
        context=sum(segment.limit for segment in layout.batch.segments) / len(work),
        caught_up=caught_up,
    )
