"""Measures of calibration: hand-made cases, and slow references in plain Python."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from calibration.reliability import Bin, auroc, bin_index, brier, ece, ece_interval, ece_noise, reliability


def slow_ece(predicted: list[float], outcome: list[int], bins: int) -> float:
    members: list[list[int]] = [[] for _ in range(bins)]
    for i, p in enumerate(predicted):
        members[next(b for b in range(bins) if p < (b + 1) / bins or b == bins - 1)].append(i)
    gaps = [
        abs(sum(predicted[i] for i in m) / len(m) - sum(outcome[i] for i in m) / len(m)) * len(m) for m in members if m
    ]
    return sum(gaps) / len(predicted)


def slow_auroc(predicted: list[float], outcome: list[int]) -> float:
    ones = [p for p, o in zip(predicted, outcome, strict=True) if o]
    zeros = [p for p, o in zip(predicted, outcome, strict=True) if not o]
    return sum((a > b) + (a == b) / 2 for a in ones for b in zeros) / (len(ones) * len(zeros))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("bins", [1, 8, 15])
def test_figures_equal_their_slow_references(seed: int, bins: int) -> None:
    source = np.random.default_rng(seed)
    predicted = np.concatenate((source.random(60), source.integers(0, 3, 40) / 2))  # ties, and both ends
    outcome = source.integers(0, 2, 100)
    assert ece(predicted, outcome, bins=bins) == pytest.approx(slow_ece(predicted.tolist(), outcome.tolist(), bins))
    assert auroc(predicted, outcome) == pytest.approx(slow_auroc(predicted.tolist(), outcome.tolist()))


def test_the_mean_confidence_of_a_bin_counts_not_its_middle() -> None:
    """Case V5."""
    assert ece(np.full(100, 0.99), np.ones(100), bins=10) == pytest.approx(0.01)


def test_errors_of_one_bin_cancel_and_those_of_two_do_not() -> None:
    assert ece([0.5, 0.5], [0, 1]) == 0
    assert ece([0.25, 0.75], [1, 0], bins=2) == pytest.approx(0.75)
    assert ece([0.25, 0.75], [1, 0], bins=1) == pytest.approx(0)


def test_certain_and_right_is_0_and_certain_and_wrong_is_1() -> None:
    """Case V2."""
    for mass in (False, True):
        assert ece([0.0, 1.0], [0, 1], mass=mass) == 0
        assert ece([0.0, 1.0], [1, 0], mass=mass) == 1


def test_both_ends_fall_in_a_bin_and_empty_bins_are_left_out() -> None:
    """Cases V2 and V4."""
    assert reliability([0.0, 1.0, 0.95, 0.3], [0, 1, 0, 1], bins=10) == [
        Bin(0.0, 0.0, 1),
        Bin(0.3, 1.0, 1),
        Bin(0.975, 0.5, 2),
    ]


def test_an_edge_belongs_to_the_bin_above() -> None:
    assert bin_index(np.array([0.0, 0.25, 0.5, 0.75, 1.0]), 4, mass=False).tolist() == [0, 1, 2, 3, 3]


def test_bins_of_equal_mass_hold_equally_many() -> None:
    predicted = np.random.default_rng(0).random(60) ** 4
    assert [b.count for b in reliability(predicted, np.zeros(60), bins=15, mass=True)] == [4] * 15
    found = bin_index(predicted, 15, mass=True)
    assert np.all(np.diff(found[np.argsort(predicted)]) >= 0)


def test_bins_of_equal_mass_do_not_part_equal_predictions() -> None:
    # Parted by order, the first bin would hold only failures and the second only successes.
    predicted, outcome = np.full(40, 0.5), np.repeat([0, 1], 20)
    assert ece(predicted, outcome, bins=2, mass=True) == 0
    assert reliability([0.1, 0.9, 0.9, 0.9, 0.9, 0.9], [0] * 6, bins=3, mass=True) == [
        Bin(0.1, 0.0, 1),
        Bin(pytest.approx(0.9), 0.0, 5),
    ]


def test_more_bins_than_samples() -> None:
    assert ece([0.2, 0.9], [0, 1], bins=15, mass=True) == pytest.approx(0.15)


def test_auroc_counts_a_tie_half() -> None:
    assert auroc([0.1, 0.9], [0, 1]) == 1
    assert auroc([0.9, 0.1], [0, 1]) == 0
    assert auroc([0.5, 0.5, 0.5], [0, 1, 1]) == 0.5


def test_brier() -> None:
    assert brier([1.0, 0.5, 0.0], [1, 1, 1]) == pytest.approx(1.25 / 3)


def test_what_has_no_value_is_none() -> None:
    """Case V4."""
    source = np.random.default_rng(0)
    assert [f([], []) for f in (ece, auroc, brier)] == [None] * 3
    assert ece([], [], mass=True) is None
    assert ece_interval([], [], source) is None
    assert ece_noise([], source) is None
    assert reliability([], []) == []
    assert auroc([0.2, 0.7], [1, 1]) is None
    assert auroc([0.2, 0.7], [0, 0]) is None


@pytest.mark.parametrize(
    ("predicted", "outcome", "message"),
    [
        ([0.5], [1, 0], "one length"),
        ([[0.5]], [[1]], "one length"),
        ([1.1], [1], "probability"),
        ([-0.1], [1], "probability"),
        ([float("nan")], [1], "probability"),
        ([0.5], [0.5], "neither"),
        ([0.5], [float("nan")], "neither"),
    ],
)
@pytest.mark.parametrize("figure", [ece, auroc, brier, reliability])
def test_what_is_no_probability_or_outcome_is_refused(
    figure: Callable[..., object], predicted: list[float], outcome: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        figure(predicted, outcome)


def test_bins_and_groups_are_checked() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ece([0.5], [1], bins=0)
    with pytest.raises(ValueError, match="groups"):
        ece_interval([0.5, 0.5], [1, 0], np.random.default_rng(0), groups=[1])


def drawn(source: np.random.Generator, size: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Predictions, and outcomes whose true logit is `scale` times the predicted one."""
    logits = source.normal(0, 2, size)
    return 1 / (1 + np.exp(-logits)), source.random(size) < 1 / (1 + np.exp(-scale * logits))


@pytest.mark.parametrize(("scale", "low", "high"), [(1.0, 0.85, 1.0), (0.5, 0.75, 1.0)])
def test_intervals_hold_the_true_ece_about_as_often_as_they_say(scale: float, low: float, high: float) -> None:
    source = np.random.default_rng(0)
    logits = np.linspace(-10, 10, 200_001)
    weight, predicted = np.exp(-(logits**2) / 8), 1 / (1 + np.exp(-logits))
    excess = weight * (predicted - 1 / (1 + np.exp(-scale * logits)))
    truth = np.abs(np.bincount(bin_index(predicted, 15, mass=False), excess)).sum() / weight.sum()
    held = 0
    for _ in range(60):
        interval = ece_interval(*drawn(source, 2000, scale), source, resamples=60)
        assert interval is not None
        held += interval[0] - 1e-9 <= truth <= interval[1]
    assert low <= held / 60 <= high  # 90 %, less what the ECE's own bias costs


def test_an_interval_narrows_with_more_samples() -> None:
    source, widths = np.random.default_rng(1), []
    for size in (500, 8000):
        interval = ece_interval(*drawn(source, size, 0.4), source)
        assert interval is not None
        assert 0 < interval[0] < interval[1]
        widths.append(interval[1] - interval[0])
    assert 2.5 < widths[0] / widths[1] < 6.5  # √16 = 4


def test_equal_rounds_of_a_prompt_count_as_one() -> None:
    source = np.random.default_rng(2)
    predicted, outcome = drawn(source, 400, 0.4)
    many = np.tile(predicted, 9), np.tile(outcome, 9)
    prompt = np.tile(np.arange(400) * 7, 9)  # neither sorted nor without gaps
    width = {
        name: np.ptp(ece_interval(*samples, np.random.default_rng(3), groups=groups))
        for name, samples, groups in (
            ("once", (predicted, outcome), None),
            ("all", many, prompt),
            ("apart", many, None),
        )
    }
    assert width["all"] == pytest.approx(width["once"], rel=0.05)
    assert width["apart"] < 0.5 * width["all"]


def test_prompts_of_unequal_length_are_weighed_by_their_rounds() -> None:
    # Whatever is drawn, all of it is wrong.
    interval = ece_interval(np.ones(51), np.zeros(51), np.random.default_rng(0), groups=[0] * 50 + [1])
    assert interval == pytest.approx((1, 1))


def test_the_same_seed_gives_the_same_interval() -> None:
    samples = drawn(np.random.default_rng(4), 300, 0.4)
    first, again, other = (ece_interval(*samples, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert first == again != other


def test_noise_is_the_ece_of_calibrated_predictions() -> None:
    source = np.random.default_rng(7)
    predicted, _ = drawn(source, 1000, 1.0)
    noise = ece_noise(predicted, source, resamples=1000)
    assert noise is not None
    found = np.array([ece(predicted, source.random(1000) < predicted) for _ in range(400)])
    assert noise[0] == pytest.approx(found.mean(), rel=0.05)
    assert 0.92 < (found <= noise[1]).mean() < 0.98
    stretched = drawn(source, 1000, 0.5)
    assert ece(*stretched) > noise[1]


def test_certain_predictions_have_no_noise() -> None:
    assert ece_noise([0.0, 1.0, 1.0], np.random.default_rng(0)) == (0, 0)


def test_a_resample_of_20000_takes_milliseconds() -> None:
    source = np.random.default_rng(8)
    samples = drawn(source, 20_000, 0.8)
    start = time.perf_counter()
    ece_interval(*samples, source, resamples=50)
    assert (time.perf_counter() - start) / 50 < 0.02  # measured: 0.0003
