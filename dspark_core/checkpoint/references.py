"""From what a user types for a model to the folder that holds it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import huggingface_hub as hub

from dspark_core.checkpoint.demo import prepare_demo_target
from dspark_core.errors import CheckpointError

DEMO = "demo"
DEMO_DRAFT = Path(__file__).resolve().parent.parent / "demo_draft"
HUB_PATIENCE = 8.0
"""Seconds a hub has to answer before its local copy is used; the whole look-up stays under 10 s."""

_WANTED = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model"]
# Subfolders hold other formats of the same weights, and so does the consolidated file of some publishers.
_UNWANTED = ["*/*", "consolidated*.safetensors"]

_log = logging.getLogger(__name__)


def resolve_target(ref: str) -> Path:
    """Return the folder of a target model: config.json, safetensors and tokenizer files.

    Args:
        ref: "demo", a local folder, or a hub id "organisation/name". What exists locally wins over the hub;
            a folder of the name demo is reached as "./demo".

    Raises:
        CheckpointError: there is no such model, or it cannot be fetched.
    """
    return prepare_demo_target() if ref == DEMO else _folder_or_hub(ref)


def resolve_draft(ref: str) -> Path:
    """Return the folder of a draft: config.json and safetensors. `ref` and errors as for `resolve_target`.

    "demo" is the draft that ships inside the package.
    """
    return _with_config(DEMO_DRAFT) if ref == DEMO else _folder_or_hub(ref)


def _folder_or_hub(ref: str) -> Path:
    folder = Path(ref).expanduser()
    if folder.is_dir():
        return _with_config(folder)
    if folder.exists():
        raise CheckpointError(f"{ref}: this is a file; expected the folder with config.json and the weights")
    if ref.startswith((".", "/", "~")) or ref.count("/") > 1:
        raise CheckpointError(f"{folder / 'config.json'}: not found, there is no folder {ref}")
    if ref.count("/") != 1 or ref.endswith("/"):
        raise CheckpointError(
            f"{ref!r} names no model; expected {DEMO!r}, an existing folder, or a hub id organisation/name"
        )
    return _with_config(_hub_snapshot(ref))


def _with_config(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder / 'config.json'}: not found; a model folder must hold it")
    return folder


def _hub_snapshot(repo: str) -> Path:
    """Fetch what is missing of a hub repository, or take the local copy when the hub does not answer."""
    silence = "offline mode is on" if hub.is_offline_mode() else _why_no_answer(repo)
    if silence:
        _log.warning("%s: the hub was not used (%s); looking for a local copy", repo, silence)
    try:
        snapshot = hub.snapshot_download(
            repo, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, local_files_only=bool(silence)
        )
    except Exception as error:  # files, network and hub fail in many ways, and all of them end the same
        tried = f"it did not answer ({silence}), and there is no whole local copy" if silence else str(error)
        raise CheckpointError(
            f"{repo}: not a local folder, and fetching it from the hub failed: {tried}. A local folder with "
            "config.json and the weights may be named instead"
        ) from error
    return Path(snapshot)


def _why_no_answer(repo: str) -> str | None:
    """Ask the hub for `repo`; None when it answers well in time, otherwise the reason it did not."""
    outcome: list[str | None] = []

    def ask() -> None:
        try:
            hub.HfApi().repo_info(repo, timeout=HUB_PATIENCE)
            outcome.append(None)
        except Exception as error:  # whatever went wrong is the reason that is reported
            lines = str(error).strip().splitlines() or [""]
            outcome.append(f"{type(error).__name__}: {lines[0]}")

    # In a thread because name resolution knows no time-out.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_PATIENCE)
    return outcome[0] if outcome else f"no answer within {HUB_PATIENCE:g} s"
