"""`dspark-calibrate` as a user runs it, on tiny models: all files, found by the server; errors that say what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from calibration.cli import COMMANDS, main
from calibration.settings import CalibrateConfig
from dspark_core.settings import flag, public_fields
from server.auto_policy import AutoPolicy
from server.config import ServerConfig
from server.loader import load_engine
from tests.calibration.test_collect import prompts_file
from tests.tiny import tiny_draft_folder, tiny_target_folder


@pytest.fixture
def draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("server.verification.cache_folder", lambda: tmp_path / "cache")
    return tiny_draft_folder(tmp_path, tiny_target_folder(tmp_path), "vanilla", 4)


def arguments(draft: Path) -> list[str]:
    return [
        "--ckpt", str(draft), "--target", str(draft.parent / "target"), "--prompts", str(prompts_file(draft.parent, 6)),
        "--max-tokens", "12", "--repeats", "1", "--contexts", "100,150", "--max-num-seqs", "4",
    ]  # fmt: skip


def test_the_bare_command_does_it_all_and_the_server_finds_it(draft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(draft)) == 0
    told = capsys.readouterr().out
    assert str(draft) in told
    assert "report.html" in told
    engine = load_engine(ServerConfig(ckpt=str(draft), target=str(draft.parent / "target"), kv_memory_fraction=0.01))
    assert isinstance(engine.policy, AutoPolicy)
    assert engine.info["calibration"] == str(draft / "calibration.json")
    assert engine.info["step costs"] == str(draft / "step_cost.json")
    content = json.loads((draft / "calibration.json").read_text())
    assert set(content["dspark"]["regimes"]) == {"greedy", "ratio", "coupled"}
    assert len(content["temperatures"]) == 4
    assert content["num_samples"] > 10
    assert json.loads((draft / "step_cost.json").read_text())["dspark"]["details"]["spread"]
    report = draft / "calibration"
    assert {"report.html", "report.json", "records.jsonl"} <= {path.name for path in report.iterdir()}


def test_one_command_after_the_other_comes_to_the_same(draft: Path, tmp_path: Path) -> None:
    output = ["--output", str(tmp_path / "out")]
    for command in ("profile", "collect", "fit", "report"):
        assert main([command, *arguments(draft), *output]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"calibration.json", "step_cost.json", "calibration"}
    before = (tmp_path / "out" / "calibration.json").read_bytes()
    assert main(["collect", *arguments(draft), *output]) == 0
    assert main(["fit", *arguments(draft), *output]) == 0
    assert (tmp_path / "out" / "calibration.json").read_bytes() == before, "nothing was collected twice"


@pytest.mark.parametrize("command", ["fit", "report"])
def test_what_needs_records_says_so(command: str, draft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, *arguments(draft)]) == 1
    assert "there are no records; make some: dspark-calibrate collect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["collekt"], "found collekt, expected a command: collect, fit, profile, report, or none"),
        (["--max-tokens", "1"], "--max-tokens: found"),
        (["--held-out", "1"], "--held-out: found"),
        (["fit", "--maxtokens", "3"], "unknown argument --maxtokens, expected --max-tokens"),
    ],
)
def test_wrong_usage_is_named(given: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given) == 2
    assert complaint in capsys.readouterr().err


def test_a_draft_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ckpt", "./nowhere"]) == 1
    assert "nowhere" in capsys.readouterr().err


def test_without_matplotlib_nothing_is_begun(
    draft: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not after minutes of collecting."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(arguments(draft)) == 1
    assert "pip install 'dspark[train]'" in capsys.readouterr().err
    assert not (draft / "calibration").exists()


def test_help_names_every_command_and_flag_and_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv[1:] = ['--help']; from calibration.cli import main; main(); "
        "assert 'torch' not in sys.modules"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(f"  {name} " in told for name in COMMANDS)
    assert all(flag(name) in told for name in public_fields(CalibrateConfig))
