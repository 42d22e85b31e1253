"""How well predicted probabilities agree with what happened: ECE with its uncertainty, AUROC, Brier score.

All take `predicted`: [n] probabilities, and `outcome`: [n] of 0 or 1, and raise ValueError for anything else. Where a
figure has no value (no samples, or one class only for the AUROC) they return None, which is null in JSON; NaN is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_core.arrays import Floats, Ints


@dataclass(frozen=True)
class Bin:
    """Mean prediction, mean outcome and number of the samples of one bin."""

    predicted: float
    observed: float
    count: int


def ece(predicted: ArrayLike, outcome: ArrayLike, *, bins: int = 15, mass: bool = False) -> float | None:
    """Expected calibration error: Σ_b n_b/n · |mean predicted − mean observed| (Guo et al. 2017, eq. 5).

    Args:
        bins: number of bins. An empty one adds nothing.
        mass: bins that hold equally many samples, instead of bins of equal width.
    """
    predicted, outcome = _checked(predicted, outcome)
    if not len(predicted):
        return None
    index = bin_index(predicted, bins, mass=mass)
    return float(np.abs(np.bincount(index, predicted - outcome)).sum() / len(predicted))


def reliability(predicted: ArrayLike, outcome: ArrayLike, *, bins: int = 15, mass: bool = False) -> list[Bin]:
    """The bins that hold samples, in ascending order of prediction: the points of a reliability diagram."""
    predicted, outcome = _checked(predicted, outcome)
    index = bin_index(predicted, bins, mass=mass)
    count = np.bincount(index, minlength=bins)
    sums = zip(np.bincount(index, predicted, bins), np.bincount(index, outcome, bins), count, strict=True)
    return [Bin(float(p / n), float(o / n), int(n)) for p, o, n in sums if n]


def auroc(predicted: ArrayLike, outcome: ArrayLike) -> float | None:
    """Probability that a sample of class 1 is predicted higher than one of class 0; a tie counts half."""
    predicted, outcome = _checked(predicted, outcome)
    positives = float(outcome.sum())
    negatives = len(outcome) - positives
    if not positives or not negatives:
        return None
    below = _mid_ranks(predicted)[outcome == 1].sum() - positives**2 / 2  # the positives' pairs among themselves: half
    return float(below / (positives * negatives))


def brier(predicted: ArrayLike, outcome: ArrayLike) -> float | None:
    """Mean squared difference of prediction and outcome."""
    predicted, outcome = _checked(predicted, outcome)
    return float(np.square(predicted - outcome).mean()) if len(predicted) else None


def ece_interval(
    predicted: ArrayLike,
    outcome: ArrayLike,
    source: np.random.Generator,
    *,
    groups: ArrayLike | None = None,
    bins: int = 15,
    mass: bool = False,
    level: float = 0.9,
    resamples: int = 200,
) -> tuple[float, float] | None:
    """Bootstrap interval of the ECE: its low and high end.

    Whole groups are drawn with replacement, for rounds of one prompt are not independent. Bins are those of the sample.

    Args:
        source: of the draws.
        groups: [n] number of the group (the prompt) of each sample; each sample its own if None.
        level: share of such intervals that should hold the ECE of unlimited data.
    """
    predicted, outcome = _checked(predicted, outcome)
    if not len(predicted):
        return None
    member = np.arange(len(predicted)) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    if member.shape != predicted.shape:
        raise ValueError(f"groups have shape {member.shape}, predictions {predicted.shape}")
    size = np.bincount(member).astype(np.float64)
    cells = member * bins + bin_index(predicted, bins, mass=mass)
    excess = np.bincount(cells, predicted - outcome, len(size) * bins).reshape(len(size), bins)
    drawn = np.empty(resamples)
    for i in range(resamples):
        times = np.bincount(source.integers(len(size), size=len(size)), minlength=len(size)).astype(np.float64)
        drawn[i] = np.abs(times @ excess).sum() / (times @ size)
    # A resample's noise comes on top of the sample's, so its ECE lies above the sample's by as much as that lies above
    # the true one: the ends are mirrored at the sample's ECE (the basic bootstrap), not taken as they are. Near 0 even
    # that leaves 0 out too often, so the low end is 0 wherever perfect calibration could have shown as much.
    found = float(np.abs(excess.sum(0)).sum() / len(predicted))
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    noise = ece_noise(predicted, source, bins=bins, mass=mass, resamples=resamples)
    inside = noise is not None and found <= noise[1]
    return 0.0 if inside else max(2 * found - float(high), 0.0), max(2 * found - float(low), 0.0)


def ece_noise(
    predicted: ArrayLike,
    source: np.random.Generator,
    *,
    bins: int = 15,
    mass: bool = False,
    level: float = 0.95,
    resamples: int = 200,
) -> tuple[float, float] | None:
    """ECE that these predictions would show if they were perfectly calibrated: its mean, and the limit of noise.

    Outcomes are redrawn from the predictions, each on its own; where those of one prompt hang together the noise is
    somewhat larger than this.

    Args:
        source: of the draws.
        level: share of the redrawn ECEs up to the limit. A measured ECE above it is no accident of the sample.
    """
    predicted, _ = _checked(predicted, np.zeros(np.shape(predicted)))
    if not len(predicted):
        return None
    index = bin_index(predicted, bins, mass=mass)
    drawn = np.empty(resamples)
    for i in range(resamples):
        excess = predicted - (source.random(len(predicted)) < predicted)
        drawn[i] = np.abs(np.bincount(index, excess)).sum() / len(predicted)
    return float(drawn.mean()), float(np.quantile(drawn, level))


def bin_index(predicted: Floats, bins: int, *, mass: bool) -> Ints:
    """[n] bin of each prediction, 0..bins − 1. A bin holds its lower edge; the last one holds 1 too.

    Bins of equal mass never part equal predictions: all of them go where the middle one belongs.
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, not {bins}")
    place = _mid_ranks(predicted) / max(len(predicted), 1) if mass else predicted
    return np.minimum((place * bins).astype(np.int64), bins - 1)


def _mid_ranks(values: Floats) -> Floats:
    """[n] how many values are lower, plus half of those that are equal (itself among them)."""
    order = np.argsort(values)
    ranked = values[order]
    first = np.ones(len(values), bool)
    first[1:] = ranked[1:] != ranked[:-1]
    start = np.flatnonzero(first)
    end = np.append(start[1:], len(values))
    ranks = np.empty(len(values))
    ranks[order] = np.repeat((start + end) / 2, end - start)
    return ranks


def _checked(predicted: ArrayLike, outcome: ArrayLike) -> tuple[Floats, Floats]:
    arrays: list[NDArray[Any]] = [np.asarray(values, dtype=np.float64) for values in (predicted, outcome)]
    p, o = cast(list[Floats], arrays)
    if p.ndim != 1 or p.shape != o.shape:
        raise ValueError(f"predictions and outcomes must be two rows of one length, not {p.shape} and {o.shape}")
    if not np.all((p >= 0) & (p <= 1)):  # false for NaN too
        raise ValueError("a prediction is not a probability in [0, 1]")
    if not np.all((o == 0) | (o == 1)):
        raise ValueError("an outcome is neither 0 nor 1")
    return p, o
