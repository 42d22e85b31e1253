"""What will run for minutes on a borrowed GPU is tried here first; and what benchmarks measure with is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.load_plots import plot
from benchmarks.scripted import coins
from benchmarks.ways import Tally, compare
from server.request import Request, RequestParams

ROOT = Path(__file__).parents[1]


def test_gpu_check_runs_without_a_gpu() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--shape", "tiny", "--device", "cpu", "--repeats", "1"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["kernel_error_float32"] < 1e-5
    assert result["kernel_error_16_bits"] < 2e-3
    assert result["texts_changed"] == 0
    assert result["ok"]
    assert len(result["steps"]) == 7


def test_the_scripted_draft_s_confidence_is_calibrated() -> None:
    """Of the slots that are told with some confidence, as many are right as it says."""
    script, said, right = coins((0.9, 0.6), 7), [], []
    for number in range(3000):
        request = Request([number], RequestParams(), 10, frozenset(), 0, None)  # type: ignore[arg-type]
        run, logits = script(request, number // 7)
        assert script(request, number // 7) == (run, logits), "the same coins whoever asks"
        judged = min(run + 1, 7)
        said += logits[:judged]
        right += [slot < run for slot in range(judged)]
    confidence, outcome = 1 / (1 + np.exp(-np.array(said))), np.array(right)
    for level in np.unique(confidence.round(6)):
        rows = np.isclose(confidence, level, atol=1e-6)
        assert outcome[rows].mean() == pytest.approx(level, abs=0.04)
    assert len(np.unique(confidence.round(6))) == 4, "two prompts' chances, two hints"


def tally_of(source: np.random.Generator, machine: Sequence[float], speed: float, answer: float) -> Tally:
    """Turns on a machine of so many speeds, with luck for each answer of so many tokens."""
    lucks, tally = source.normal(speed, 0.1 * speed, 400), Tally()
    for other in machine:
        seconds = source.uniform(0.1, 0.2)
        tokens = seconds * other * lucks[int(tally.tokens / answer)]
        tally.tokens += tokens
        tally.seconds += seconds
        tally.turns.append((seconds, tokens))
    return tally


@pytest.mark.parametrize("turns", [5, 40], ids=lambda turns: f"{turns} turns an answer")
def test_the_error_of_a_ratio_is_the_spread_over_many_runs(turns: int) -> None:
    """Two ways on a machine whose speed wanders, which is no error, and on which each has luck of its own, which is."""
    source, found, answer = np.random.default_rng(0), [], 0.15 * turns
    for _ in range(200):
        machine = np.exp(0.3 * np.sin(np.linspace(0, 9, 400) + source.uniform(0, 6)))
        one, other = (tally_of(source, machine, speed, answer) for speed in (1.2, 1.0))
        found.append(compare(one, other, answer))
    ratios, errors = np.array(found, float).T
    assert errors.mean() == pytest.approx(ratios.std(), rel=0.15)


def test_few_answers_tell_no_error() -> None:
    """And what a slow way did alone at the end tells nothing of it."""
    tallies = Tally(31.0, 310, turns=[(1.0, 10)] * 31), Tally(62.0, 310, turns=[(1.0, 5)] * 31 + [(1.0, 5)] * 31)
    assert compare(*tallies, 35) == (2.0, None), "four times 35 tokens of the slower one"
    assert compare(*tallies, 30) == (2.0, 0.0)


def test_a_load_curve_is_drawn(tmp_path: Path) -> None:
    row = {"tokens_per_s": 100.0, "per_user": 50.0, "verify_budget": 2.0}
    ways = ("plain", "full", "fixed 1", "fixed 3", "threshold", "ours")
    result = {
        "draft": "demo",
        "temperature": 0.0,
        "cpu_weights": "exact",
        "conditions": {"cpu": "some CPU", "cores": 2},
        "results": {
            load: {way: {name: value * load for name, value in row.items()} for way in ways} for load in (1, 4)
        },
    }
    plot(tmp_path / "plots", result)
    (file,) = (tmp_path / "plots").iterdir()
    assert file.name == "load_curve_demo_exact_t0.png"
    assert file.stat().st_size > 10_000
