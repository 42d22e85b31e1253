"""What a user may type for a model, and what happens without a hub."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import huggingface_hub as hub
import pytest
from safetensors import safe_open

from dspark_core.checkpoint import references
from dspark_core.checkpoint.references import resolve_draft, resolve_target
from dspark_core.errors import CheckpointError

REPO = "someone/some-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library believes that it may use the network, with an empty cache of its own."""
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def cached_snapshot(tmp_path: Path) -> Path:
    """Lay out a repository as the hub's library keeps it on disk."""
    repository = tmp_path / "hub" / "models--someone--some-model"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


def answer_with(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None, after: float = 0.0) -> None:
    def repo_info(self: hub.HfApi, repo_id: str, *, timeout: float) -> None:
        time.sleep(after)
        if error:
            raise error

    monkeypatch.setattr(hub.HfApi, "repo_info", repo_info)


def test_demo_draft_ships_with_the_package() -> None:
    folder = resolve_draft("demo")
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3DSparkModel"]
    with safe_open(folder / "model.safetensors", framework="np") as tensors:
        assert len(tensors.keys()) == 40
    assert (folder / "README.md").is_file()


def test_demo_target_is_prepared(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(references, "prepare_demo_target", lambda: model)
    assert resolve_target("demo") == model


@pytest.mark.parametrize("resolve", [resolve_target, resolve_draft])
def test_local_folders(resolve: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "org").symlink_to(tmp_path)
    for ref in (str(model), "model", "./model", "~/model", "org/model", "model/"):
        assert resolve(ref).resolve() == model


@pytest.mark.parametrize("ref", ["./empty", "empty", "/nowhere/at/all", "./nowhere", "~/nowhere", "a/b/c"])
def test_local_reference_without_config_names_the_file(
    ref: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: not found"):
        resolve_target(ref)


@pytest.mark.parametrize("ref", ["", "gpt2", "someone/"])
def test_what_names_nothing_is_refused(ref: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"names no model; expected 'demo'|config.json: not found"):
        resolve_target(ref)


def test_a_file_is_not_a_folder(model: Path) -> None:
    with pytest.raises(CheckpointError, match="this is a file"):
        resolve_target(str(model / "config.json"))


@pytest.mark.usefixtures("online")
def test_hub_id_fetches_only_model_files(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(model)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    answer_with(monkeypatch)
    assert resolve_target(REPO) == model
    assert (asked["repo_id"], asked["local_files_only"]) == (REPO, False)
    files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "chat_template.jinja",
        "tokenizer.json",
        "x.bin",
    ]
    files += ["original/model.safetensors", "consolidated.safetensors", "README.md"]
    wanted = hub.utils.filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(wanted) == files[:4]


@pytest.mark.usefixtures("online")
def test_offline_mode_uses_the_local_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = cached_snapshot(tmp_path)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    answer_with(monkeypatch, AssertionError("the hub was asked in offline mode"))
    assert resolve_target(REPO) == snapshot


@pytest.mark.usefixtures("online")
def test_unreachable_hub_leads_to_the_local_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = cached_snapshot(tmp_path)
    answer_with(monkeypatch, ConnectionError("name not known\nmore"))
    assert resolve_draft(REPO) == snapshot
    assert "ConnectionError: name not known)" in caplog.text


@pytest.mark.usefixtures("online")
def test_silent_hub_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = cached_snapshot(tmp_path)
    monkeypatch.setattr(references, "HUB_PATIENCE", 0.1)
    answer_with(monkeypatch, after=3.0)
    start = time.monotonic()
    assert resolve_target(REPO) == snapshot
    assert time.monotonic() - start < 2.0


@pytest.mark.usefixtures("online")
def test_without_hub_and_copy_the_error_tells_what_was_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer_with(monkeypatch, ConnectionError("name not known"))
    with pytest.raises(CheckpointError) as caught:
        resolve_target(REPO)
    message = str(caught.value)
    assert f"{REPO}: not a local folder" in message
    assert "it did not answer (ConnectionError: name not known), and there is no whole local copy" in message
    assert "A local folder with config.json and the weights may be named instead" in message


def test_patience_is_about_ten_seconds() -> None:
    assert references.HUB_PATIENCE <= 10
