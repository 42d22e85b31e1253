"""Where files are kept, and writing them so that a kill or a full disk leaves an old or a new one, never a half."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dspark_core.errors import CheckpointError


def cache_folder() -> Path:
    """$DSPARK_CACHE, else $XDG_CACHE_HOME/dspark, else ~/.cache/dspark. The folder need not exist."""
    own, shared = os.environ.get("DSPARK_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser().absolute()
    return (Path(shared).absolute() if shared else Path.home() / ".cache") / "dspark"


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write beside `path`, flush to the disk, then rename over it; on an error the old file stays as it was.

    What a kill leaves beside it is taken over by the next attempt: one writer at a time, see `locked`.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Keep other processes from writing `path` meanwhile; the lock goes with the process, also when it is killed.

    Args:
        on_wait: called before waiting for another process that holds it; without it that is an error.

    Raises:
        CheckpointError: another process holds it.
    """
    path = path.absolute()  # "." has no name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is None:
                raise CheckpointError(f"{path} is being written by another process, expected one at a time") from None
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sync(path: Path) -> None:
    """Bring a file's content, or a folder's renames, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
