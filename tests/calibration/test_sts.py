"""Sequential Temperature Scaling: known distortions come back, a slow reference agrees, bad data do no harm."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from calibration.records import Records, joined, split_by_prompt
from calibration.reliability import ece
from calibration.sts import evaluate, fit_platt, fit_regimes, fit_sts, raw
from dspark_core.sampling import REGIMES
from tests.calibration.samples import exact, logit, records_of, sampled

NAN = float("nan")


@pytest.mark.parametrize("temperatures", [[1.0, 1.0, 1.0], [1.7, 0.6, 3.0], [0.3, 5.0, 1.2], [2.345, 2.345, 0.77]])
def test_known_temperatures_come_back_within_a_step_of_the_grid(temperatures: list[float]) -> None:
    records = exact(temperatures)
    fit = fit_sts(records)
    assert fit.temperatures == pytest.approx(temperatures, rel=1e-3)
    survival = fit.calibrator.survival(records.logits)
    assert max(ece(survival[:, k], records.survived[:, k]) for k in range(3)) < 1e-3
    assert [position.note for position in fit.positions] == [""] * 3


def test_known_temperatures_come_back_from_samples() -> None:
    temperatures = [1.8, 0.6, 2.5, 1.2]
    fit = fit_sts(sampled(20_000, temperatures))
    assert np.abs(np.log(np.array(fit.temperatures) / temperatures)).max() < 0.1


def slow_fit(records: Records, bins: int, mass: bool) -> list[float]:
    """The same search written out, one block at a time."""
    found: list[float] = []
    for k in range(records.draft_len):
        rows = [r for r in range(len(records)) if not math.isnan(records.logits[r, k])]
        rows = [r for r in rows if k < records.decided[r] or records.accepted[r] < records.decided[r]]
        outcome = [int(records.accepted[r] > k) for r in rows]

        def score(
            log_t: float, k: int = k, rows: list[int] = rows, outcome: list[int] = outcome
        ) -> tuple[float, float]:
            predicted = []
            for r in rows:
                product = 1.0
                for j, t in enumerate([*found, math.exp(log_t)]):
                    product *= 1 / (1 + math.exp(-records.logits[r, j] / t))
                predicted.append(product)
            gaps, loss = [0.0] * bins, 0.0
            for p, o in zip(predicted, outcome, strict=True):
                rank = (sum(q < p for q in predicted) + sum(q == p for q in predicted) / 2) / len(rows)
                gaps[min(int((rank if mass else p) * bins), bins - 1)] += p - o
                loss -= math.log(max(p if o else 1 - p, 1e-12))
            return sum(map(abs, gaps)) / len(rows), loss / len(rows)

        def best(grid: list[float], score=score, rows: list[int] = rows) -> float:
            scores = [score(g) for g in grid]
            limit = min(error for error, _ in scores) + 0.1 / math.sqrt(len(rows))
            return min(
                (round(loss, 9), abs(g), g) for g, (error, loss) in zip(grid, scores, strict=True) if error <= limit
            )[2]

        end = math.log(20)
        centre = best([-end + 2 * end * i / 60 for i in range(61)])
        for step in (end / 300, end / 3000):
            centre = best([min(max(centre + step * i, -end), end) for i in range(-10, 11)])
        found.append(math.exp(centre))
    return found


@pytest.mark.parametrize("mass", [True, False])
def test_the_slow_reference_finds_the_same(mass: bool) -> None:
    records = sampled(70, [2.0, 0.5, 1.5], seed=3)
    source = np.random.default_rng(4)
    ended = source.integers(0, records.accepted + 1)  # some texts end before the rejection
    cut = source.random(70) < 0.3
    records.logits[source.random(70) < 0.2, 2] = NAN
    records = replace(
        records,
        accepted=np.where(cut, ended, records.accepted),
        decided=np.where(cut, ended, records.decided),
    )
    fit = fit_sts(records, bins=6, mass=mass, min_samples=1)
    assert fit.temperatures == pytest.approx(slow_fit(records, 6, mass), rel=1e-6)


def test_a_fit_halves_the_ece_of_prompts_it_has_not_seen() -> None:
    fitted, judged = split_by_prompt(sampled(6000, [4.0, 3.0, 4.0, 3.0, 4.0], spread=1.0), 0.5)
    source = np.random.default_rng(0)
    before = evaluate(judged, raw(5), source, resamples=20)
    for calibrator in (fit_sts(fitted).calibrator, fit_platt(fitted)):
        after = evaluate(judged, calibrator, source, resamples=20)
        for old, new in zip(before, after, strict=True):
            assert new.ece < 0.5 * old.ece
            assert new.brier < old.brier
            assert old.ece > old.noise_limit


def test_a_weak_head_is_not_flattened_where_half_survives() -> None:
    # With bins of equal width the highest temperature wins here: 0.5 for every block.
    source = np.random.default_rng(0)
    true = source.normal(0, 0.6, (1000, 1))
    accepted = (source.random((1000, 1)) < 1 / (1 + np.exp(-true))).sum(axis=1)
    records = records_of(2 * true, accepted)
    assert fit_sts(records).temperatures[0] == pytest.approx(2.0, rel=0.25)
    assert fit_sts(records, mass=False).temperatures[0] > 10


def test_among_near_equals_log_loss_decides() -> None:
    # Two predictions, whose two bins' errors have one sum at all temperatures from 1 to 2: log loss has its minimum
    # between, where scale and outcome agree best.
    logits = np.repeat([[2.0], [-2.0]], 100, axis=0)
    accepted = np.concatenate((np.arange(100) < 88, np.arange(100) < 27)).astype(np.int64)
    # ECE: |σ(2/t) − 0.88| + |σ(2/t) − 0.73| is level while 0.73 ≤ σ(2/t) ≤ 0.88; the log loss's best is their mean.
    assert fit_sts(records_of(logits, accepted)).temperatures[0] == pytest.approx(2 / logit(0.805), rel=1e-3)


def test_blocks_rejected_before_count_as_not_surviving_and_ended_texts_do_not_count() -> None:
    logits = np.random.default_rng(0).normal(0, 1, (300, 3))
    accepted, decided = np.repeat([0, 3, 1], 100), np.repeat([1, 3, 1], 100)
    fit = fit_sts(records_of(logits, accepted, decided))
    counts = [(p.position, p.num_samples, p.num_accepted, p.num_rejected) for p in fit.positions]
    assert counts == [(1, 300, 200, 100), (2, 200, 100, 100), (3, 200, 100, 100)]
    # What the head said of slots behind the end of a text changes nothing.
    other = logits.copy()
    other[200:, 1:] = 7.0
    assert fit_sts(records_of(other, accepted, decided)) == fit
    report = evaluate(records_of(logits, accepted, decided), fit.calibrator, np.random.default_rng(0), resamples=5)
    assert [(p.position, p.num_samples, p.num_accepted, p.num_rejected) for p in fit.positions] == [
        (r.position, r.num_accepted + r.num_rejected, r.num_accepted, r.num_rejected) for r in report
    ]


def test_slots_that_were_not_drafted_do_not_count() -> None:
    whole = sampled(600, [2.0, 0.5, 1.5])
    short = replace(whole, logits=whole.logits.copy(), accepted=whole.accepted.copy(), decided=whole.decided.copy())
    short.logits[400:, 2] = NAN
    short.accepted[400:] = np.minimum(short.accepted[400:], 2)
    short.decided[400:] = np.minimum(short.decided[400:], 2)
    fit = fit_sts(short)
    assert fit.positions[:2] == fit_sts(whole).positions[:2]
    assert [p.num_samples for p in fit.positions] == [600, 600, 400]
    survival = fit.calibrator.survival(short.logits)
    assert np.isnan(survival).sum() == np.isnan(survival[400:, 2]).sum() == 200
    assert evaluate(short, fit.calibrator, np.random.default_rng(0), resamples=5)[2].ece is not None


@pytest.mark.parametrize("value", [np.inf, 1e4])
def test_a_saturated_head_keeps_temperature_1(value: float) -> None:
    right = np.arange(200) % 3 > 0
    accepted = np.where(np.arange(200) < 20, ~right, right) * 2  # a tenth of it wrong
    records = records_of(np.where(right, value, -value)[:, None].repeat(2, axis=1), accepted)
    assert fit_sts(records).temperatures == pytest.approx((1.0, 1.0))
    reports = evaluate(records, fit_platt(records), np.random.default_rng(0), resamples=5)
    assert [report.ece for report in reports] == pytest.approx([0.1, 0.1])


def test_some_saturated_logits_do_not_spoil_the_others() -> None:
    records = sampled(3000, [2.0, 2.0])
    certain = records_of(np.full((300, 2), np.inf), np.full(300, 2))
    assert fit_sts(joined([records, certain])).temperatures == pytest.approx((2.0, 2.0), rel=0.2)


def test_a_head_that_says_nothing_keeps_temperature_1() -> None:
    records = records_of(np.zeros((200, 1)), np.arange(200) % 2)
    assert fit_sts(records).temperatures == pytest.approx((1.0,))


@pytest.mark.parametrize(("count", "note"), [(49, "too few samples"), (50, "")])
def test_positions_with_too_few_samples_keep_temperature_1(count: int, note: str) -> None:
    fit = fit_sts(sampled(count, [3.0]))
    assert fit.positions[0].note == note
    assert (fit.temperatures == (1.0,)) == bool(note)
    assert fit_platt(sampled(count, [3.0])).scales[0] == 1.0 or not note
    assert fit_sts(sampled(count, [3.0]), min_samples=10).positions[0].note == ""


@pytest.mark.parametrize("stands", [0, 1])
def test_positions_with_one_class_keep_temperature_1(stands: int) -> None:
    source = np.random.default_rng(0)
    accepted = np.full(300, 2) if stands else source.integers(0, 2, 300)
    records = records_of(source.normal(0, 3, (300, 2)), accepted)
    fit = fit_sts(records)
    assert fit.positions[1].note == "one class only"
    assert fit.positions[1].temperature == 1.0
    assert fit.positions[1].num_accepted == 300 * stands
    assert len(set(fit_platt(records).scales)) == 1, "as the position before it"
    assert evaluate(records, fit.calibrator, source, resamples=5)[1].auroc is None


def test_a_temperature_at_the_end_of_the_grid_says_so() -> None:
    # Nobody's confidence can be as wrong as this: sure, and wrong as often as right.
    records = records_of(np.tile([[60.0], [-60.0]], (100, 1)), np.arange(200) // 2 % 2)
    fit = fit_sts(records)
    assert fit.temperatures[0] == 1.0, "and is not used"
    assert fit.positions[0].note == "at the end of the grid"


def test_no_records_at_all() -> None:
    records = sampled(5, [1.0, 1.0]).of(np.array([], np.int64))
    assert fit_sts(records, min_samples=0).calibrator == fit_platt(records, min_samples=0) == raw(2)
    assert fit_regimes(records) == {}
    report = evaluate(records, raw(2), np.random.default_rng(0))[1]
    assert (report.position, report.num_accepted, report.num_rejected) == (2, 0, 0)
    assert {report.ece, report.ece_mass, report.interval, report.noise, report.auroc, report.brier} == {None}


def test_each_regime_gets_its_own_temperatures() -> None:
    greedy, coupled = sampled(2000, [3.0, 3.0]), sampled(2000, [0.5, 0.5], seed=1)
    greedy = replace(greedy, regime=np.full(2000, REGIMES.index("greedy")))
    coupled = replace(coupled, regime=np.full(2000, REGIMES.index("coupled")))
    fits = fit_regimes(joined([greedy, coupled]))
    assert fits == {"greedy": fit_sts(greedy), "coupled": fit_sts(coupled)}
    assert fits["greedy"].temperatures != fits["coupled"].temperatures
    assert fit_regimes(greedy, bins=5, min_samples=2001)["greedy"].positions[0].note == "too few samples"
