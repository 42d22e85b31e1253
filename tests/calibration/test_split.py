"""Which fit the server gets: the paper's temperatures, unless biases do far better on what was held out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from calibration.split import fit_split, mean_error, of_regime
from calibration.sts import raw
from dspark_core.errors import CheckpointError
from dspark_core.sampling import REGIMES
from tests.calibration.samples import sampled

RATIO = REGIMES.index("ratio")


def test_a_stretched_head_gets_temperatures() -> None:
    split = fit_split(sampled(6000, [2.0, 0.5]), 0.4, "auto")
    assert split.method == "sts"
    assert split.chosen["ratio"] == split.fits["ratio"].calibrator
    assert set(split.chosen["ratio"].biases) == {0.0}


def test_a_head_that_promises_too_much_throughout_gets_biases() -> None:
    records = sampled(6000, [1.0, 1.0])
    split = fit_split(replace(records, logits=records.logits + 1.2), 0.4, "auto")
    assert split.method == "platt"
    assert split.chosen["ratio"].biases == pytest.approx((-1.2, -1.2), abs=0.3)
    assert mean_error(split.judged, split.chosen, 15) < 0.5 * mean_error(split.judged, split.of("sts"), 15)


@pytest.mark.parametrize("method", ["sts", "platt"])
def test_the_user_may_choose(method: str) -> None:
    split = fit_split(sampled(500, [1.0]), 0.4, method)  # type: ignore[arg-type]
    assert split.method == method


def test_regimes_are_fitted_apart() -> None:
    records = sampled(4000, [1.0])
    greedy = np.arange(len(records)) % 2 == 0
    logits = records.logits + np.where(greedy, 1.5, -1.5)[:, None]
    split = fit_split(replace(records, logits=logits, regime=np.where(greedy, 0, RATIO)), 0.4, "platt")
    assert split.chosen["greedy"].biases[0] == pytest.approx(-1.5, abs=0.3)
    assert split.chosen["ratio"].biases[0] == pytest.approx(1.5, abs=0.3)


def test_nothing_held_out_is_an_error() -> None:
    records = sampled(50, [1.0])
    lonely = replace(records, prompt=np.zeros(50, int))
    with pytest.raises(CheckpointError, match="records of 1 prompts, expected two or more of a domain"):
        fit_split(lonely, 0.4, "auto")
    assert mean_error(of_regime(records, "greedy"), {"greedy": raw(1)}, 15) == float("inf")
