"""Calibrators, Platt scaling, and reports of how well survival is calibrated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from calibration.records import joined
from calibration.reliability import auroc, brier, ece
from calibration.sts import RIDGE, Calibrator, evaluate, fit_platt, raw
from tests.calibration.samples import logit, records_of, sampled


@pytest.mark.parametrize("value", [np.inf, 1e4])
@pytest.mark.parametrize("calibrator", [raw(2), Calibrator((0.05, 20.0), (3.0, -3.0))])
def test_saturated_logits_are_certain(value: float, calibrator: Calibrator) -> None:
    logits = np.array([[value, value], [-value, value], [value, -value]])
    assert calibrator.confidence(logits).tolist() == [[1, 1], [0, 1], [1, 0]]
    assert calibrator.survival(logits).tolist() == [[1, 1], [0, 0], [1, 0]]


def test_platt_finds_the_line_through_two_points() -> None:
    # Of logit 1 two thirds stand, of logit −1 one fifth; the second slot is judged only where the first stands.
    first = np.repeat([1.0, -1.0], 300)
    stands = np.concatenate((np.arange(300) < 200, np.arange(300) < 60))
    second = np.tile([2.0, 0.0], 300)
    both = stands & (np.arange(600) % 4 > 0)  # at logit 2 every other one, at logit 0 all
    calibrator = fit_platt(records_of(np.stack([first, second], axis=1), stands.astype(int) + both))
    high, low = logit(2 / 3), logit(1 / 5)
    assert calibrator.scales[0] == pytest.approx((high - low) / 2, rel=1e-3)
    assert calibrator.biases[0] == pytest.approx((high + low) / 2, rel=1e-3)
    found = calibrator.confidence(np.array([[0.0, 2.0], [0.0, 0.0]]))[:, 1]
    assert found == pytest.approx([0.5, 1.0], abs=1e-3)


@pytest.mark.parametrize("value", [0.01, 1.0, 40.0, np.inf])
def test_platt_stays_finite_where_a_threshold_separates_the_classes(value: float) -> None:
    right = np.arange(200) % 2
    calibrator = fit_platt(records_of(np.where(right, value, -value)[:, None], right))
    assert 0 < calibrator.scales[0] < 1000
    assert abs(calibrator.biases[0]) < 1
    assert np.all((calibrator.confidence(np.array([[value], [-value]]))[:, 0] > 0.5) == [True, False])


def test_platt_s_ridge_is_in_balance_with_the_samples() -> None:
    right = np.arange(200) % 2
    scale = fit_platt(records_of((2.0 * right - 1)[:, None], right)).scales[0]
    assert 200 / (1 + np.exp(scale)) == pytest.approx(RIDGE * (scale - 1), rel=1e-4)


@pytest.mark.parametrize("value", [0.0, -3.0, 1e4])
def test_platt_of_a_head_that_always_says_the_same_is_the_mean(value: float) -> None:
    calibrator = fit_platt(records_of(np.full((400, 1), value), (np.arange(400) % 4 > 0).astype(np.int64)))
    assert calibrator.confidence(np.array([[np.clip(value, -30, 30)]]))[0, 0] == pytest.approx(0.75, abs=1e-3)


def test_platt_is_the_minimum_of_log_loss() -> None:
    records = sampled(2000, [3.0])
    records = replace(records, logits=records.logits + 2.0)
    calibrator = fit_platt(records)
    assert calibrator.scales[0] == pytest.approx(1 / 3, rel=0.1)
    assert calibrator.biases[0] == pytest.approx(-2 / 3, rel=0.2)

    def loss(scale: float, bias: float) -> float:
        p = Calibrator((scale,), (bias,)).confidence(records.logits)[:, 0]
        return float(-np.log(np.where(records.survived[:, 0], p, 1 - p)).sum())

    least = loss(calibrator.scales[0], calibrator.biases[0])
    for scale, bias in ((0.003, 0.0), (-0.003, 0.0), (0.0, 0.01), (0.0, -0.01)):
        assert loss(calibrator.scales[0] + scale, calibrator.biases[0] + bias) > least


def test_a_report_is_of_survival_where_it_is_known() -> None:
    records = sampled(400, [2.0, 2.0])
    records = replace(records, decided=np.where(np.arange(400) < 100, records.accepted, records.decided))
    calibrator = Calibrator((0.5, 0.7), (0.1, 0.0))
    report = evaluate(records, calibrator, np.random.default_rng(0), bins=10)[1]
    rows = records.known[:, 1]
    assert 100 < rows.sum() < 400
    confidence = 1 / (1 + np.exp(-(records.logits * [0.5, 0.7] + [0.1, 0.0])))
    predicted, outcome = (confidence[:, 0] * confidence[:, 1])[rows], records.survived[rows, 1]
    assert report.ece == pytest.approx(ece(predicted, outcome, bins=10))
    assert report.ece_mass == pytest.approx(ece(predicted, outcome, bins=10, mass=True))
    assert report.auroc == pytest.approx(auroc(predicted, outcome))
    assert report.brier == pytest.approx(brier(predicted, outcome))
    assert report.interval[0] <= report.ece <= report.interval[1] + report.noise
    assert 0 < report.noise < report.noise_limit


def test_the_interval_of_a_report_is_by_prompt() -> None:
    part = sampled(300, [3.0])
    part = replace(part, prompt=np.arange(300))
    widths = [
        np.ptp(evaluate(records, raw(1), np.random.default_rng(0))[0].interval)
        for records in (part, joined([part] * 9))
    ]
    assert widths[1] > 0.7 * widths[0]


def test_a_calibrator_fits_its_block_length() -> None:
    with pytest.raises(ValueError, match="2 scales and 1 biases"):
        Calibrator((1.0, 1.0), (0.0,))
    with pytest.raises(ValueError, match="not \\[N, 3\\]"):
        raw(3).confidence(np.zeros((4, 2)))


def test_a_position_that_few_blocks_came_to_is_scaled_as_the_one_before_it() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=(400, 3))
    accepted = (random.random(400) < 1 / (1 + np.exp(1.0 - logits[:, 0]))).astype(np.int64)  # nobody gets further
    calibrator = fit_platt(records_of(logits, accepted))
    assert calibrator.biases[0] == pytest.approx(-1.0, abs=0.4)
    assert calibrator.scales == (calibrator.scales[0],) * 3
    assert calibrator.biases == (calibrator.biases[0],) * 3
