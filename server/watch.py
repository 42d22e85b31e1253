"""What speculation does in service: counts, and whether confidence and step costs still say what happens."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from dspark_core.arrays import Floats
from dspark_core.checkpoint.calibration import Calibration
from server.auto_policy import AutoPolicy
from server.engine import Engine
from server.policy import Rounds, StepOutcome, Threshold, regimes_of

logger = logging.getLogger(__name__)


BINS = 15
MEMORY = 2000.0  # rounds, or steps, after which one counts for 1/e of a new one
STEP_KEEP = math.exp(-1 / MEMORY)
ENOUGH = 500  # of them before anything is said
WRONG_TOKENS, WRONG_SECONDS, WRONG_ERROR = 1.25, 1.5, 0.08
SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_WARNINGS = 10.0, 600.0


@dataclass
class Counts:
    """Totals since the start, of rounds with drafts but for `plain_rounds`; tokens."""

    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    predicted: float = 0.0
    plain_rounds: int = 0
    seconds: float = 0.0
    predicted_seconds: float = 0.0


class Watch:
    """Counts what an engine does, and warns when predictions have drifted from what happens.

    Attributes:
        counts: for /metrics.
        errors: [K] running calibration error (ECE) of survival, of the slots that were verified; NaN before any.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.counts = engine, Counts(accepted_at=[0] * engine.draft_len)
        self._lock = threading.Lock()  # other threads read
        self._sums = np.zeros((3, engine.draft_len, BINS))  # rounds, predicted, survived
        self._compared = self.calibration
        self._tokens = np.zeros(2)  # predicted, accepted: running
        self._usual = 1.0  # actual / predicted seconds that have been told of
        self._predicted_seconds = self._seconds = self._steps = 0.0  # of steps: running
        self._next_look = time.monotonic() + SECONDS_BETWEEN_LOOKS
        engine.observers.append(self.observe)
        engine.step_observers.append(self.observe_step)

    @property
    def errors(self) -> Floats:
        count, predicted, survived = self._sums
        with np.errstate(invalid="ignore"):
            return cast(Floats, np.abs(predicted - survived).sum(-1) / count.sum(-1))

    @property
    def calibration(self) -> Calibration | None:
        policy = self.engine.policy
        return policy.calibration if isinstance(policy, (AutoPolicy, Threshold)) else None

    def read(self) -> tuple[Counts, Floats]:
        """Counts and errors of one moment, for another thread than the engine's."""
        with self._lock:
            return replace(self.counts, accepted_at=list(self.counts.accepted_at)), self.errors

    def observe(self, rounds: Rounds) -> None:
        """Count the blocks of a step."""
        with self._lock:
            self._count(rounds)
        self._warn()

    def _count(self, rounds: Rounds) -> None:
        counts, size = self.counts, len(rounds.requests)
        counts.rounds += size
        counts.drafted += int(rounds.drafted.sum())
        counts.verified += int(rounds.verified.sum())
        counts.accepted += int(rounds.accepted.sum())
        for position in range(self.engine.draft_len):
            counts.accepted_at[position] += int((rounds.accepted > position).sum())
        if self.calibration is not self._compared:  # it was refitted: what the one before did counts no more
            self._compared = self.calibration
            self._sums[:], self._tokens[:] = 0, 0
        if self.calibration is not None and rounds.logits is not None:
            self._compare(rounds, self.calibration.survival(regimes_of(rounds.requests), rounds.logits))

    def _compare(self, rounds: Rounds, survival: Floats) -> None:
        slots = np.arange(survival.shape[1])
        rejected = (rounds.decided > rounds.accepted)[:, None]
        known = (
            (slots < rounds.verified[:, None]) & ((slots < rounds.decided[:, None]) | rejected) & ~np.isnan(survival)
        )
        rows, places = np.nonzero(known)
        values, survived = survival[known], places < rounds.accepted[rows]
        keep = math.exp(-len(rounds.requests) / MEMORY)
        self._sums *= keep
        bins = np.minimum((values * BINS).astype(int), BINS - 1)
        for part, what in zip(self._sums, (np.ones(len(values)), values, survived), strict=True):
            np.add.at(part, (places, bins), what)
        self._tokens = self._tokens * keep + (values.sum(), survived.sum())
        self.counts.predicted += float(values.sum())

    def observe_step(self, outcome: StepOutcome) -> None:
        """Compare a step's time with what was predicted, if it is one like others."""
        with self._lock:
            self.counts.plain_rounds += outcome.decoding - outcome.drafting
            policy = self.engine.policy
            if isinstance(policy, AutoPolicy) and outcome.steady:
                self._time(outcome.seconds, policy.watch.predicted)
        self._warn()

    def _time(self, seconds: float, predicted: float) -> None:
        self.counts.predicted_seconds += predicted
        self.counts.seconds += seconds
        self._predicted_seconds = self._predicted_seconds * STEP_KEEP + predicted
        self._seconds, self._steps = self._seconds * STEP_KEEP + seconds, self._steps * STEP_KEEP + 1

    def complaints(self) -> list[str]:
        """What has drifted, in words, with what to do about it."""
        found = []
        predicted, accepted = self._tokens
        if self._sums[0, :1].sum() >= ENOUGH and predicted > 0:
            if not 1 / WRONG_TOKENS <= (ratio := accepted / predicted) <= WRONG_TOKENS:
                found.append(f"{ratio:.2f} of the drafts that confidence promised were accepted; run dspark-calibrate")
            else:
                count = self._sums[0].sum(-1)
                worst = int(np.nanargmax(np.where(count >= ENOUGH, self.errors, -1)))
                if self.errors[worst] > WRONG_ERROR and count[worst] >= ENOUGH:
                    error = f"calibration error {self.errors[worst]:.1%} at position {worst + 1}"
                    found.append(f"{error}; run dspark-calibrate")
        if self._steps >= ENOUGH:
            slower = self._seconds / self._predicted_seconds
            if not 1 / WRONG_SECONDS <= slower / self._usual <= WRONG_SECONDS:
                self._usual = slower  # said once: what the models' passes do not explain stays
                found.append(f"steps take {slower:.2f} of the time that was measured; run dspark-calibrate profile")
        return found

    def _warn(self) -> None:
        if time.monotonic() < self._next_look:
            return
        found = self.complaints()
        if found:
            logger.warning("drift: %s", "; ".join(found))
        self._next_look = time.monotonic() + (SECONDS_BETWEEN_WARNINGS if found else SECONDS_BETWEEN_LOOKS)
