"""Synthetic records: blocks of a head whose confidence is distorted by known temperatures."""

from __future__ import annotations

import itertools
import math

import numpy as np

from calibration.records import Records
from dspark_core.sampling import REGIMES


def logit(p: np.ndarray | float) -> np.ndarray:
    return np.log(np.asarray(p) / (1 - np.asarray(p)))


def records_of(logits: np.ndarray, accepted: np.ndarray, decided: np.ndarray | None = None) -> Records:
    """Of the ratio rule; ten rounds to a prompt."""
    count, draft_len = logits.shape
    return Records(
        logits=logits,
        decided=np.minimum(accepted + 1, draft_len) if decided is None else decided,
        accepted=accepted,
        temperature=np.ones(count),
        regime=np.full(count, REGIMES.index("ratio")),
        domain=np.zeros(count, np.int64),
        prompt=np.arange(count) // 10,
        domains=("chat",),
    )


def sampled(count: int, temperatures: list[float], seed: int = 0, spread: float = 1.5) -> Records:
    """Blocks of a head that knows the odds of each slot, and tells them multiplied by the temperature."""
    source, shape = np.random.default_rng(seed), (count, len(temperatures))
    true = source.normal(1.0, spread, shape)
    stands = source.random(shape) < 1 / (1 + np.exp(-true))
    return records_of(true * np.array(temperatures), np.cumprod(stands, axis=1).sum(axis=1))


def exact(temperatures: list[float]) -> Records:
    """Blocks of three slots in which exactly as many stand as the true confidences say, in every combination."""
    logits, accepted = [], []
    for fifths in itertools.product((1, 2, 3, 4), repeat=3):
        reached = [125, 25 * fifths[0], 5 * fifths[0] * fifths[1], math.prod(fifths)]  # by slots 1, 2, 3 and the end
        for stand, count in enumerate([*(-np.diff(reached)), reached[3]]):
            logits += [logit(np.array(fifths) / 5) * temperatures] * int(count)
            accepted += [stand] * int(count)
    return records_of(np.array(logits), np.array(accepted))
