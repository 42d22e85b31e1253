"""The bar that the report holds a fit against, and what verifying by a threshold would give."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from calibration.records import Records
from calibration.report import THRESHOLDS, Verdict, fixed_lengths, judge, sweep
from calibration.sts import PositionReport, raw
from tests.calibration.samples import records_of, sampled


def position(ece: float, limit: float = 0.01, accepted: int = 200, rejected: int = 200) -> PositionReport:
    return PositionReport(1, accepted, rejected, ece, ece, (0.0, 1.0), limit / 2, limit, 0.5, 0.25)


@pytest.mark.parametrize(
    ("before", "after", "status", "excess", "words"),
    [
        (position(0.2), position(0.03), "meets", None, "allowed 3.0 %"),
        (position(0.04), position(0.02), "meets", None, "allowed 2.0 %"),
        (position(0.04), position(0.025), "misses", 0.005, "allowed 2.0 %"),  # at most 3 %, but not half
        (position(0.2), position(0.05), "misses", 0.02, "allowed 3.0 %"),  # less than half, but above 3 %
        (position(0.2), position(0.04, limit=0.05), "misses", 0.01, "perfect predictor shows up to 5.0 %"),
        (position(0.2), position(0.06, limit=0.05), "misses", 0.03, "allowed 3.0 %"),
        (position(0.02, limit=0.02), position(0.03), "inside noise", None, "up to 2.0 %"),
        (position(0.04, limit=0.05), position(0.05, limit=0.05), "inside noise", None, "up to 5.0 %"),
        (position(0.04, limit=0.05), position(0.02, limit=0.05), "meets", None, ""),
        (position(0.04, limit=0.05), position(0.06, limit=0.05), "misses", 0.03, "allowed 3.0 %"),  # harm was done
        (position(0.2, accepted=199), position(0.01, accepted=199), "too few", None, "fewer than 200 accepted"),
        (position(0.2, rejected=199), position(0.01, rejected=199), "too few", None, "fewer than 200 rejected"),
        (position(0.1, accepted=9, rejected=991), position(0.0, accepted=9, rejected=991), "too few", None, "about 0"),
        (position(0.1, accepted=991, rejected=9), position(0.0, accepted=991, rejected=9), "too few", None, "about 1"),
        (position(0.1, accepted=0, rejected=0), position(0.1, accepted=0, rejected=0), "too few", None, "accepted"),
    ],
)
def test_the_bar(before: PositionReport, after: PositionReport, status: str, excess: float | None, words: str) -> None:
    verdict = judge(before, after)
    assert verdict == Verdict(status, pytest.approx(excess) if excess else None, verdict.reason)
    assert words in verdict.reason


def partly_known() -> Records:
    """Some slots not drafted, some texts ended early."""
    records, source = sampled(150, [2.0, 0.5, 1.5], seed=3), np.random.default_rng(4)
    ended = source.integers(0, records.accepted + 1)
    cut = source.random(150) < 0.3
    records.logits[source.random(150) < 0.2, 2] = np.nan
    accepted = np.minimum(np.where(cut, ended, records.accepted), (~np.isnan(records.logits)).sum(1))
    decided = np.where(cut, accepted, np.minimum(accepted + 1, (~np.isnan(records.logits)).sum(1)))
    return replace(records, accepted=accepted, decided=decided)


def test_the_sweep_is_that_of_a_slow_loop() -> None:
    records = partly_known()
    records.logits[::5, 0] = 0  # at the threshold of 0.5
    survival = raw(3).survival(records.logits)
    found = sweep(records, survival)
    for number, threshold in enumerate(THRESHOLDS):
        verified = accepted = 0
        for row, promise in enumerate(survival):
            for slot in range(3):
                if np.isnan(records.logits[row, slot]) or promise[slot] < threshold:
                    break
                if slot >= records.decided[row] and records.accepted[row] == records.decided[row]:
                    break  # after the end of the text
                verified += 1
                accepted += slot < records.accepted[row]
        assert found["verified"][number] == pytest.approx(verified / len(records))
        assert found["accepted"][number] == pytest.approx(accepted / len(records))
        assert found["efficiency"][number] == (pytest.approx(accepted / verified) if verified else None)
    assert found["efficiency"][-1] is None  # nothing is certain


def test_fixed_lengths() -> None:
    accepted = np.array([0, 1, 2, 2])
    found = fixed_lengths(records_of(np.zeros((4, 2)), accepted))
    assert found == {"verified": [0, 1, 2], "accepted": [0, 0.75, 1.25], "efficiency": [None, 0.75, 0.625]}
