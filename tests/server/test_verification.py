"""Which policy a server uses, and what it measures, finds, refuses and keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dspark_core.checkpoint.calibration import (
    Calibration,
    CalibrationReport,
    Scaling,
    load_calibration,
    save_calibration,
)
from dspark_core.checkpoint.fingerprint import fingerprint
from dspark_core.checkpoint.origin import Origin
from dspark_core.checkpoint.references import DEMO_DRAFT
from dspark_core.checkpoint.step_cost import save_step_cost
from dspark_core.errors import CheckpointError
from dspark_core.step_cost import CostCurves, StepCost
from server.auto_policy import AutoPolicy
from server.config import ServerConfig
from server.engine import Engine
from server.loader import load_engine
from server.policy import FixedLength, LengthPolicy, Threshold
from tests.server.engines import GREEDY, make_prompt, run
from tests.server.test_policy import RequestParams
from tests.tiny import tiny_draft_folder, tiny_target_folder

COST = StepCost(CostCurves([1, 64], [0.5, 0.6], [1], [0.1], [0.2], 4))


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return tiny_draft_folder(tmp_path, tiny_target_folder(tmp_path), "vanilla", 4)


def config_of(draft: Path, **settings: Any) -> ServerConfig:
    base = {
        "ckpt": str(draft),
        "target": str(draft.parent / "target"),
        "max_model_len": 128,
        "kv_memory_fraction": 0.01,
    }
    return ServerConfig.model_validate(base | settings)


def load(draft: Path, **settings: Any) -> Engine:
    return load_engine(config_of(draft, **settings))


def origin_of(draft: Path) -> Origin:
    origin = load(draft, verify="off").origin
    assert origin is not None
    return origin


def calibrate(path: Path, origin: Origin, temperature: float = 2.0) -> None:
    temperatures, nothing = [temperature] * origin.draft_len, [None] * origin.draft_len
    report = CalibrationReport("set", 1, temperatures, nothing, nothing)
    save_calibration(path, Calibration({"ratio": Scaling.by_temperature(temperatures)}), report, origin, {})


@pytest.mark.parametrize(
    ("verify", "kind", "text"),
    [
        ("auto", AutoPolicy, "by confidence"),
        ("full", LengthPolicy, "whole blocks"),
        ("off", FixedLength, "nothing is drafted"),
        ("2", FixedLength, "2 tokens of every block"),
        ("9", FixedLength, "4 tokens of every block"),
        ("threshold=0.4", Threshold, "probability of 0.4 or more"),
    ],
)
def test_rules(verify: str, kind: type, text: str, draft: Path) -> None:
    engine = load(draft, verify=verify)
    assert type(engine.policy) is kind
    assert text in engine.info["verification"]
    (result,) = run(engine, [(make_prompt(9), RequestParams(GREEDY, max_tokens=20))])
    spent = result.last.speculation
    if verify != "auto":  # there it is a matter of cost
        assert (spent.rounds == 0) == (verify == "off")
    if verify == "2":
        assert spent.drafted <= 2 * spent.rounds


@pytest.mark.parametrize("verify", ["", "0", "-1", "3.5", "threshold", "threshold=", "threshold=0", "threshold=1.1",
                                    "threshold=nan", "threshold=x", "auto=1", "Full", "٣"])  # fmt: skip
def test_what_is_no_rule_is_refused(verify: str) -> None:
    with pytest.raises(ValidationError, match="expected auto, full, off, a number of tokens, or threshold=X"):
        ServerConfig(verify=verify)


def test_costs_measured_at_start_are_kept_for_the_next(draft: Path, measured: Path) -> None:
    first = load(draft)
    assert first.info["step costs"] == "measured at start"
    (kept,) = (measured / "step_cost").glob("*.json")
    again = load(draft)
    assert str(kept) in again.info["step costs"]
    assert isinstance(first.policy, AutoPolicy)
    assert isinstance(again.policy, AutoPolicy)
    assert again.policy.cost == first.policy.cost
    load(draft, max_num_seqs=3)
    assert len(list((measured / "step_cost").glob("*.json"))) == 2, "another server, other costs"
    kept.write_text("{")
    assert load(draft).info["step costs"] == "measured at start", "a broken file is made anew"


def test_files_beside_the_draft_are_found(draft: Path) -> None:
    origin = origin_of(draft)
    calibrate(draft / "calibration.json", origin)
    save_step_cost(draft / "step_cost.json", COST, origin, {})
    engine = load(draft)
    assert isinstance(engine.policy, AutoPolicy)
    assert engine.policy.cost == COST
    assert engine.policy.calibration is not None
    assert engine.policy.calibration.regimes["ratio"].scales == (0.5,) * 4
    assert engine.info["calibration"] == str(draft / "calibration.json")
    assert engine.info["step costs"] == str(draft / "step_cost.json")


def test_files_named_by_the_user_come_first(draft: Path, tmp_path: Path) -> None:
    origin = origin_of(draft)
    calibrate(draft / "calibration.json", origin)
    calibrate(tmp_path / "other.json", origin, 3.0)
    save_step_cost(tmp_path / "cost.json", COST, origin, {})
    engine = load(draft, calibration=str(tmp_path / "other.json"), step_cost=str(tmp_path / "cost.json"))
    assert isinstance(engine.policy, AutoPolicy)
    assert engine.policy.calibration is not None
    assert engine.policy.calibration.regimes["ratio"].scales[0] == 1 / 3
    assert engine.policy.cost == COST
    raw = load(draft, calibration="off").policy
    assert isinstance(raw, AutoPolicy)
    assert raw.calibration == Calibration.raw(4)


def test_a_named_file_that_does_not_fit_stops_the_start(draft: Path, tmp_path: Path) -> None:
    calibrate(tmp_path / "other.json", Origin("x", "y", 4, "float32", "exact", "cpu", "", 2))
    with pytest.raises(CheckpointError, match="made for target 'x'"):
        load(draft, calibration=str(tmp_path / "other.json"))
    with pytest.raises(CheckpointError, match=r"missing\.json does not exist"):
        load(draft, step_cost=str(tmp_path / "missing.json"))


def test_a_file_beside_the_draft_that_does_not_fit_is_left_with_a_warning(
    draft: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder copied from another machine, or a draft trained further, must still serve."""
    other = Origin("x", "y", 4, "float32", "exact", "cpu", "", 2)
    calibrate(draft / "calibration.json", other)
    save_step_cost(draft / "step_cost.json", COST, other, {})
    engine = load(draft)
    assert engine.info["calibration"] == "raw confidence"
    assert engine.info["step costs"] == "measured at start"
    assert caplog.text.count("made for target 'x'") == 2


def test_of_several_files_the_one_that_fits_is_used(
    draft: Path, measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was made for another length lies in the cache, what was shipped beside the draft."""
    monkeypatch.setattr("server.verification.measured_folder", lambda *_: measured)
    other = Origin("x", "y", 4, "float32", "exact", "cpu", "", 2)
    calibrate(measured / "calibration.json", other)
    calibrate(draft / "calibration.json", origin_of(draft))
    assert load(draft).info["calibration"] == str(draft / "calibration.json")


def test_a_busy_start_is_measured_again(
    draft: Path, measured: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.profile.BUSY", -1.0)
    assert load(draft).info["step costs"] == "measured at start, on a busy machine"
    assert "the machine was busy" in caplog.text
    assert not (measured / "step_cost").exists()


def test_the_demo_comes_calibrated() -> None:
    """The shipped file is of this draft: a retrained one needs it made again."""
    content = json.loads((DEMO_DRAFT / "calibration.json").read_text())
    origin = content["dspark"]["origin"]
    assert origin["draft"] == fingerprint(DEMO_DRAFT)
    assert load_calibration(DEMO_DRAFT / "calibration.json", Origin(**origin)).acceptance


def test_a_shorter_block_needs_its_own_calibration(draft: Path, caplog: pytest.LogCaptureFixture) -> None:
    calibrate(draft / "calibration.json", origin_of(draft))
    assert load(draft, draft_len=2).info["calibration"] == "raw confidence"
    assert "made for draft_len 4, this server's is 2" in caplog.text


def test_a_draft_without_a_confidence_head(draft: Path) -> None:
    """Case R15."""
    for file in ("config.json",):
        content = json.loads((draft / file).read_text())
        content["enable_confidence_head"] = False
        (draft / file).write_text(json.dumps(content))
    from safetensors.torch import load_file, save_file

    weights = load_file(draft / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "confidence" not in k}, draft / "model.safetensors")
    engine = load(draft)
    assert isinstance(engine.policy, AutoPolicy)
    assert engine.policy.calibration is None
    assert "by earlier rounds" in engine.info["verification"]
    with pytest.raises(CheckpointError, match="no confidence head; use auto, full or N"):
        load(draft, verify="threshold=0.5")
