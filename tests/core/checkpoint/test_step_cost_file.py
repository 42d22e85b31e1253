"""step_cost.json: ours comes back, SGLang's tables load, and what does not fit is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_core.checkpoint.origin import Origin
from dspark_core.checkpoint.step_cost import load_step_cost, save_step_cost
from dspark_core.errors import CheckpointError
from dspark_core.step_cost import CostCurves, StepCost

ORIGIN = Origin("aa", "bb", 3, "float32", "exact", "cpu", "some CPU", 2)
COST = StepCost(
    CostCurves([1, 4, 16], [0.01, 0.02, 0.05], [1, 4], [0.001, 0.002], [0.003, 0.006], 3),
    context=64,
    per_request=1e-6,
    per_row=2e-7,
    draft_per_request=3e-8,
)


def saved(folder: Path) -> Path:
    path = folder / "step_cost.json"
    save_step_cost(path, COST, ORIGIN, {"dspark": "1"}, {"date": "today"})
    return path


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    assert load_step_cost(saved(tmp_path), ORIGIN) == COST


def test_the_file_is_one_that_sglang_reads(tmp_path: Path) -> None:
    content = json.loads(saved(tmp_path).read_text())
    assert content["sample_batch_tokens"] == [1, 4, 16]
    assert content["sample_steps_per_sec"] == pytest.approx([100, 50, 20])
    assert content["max_batch_tokens"] == 16


def test_sglang_s_table_loads_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "sps.json"
    path.write_text(
        json.dumps({"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [100, 50], "max_batch_tokens": 8})
    )
    cost = load_step_cost(path, ORIGIN)
    assert cost.seconds(1, 0, 1) == pytest.approx(0.01)
    assert cost.seconds(8, 4000, 1, drafting=1, slots=3) == pytest.approx(0.02)
    assert "does not say which models" in caplog.text


def test_sglang_s_additive_form_loads(tmp_path: Path) -> None:
    path = tmp_path / "sps.json"
    content = {
        "bias_seconds": 0.01,
        "bs_probes": [1, 8],
        "alpha_seconds": [0.001, 0.004],
        "m_probes": [1, 16],
        "theta_seconds": [0.0, 0.005],
    }
    path.write_text(json.dumps(content))
    seconds = load_step_cost(path, ORIGIN).curves.verify_seconds(np.array([1.0, 16.0]))
    assert seconds == pytest.approx([0.011, 0.016])


@pytest.mark.parametrize(
    ("field", "value"),
    [("target", "xx"), ("draft_len", 4), ("weights", "int4"), ("machine", "another CPU"), ("threads", 16)],
)
def test_costs_of_something_else_are_refused_by_the_field_that_differs(field: str, value: Any, tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(CheckpointError, match=rf"made for {field} .*{value}"):
        load_step_cost(path, replace(ORIGIN, **{field: value}))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"sample_batch_tokens": [4, 1], "sample_steps_per_sec": [1, 1]}, "expected ascending whole numbers"),
        ({"sample_batch_tokens": [], "sample_steps_per_sec": []}, "expected ascending whole numbers"),
        ({"sample_batch_tokens": [1, 2.5], "sample_steps_per_sec": [1, 1]}, "expected ascending whole numbers"),
        ({"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1]}, "holds 1 values, expected 2"),
        ({"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1, 0]}, "holds 0, expected finite numbers above 0"),
        ({"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1, None]}, "holds None"),
        ({"sample_batch_tokens": [1, 2]}, "key 'sample_steps_per_sec' is missing"),
        ({"something": 1}, "key 'sample_batch_tokens' is missing"),
    ],
)
def test_tables_that_do_not_fit_are_refused(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "sps.json"
    path.write_text(json.dumps(change))
    with pytest.raises(CheckpointError, match=complaint) as error:
        load_step_cost(path, ORIGIN)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 7}, "version 7, expected 1"),
        ({"per_row": -1.0}, "'per_row' is -1.0, expected at least 0"),
        ({"block": 0}, "'block' at least 1"),
        ({"context": 1.5}, "expected whole numbers"),
        ({"origin": {}}, "does not say for which target"),
        ({"curves": [1]}, "expected dict"),
        ({"curves": {"tokens": [1]}}, "key 'requests' is missing"),
    ],
)
def test_our_own_part_is_checked_too(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = json.loads(path.read_text())
    content["dspark"] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=complaint):
        load_step_cost(path, ORIGIN)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step_cost.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        load_step_cost(tmp_path / "step_cost.json", ORIGIN)
