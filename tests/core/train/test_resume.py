"""A run that is stopped anywhere goes on as if it had not been: same weights, same log, bit for bit."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspark_core.checkpoint.files import locked
from dspark_core.errors import CheckpointError
from dspark_core.train import trainer
from dspark_core.train.config import FitConfig
from dspark_core.train.state import FOLDER
from dspark_core.train.trainer import fit
from tests.core.train.runs import log_lines, settings, write_answers

ROOT = Path(__file__).parents[3]
# A process of its own, slowed down between steps so that a signal finds it at work.
CHILD = """
import sys, time, torch
from dspark_core.train import trainer
from dspark_core.train.config import FitConfig
torch.set_num_threads(2)
step = trainer._step
def slow(*arguments):
    time.sleep(0.02)
    return step(*arguments)
trainer._step = slow
trainer.fit(FitConfig.model_validate_json(sys.argv[1]))
"""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_run(found: Path, expected: Path) -> None:
    assert log_lines(found) == log_lines(expected)
    a, b = weights(found), weights(expected)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Let the trainer be interrupted when it has made so many steps."""
    original, made = trainer._step, 0

    def limited(*arguments: Any) -> Any:
        nonlocal made
        if made == steps:
            raise KeyboardInterrupt
        made += 1
        return original(*arguments)

    monkeypatch.setattr(trainer, "_step", limited)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    return fit(settings(tmp_path_factory.mktemp("whole")))


def beside(whole: Path, name: str, **changes: Any) -> FitConfig:
    return settings(whole.parent, name, **changes)


@pytest.mark.parametrize("steps", [0, 3, 4, 11])
def test_an_interrupted_run_ends_as_the_uninterrupted_one(
    steps: int, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases W11 and W12: before the first checkpoint, between two, on one, and just before the end."""
    config = beside(whole, f"stopped-{steps}")
    with monkeypatch.context() as patch:
        stop_after(patch, steps)
        with pytest.raises(KeyboardInterrupt):
            fit(config)
    assert_same_run(fit(config), whole)


def test_killed_at_any_moment(whole: Path) -> None:
    """Cases W12 and W13: SIGKILL at random moments, again and again, until the run comes to its end."""
    config = beside(whole, "killed", save_every=2)
    moments = random.Random(1)
    kills = 0
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for _ in range(40):
        command = [sys.executable, "-c", CHILD, config.model_dump_json()]
        with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as process:
            if kills < 3:
                wait_for_work(Path(config.output), process, kills)
                time.sleep(moments.uniform(0.0, 0.3))
                process.send_signal(signal.SIGKILL)
            if process.wait() == 0:
                break
        kills += 1
    assert kills >= 3
    assert_same_run(Path(config.output), whole)


def wait_for_work(output: Path, process: subprocess.Popen[bytes], kills: int) -> None:
    """Until the log has grown past the start: a kill while Python is importing proves nothing."""
    log = output / "log.jsonl"
    before = log.stat().st_mtime_ns if log.exists() else 0
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if log.exists() and log.stat().st_mtime_ns > before and log.stat().st_size > 0:
            return
        time.sleep(0.01)


def test_a_finished_run_is_left_as_it_is(whole: Path) -> None:
    before = (whole / "model.safetensors").read_bytes()
    fit(settings(whole.parent, whole.name))
    assert (whole / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "value", "message"),
    [
        ("lr", 2e-2, "holds a run with lr 0.01, now it is 0.02"),
        ("max_steps", 13, "max_steps 12, now it is 13"),
        ("seed", 5, "seed 0, now it is 5"),
    ],
)
def test_other_settings_do_not_resume_a_run(whole: Path, change: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        fit(settings(whole.parent, whole.name, **{change: value}))


def test_a_damaged_state_is_passed_over(whole: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Case W13."""
    config = beside(whole, "damaged")
    fit(config)
    newest = sorted((Path(config.output) / FOLDER).iterdir())[-1]
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    fit(config)
    assert f"{newest} cannot be read and is passed over" in caplog.text
    assert_same_run(Path(config.output), whole)


def test_states_that_are_all_damaged_are_an_error_not_a_fresh_start(whole: Path) -> None:
    config = beside(whole, "ruined")
    fit(config)
    for path in (Path(config.output) / FOLDER).iterdir():
        path.write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="none of 2 states can be read"):
        fit(config)


# The limit on a file's size stands in for a full disk: writing fails half way, as it does there.
FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from dspark_core.train import folder, trainer
from dspark_core.train.config import FitConfig
write, saves = folder.write_state, 0
def limited(*arguments):
    global saves
    saves += 1
    if saves == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    write(*arguments)
folder.write_state = limited
trainer.fit(FitConfig.model_validate_json(sys.argv[1]))
"""


def test_a_full_disk_loses_no_earlier_checkpoint(whole: Path) -> None:
    config = beside(whole, "full")
    command = [sys.executable, "-c", FULL, config.model_dump_json()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert re.search(
        r"TrainingError: the checkpoint of step 8 cannot be written .*; earlier ones are whole", done.stderr
    )
    assert [path.name for path in (Path(config.output) / FOLDER).glob("*.pt")] == ["step-00000004.pt"]
    assert_same_run(fit(config), whole)


def test_a_kill_between_state_and_draft_leaves_no_run_without_a_draft(whole: Path) -> None:
    config = beside(whole, "undrafted")
    folder = fit(config)
    (folder / "model.safetensors").unlink()
    assert_same_run(fit(config), whole)


def test_other_data_at_the_same_path_does_not_resume_a_run(tmp_path: Path) -> None:
    fit(settings(tmp_path))
    write_answers(tmp_path / "answers.jsonl", count=20)
    with pytest.raises(CheckpointError, match=r"the run was begun with data .*, now it is"):
        fit(settings(tmp_path))


def test_a_start_that_failed_claims_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="mask_token_id is 300"):
        fit(settings(tmp_path, mask_token_id=300))
    fit(settings(tmp_path, max_steps=1))


def test_a_model_folder_is_not_overwritten(whole: Path) -> None:
    target = whole.parent / "target"
    before = (target / "config.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"holds config\.json and no fit\.json: not a run"):
        fit(settings(whole.parent, "target"))
    assert (target / "config.json").read_bytes() == before


def test_one_process_at_a_time_works_in_a_folder(whole: Path) -> None:
    config = beside(whole, "taken")
    with locked(Path(config.output)), pytest.raises(CheckpointError, match="is being written by another process"):
        fit(config)


def test_the_log_after_a_stop_counts_what_the_stopped_run_had_counted(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports every 3 steps, checkpoints every 4: the report of step 6 spans a stop after step 4."""
    expected = fit(beside(whole, "reports", log_every=3))
    config = beside(whole, "reports-stopped", log_every=3)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            fit(config)
    assert_same_run(fit(config), expected)


def test_only_the_newest_states_are_kept(whole: Path) -> None:
    assert sorted(path.name for path in (whole / FOLDER).iterdir()) == ["step-00000008.pt", "step-00000012.pt"]
