"""calibration.json: ours comes back, other tools' load, and what does not fit is refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark_core.checkpoint.calibration import (
    Calibration,
    CalibrationReport,
    Scaling,
    load_calibration,
    save_calibration,
)
from dspark_core.checkpoint.origin import Origin
from dspark_core.errors import CheckpointError

ORIGIN = Origin("aa", "bb", 3, "float32", "exact", "cpu", "some CPU", 2)
REPORT = CalibrationReport("set", 120, [1.5, 0.5, 1.0], [0.1, 0.2, None], [0.01, 0.02, None])
FITTED = Calibration(
    {"ratio": Scaling.by_temperature([1.5, 0.5, 1.0]), "greedy": Scaling((0.5, 1.0, 1.0), (0.0, -0.25, 0.0))},
    {"ratio": (0.5, 0.25, 0.125), "greedy": (0.75, 0.5, 0.5)},
)


def saved(folder: Path) -> Path:
    path = folder / "calibration.json"
    save_calibration(path, FITTED, REPORT, ORIGIN, {"dspark": "1"})
    return path


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    found = load_calibration(saved(tmp_path), ORIGIN)
    assert found.regimes == FITTED.regimes
    assert found.acceptance == FITTED.acceptance
    assert found.source.endswith("calibration.json")


def test_the_file_is_one_that_sglang_and_tensorrt_llm_read(tmp_path: Path) -> None:
    content = json.loads(saved(tmp_path).read_text())
    assert content["temperatures"] == [1.5, 0.5, 1.0], "the ratio rule's"
    assert content["dataset"] == "set"
    assert content["num_samples"] == 120
    assert content["ece_before"] == [0.1, 0.2, None]
    assert content["ece_after"] == [0.01, 0.02, None]


@pytest.mark.parametrize(
    "content",
    [
        {
            "temperatures": [1.5, 0.5, 2],
            "dataset": "",
            "num_samples": 0,
            "ece_before": [0.0] * 3,
            "ece_after": [0.0] * 3,
        },
        {"sts_temperatures": [1.5, 0.5, 2]},
    ],
    ids=["sglang", "tensorrt-llm"],
)
def test_files_of_other_tools_load_with_a_warning(
    content: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "sts.json"
    path.write_text(json.dumps(content))
    assert load_calibration(path, ORIGIN).regimes == {"ratio": Scaling((1 / 1.5, 2.0, 0.5), (0.0, 0.0, 0.0))}
    assert "does not say which model" in caplog.text


@pytest.mark.parametrize(
    ("field", "value"), [("target", "xx"), ("draft", "xx"), ("draft_len", 4), ("dtype", "bfloat16"), ("device", "cuda")]
)
def test_a_file_made_for_something_else_is_refused_by_the_field_that_differs(
    field: str, value: Any, tmp_path: Path
) -> None:
    path = saved(tmp_path)
    with pytest.raises(CheckpointError, match=rf"made for {field} .*{value}.*dspark-calibrate"):
        load_calibration(path, replace(ORIGIN, **{field: value}))


def test_another_machine_of_the_same_kind_is_no_reason_to_refuse(tmp_path: Path) -> None:
    assert load_calibration(saved(tmp_path), replace(ORIGIN, machine="another", threads=9))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"temperatures": [1.0, 2.0]}, "holds 2 values, expected 3"),
        ({"temperatures": [1.0, 2.0, 0.0]}, "holds 0.0, expected finite numbers above 0"),
        ({"temperatures": [1.0, 2.0, "1"]}, "holds '1', expected finite numbers above 0"),
        ({"temperatures": [1.0, 2.0, True]}, "holds True, expected finite numbers"),
        ({"temperatures": [1.0, 2.0, math.inf]}, "holds inf, expected finite numbers"),
        ({"temperatures": 1.0}, "key 'temperatures' is 1.0, expected list"),
        ({}, "key 'sts_temperatures' is missing"),
    ],
)
def test_values_that_do_not_fit_are_refused(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    path.write_text(json.dumps(change))
    with pytest.raises(CheckpointError, match=complaint) as error:
        load_calibration(path, ORIGIN)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 1}, "version 1, expected 2"),
        ({"acceptance": [0.5, 0.5, 0.5]}, r"key 'acceptance' is \[0.5, 0.5, 0.5\], expected dict"),
        ({"acceptance": {"ratio": [0.5, 0.5]}}, "acceptance: key 'ratio' holds 2 values"),
        ({"acceptance": {"ratio": [0.5, 0.5, 1.5]}}, "holds 1.5, expected finite numbers at least 0 and at most 1"),
        ({"acceptance": {"greedy": [0.5, 0.5, 0.5]}}, "acceptance: regime 'ratio' is missing"),
        ({"regimes": {"greedy": {}}}, "regimes: regime 'ratio' is missing"),
        ({"regimes": {"ratio": {}, "other": {}}}, "regimes: unknown regime 'other'"),
        ({"regimes": {"ratio": [1.0] * 3}}, "regime 'ratio' is a list, expected an object"),
        ({"regimes": {"ratio": {"scales": [1.0] * 3}}}, "regime 'ratio': key 'biases' is missing"),
        ({"regimes": {"ratio": {"scales": [1.0] * 2, "biases": [0.0] * 3}}}, "key 'scales' holds 2 values, expected 3"),
    ],
)
def test_our_own_part_is_checked_too(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = json.loads(path.read_text())
    content["dspark"] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=complaint):
        load_calibration(path, ORIGIN)


def test_survival_by_regime() -> None:
    logits = np.array([[1.5, 0.5, -1.0], [2.0, 1.25, -1.0], [3.0, 1.0, 0.0]])

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    survival = FITTED.survival(["ratio", "greedy", "coupled"], logits)
    one = sigmoid(1.0)
    assert survival[0] == pytest.approx([one, one * one, one * one * sigmoid(-1.0)])
    assert survival[1] == pytest.approx([one, one * one, one * one * sigmoid(-1.0)])
    assert survival[2] == pytest.approx([sigmoid(2), sigmoid(2) ** 2, sigmoid(2) ** 2 / 2]), (
        "as ratio, for want of its own"
    )
    assert FITTED.survival(["greedy"], logits[1:2, :1]).shape == (1, 1), "of fewer slots"


def test_a_head_that_is_sure_is_sure() -> None:
    with np.errstate(over="raise", invalid="raise"):
        sure = Calibration.raw(4).survival(["ratio"], np.array([[1e6, 700.0, -1e6, 1e6]]))
    assert sure[0].tolist() == [1.0, 1.0, 0.0, 0.0]


def test_the_origin_is_of_models_and_machine() -> None:
    settings = {"target": "a", "draft": "b", "draft_len": 7, "weights": "exact"}
    here = Origin.of(dtype=torch.float32, device=torch.device("cpu"), **settings)  # type: ignore[arg-type]
    assert (here.dtype, here.device, here.weights) == ("float32", "cpu", "exact")
    assert here.machine
    assert here.threads == torch.get_num_threads()
