"""Records divided into those to fit on and those to judge by, what is fitted to the former, and which fit is used."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from calibration.records import Records, split_by_prompt
from calibration.reliability import ece
from calibration.sts import Calibrator, Fit, fit_platt, fit_regimes
from dspark_core.errors import CheckpointError
from dspark_core.sampling import REGIMES, Regime

logger = logging.getLogger(__name__)

Method = Literal["sts", "platt"]
BETTER = 0.8  # biases are used where they leave at most this share of the error that temperatures alone leave


@dataclass(frozen=True)
class Split:
    """What was fitted, and to what.

    Attributes:
        fitted_on, judged: records of different prompts.
        fits: sequential temperatures, by regime.
        platt: scales and biases, by regime.
        method: which of both the server is to use.
    """

    fitted_on: Records
    judged: Records
    fits: Mapping[Regime, Fit]
    platt: Mapping[Regime, Calibrator]
    method: Method

    @property
    def chosen(self) -> dict[Regime, Calibrator]:
        """What the server is to use."""
        return self.of(self.method)

    def of(self, method: Method) -> dict[Regime, Calibrator]:
        """Calibrators by regime."""
        return dict(self.platt) if method == "platt" else {regime: fit.calibrator for regime, fit in self.fits.items()}


def fit_split(
    records: Records, held_out: float, method: Literal["auto", "sts", "platt"], *, bins: int = 15, seed: int = 0
) -> Split:
    """Divide by prompt, fit both ways, and choose: temperatures alone (the paper's way) unless biases do far better.

    Args:
        held_out: share of the prompts to judge by.
        method: auto chooses by what is held out.

    Raises:
        CheckpointError: too few prompts for that.
    """
    fitted_on, judged = split_by_prompt(records, held_out, seed)
    if not len(fitted_on) or not len(judged):
        raise CheckpointError(
            f"records of {len(np.unique(records.prompt))} prompts, expected two or more of a domain: "
            "some are fitted on and others judged by"
        )
    fits = fit_regimes(fitted_on, bins=bins)
    platt = {regime: fit_platt(of_regime(fitted_on, regime)) for regime in fits}
    both = Split(fitted_on, judged, fits, platt, "sts" if method == "auto" else method)
    if method != "auto":
        return both
    sts_error, platt_error = (mean_error(judged, both.of(name), bins) for name in ("sts", "platt"))
    chosen: Method = "platt" if platt_error < BETTER * sts_error else "sts"
    logger.info(
        "held-out calibration error, in the mean of regimes and positions: STS %.1f %%, Platt %.1f %%; used: %s",
        100 * sts_error,
        100 * platt_error,
        chosen,
    )
    return Split(fitted_on, judged, fits, platt, chosen)


def mean_error(judged: Records, calibrators: Mapping[Regime, Calibrator], bins: int) -> float:
    """ECE of survival, in the mean over regimes and positions."""
    errors = []
    for regime, calibrator in calibrators.items():
        part = of_regime(judged, regime)
        survival, known, survived = calibrator.survival(part.logits), part.known, part.survived
        found = [ece(survival[rows, k], survived[rows, k], bins=bins) for k, rows in enumerate(known.T)]
        errors += [error for error in found if error is not None]
    return float(np.mean(errors)) if errors else math.inf


def of_regime(records: Records, regime: Regime) -> Records:
    """The rounds of one regime."""
    return records.of(records.regime == REGIMES.index(regime))
