"""A file is the old one or the new one, never half of one."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from dspark_core.checkpoint.files import locked, sync, write_atomically
from dspark_core.checkpoint.fingerprint import fingerprint
from dspark_core.errors import CheckpointError
from tests.server.http_util import DEADLINE_S
from tests.tiny import edit_json, tiny_target_folder

ROOT = Path(__file__).parents[3]


def writing(content: bytes, error: BaseException | None = None) -> Callable[[IO[bytes]], None]:
    """Writes, and then perhaps fails, as a serialiser does in the middle of its work."""

    def write(file: IO[bytes]) -> None:
        file.write(content)
        if error:
            raise error

    return write


def test_a_file_is_made_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for content in (b"first", b"", b"\x00" * 100_000):
        write_atomically(path, writing(content))
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("x"), KeyboardInterrupt()], ids=repr
)
def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(type(error)):
        write_atomically(path, writing(b"half", error))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_first_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "x", writing(b"half", OSError(errno.ENOSPC, "No space left on device")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's full disk")
def test_a_disk_that_fills_while_buffers_are_flushed_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small writes wait in a buffer: the disk says that it is full only when that is flushed."""
    path = tmp_path / "x"
    path.write_bytes(b"old")
    opened = Path.open

    def open_full(self: Path, mode: str = "r") -> IO[bytes]:
        opened(self, mode).close()
        return opened(Path("/dev/full"), mode)

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomically(path, writing(b"new"))
    monkeypatch.undo()
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def write(file: IO[bytes]) -> None:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"

    with path.open("rb") as reader:
        write_atomically(path, write)
        assert reader.read() == b"old", "who had it open keeps what was there"
    assert path.read_bytes() == b"new"


def test_content_reaches_the_disk_before_its_name_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut a name that is there must not stand for an empty file, so: file, rename, folder."""
    path, seen, fsync = tmp_path / "x", [], os.fsync

    def spy(descriptor: int) -> None:
        seen.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    write_atomically(path, writing(b"new"))
    assert seen == [(False, False), (True, True)]


def test_what_a_kill_left_is_taken_over(tmp_path: Path) -> None:
    """Many kills leave one file beside the other, not many, and nothing of it gets into the next."""
    path = tmp_path / "x"
    (tmp_path / ".x.tmp").write_bytes(b"a long half")
    write_atomically(path, writing(b"new"))
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_locked_path_is_refused_to_others_until_it_is_free(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x"
    for _ in range(2):
        with locked(path):
            assert not path.exists(), "the lock is a file beside it"
            for _ in range(2):
                with (
                    pytest.raises(CheckpointError, match="is being written by another process") as caught,
                    locked(path),
                ):
                    pass
                assert str(path) in str(caught.value)
            with locked(tmp_path / "new" / "y"):
                pass
    with pytest.raises(KeyboardInterrupt), locked(path):
        raise KeyboardInterrupt
    with locked(path):
        pass


def test_a_lock_goes_with_the_process_that_held_it(tmp_path: Path) -> None:
    """Also when it is killed and cannot clean up."""
    code = "import sys, time; from pathlib import Path; from dspark_core.checkpoint.files import locked\n"
    code += "with locked(Path(sys.argv[1])): print(flush=True); time.sleep(3600)"
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "x"], stdout=subprocess.PIPE, cwd=ROOT) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"\n", "it holds the lock"
            with pytest.raises(CheckpointError, match="another process"), locked(tmp_path / "x"):
                pass
        finally:
            holder.kill()
        assert holder.wait(DEADLINE_S) == -signal.SIGKILL
    with locked(tmp_path / "x"):
        pass


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "missing" / "x", writing(b"new"))
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "missing")


def test_a_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    """Not of its place; and every kind of change shows."""
    first, second, other = (tiny_target_folder(tmp_path, name=n, seed=s) for n, s in (("a", 2), ("b", 2), ("c", 3)))
    found = fingerprint(first)
    assert len(bytes.fromhex(found)) == 8
    assert fingerprint(second) == found
    assert fingerprint(other) != found
    edit_json(second / "config.json", rms_norm_eps=1e-5)
    assert fingerprint(second) != found
    (first / "model.safetensors").rename(first / "renamed.safetensors")
    assert fingerprint(first) != found
