"""Compiled kernels: made once, by a process of its own, kept, and never taken for those of another version."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_core.kernels import layers, library, matmul, rows
from dspark_core.kernels.launch import Kernel
from dspark_core.kernels.source import build
from dspark_core.kernels.source.simd import integers, take
from tests.core.kernels.local import local_kernel

ROOT = Path(__file__).parents[3]


def answer(a: Any) -> None:
    take(a)
    integers(a[2])[0] = 42


def answer_of(kernel: Kernel) -> int:
    out = np.zeros(1, np.int64)
    kernel(1, out.ctypes.data)
    return int(out[0])


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Versions that were compiled, each to a library of one kernel. They lie in a folder of the test's own."""
    made: list[str] = []

    def quickly() -> bytes:
        made.append(library.source_key())
        return build.compiled({"answer": answer})

    monkeypatch.setattr(library, "cache_folders", lambda: [tmp_path / "kernels"])
    monkeypatch.setattr(library, "_compiled", quickly)
    return made


def fresh() -> library.Library:
    return library._built_library.__wrapped__()


def test_all_kernels_that_are_called_are_there() -> None:
    called = [value for module in (layers, rows) for value in vars(module).values() if isinstance(value, Kernel)]
    called += matmul.MATMUL.values()
    assert {kernel.name for kernel in called} | {"run_program"} == set(build.all_kernels())
    assert len({kernel.address for kernel in called}) == len(called)


def test_they_are_built_once_for_a_version(builds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for version, count in (("a", 1), ("a", 1), ("b", 2), ("a", 2)):
        monkeypatch.setattr(library, "source_key", lambda version=version: version)
        assert answer_of(Kernel("answer", fresh)) == 42
        assert len(builds) == count


def test_the_version_is_that_of_source_compiler_and_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = library.source_key.__wrapped__
    found = {key()}
    for name in ("simd.py", "build.py"):
        (tmp_path / name).write_text((library.SOURCE / name).read_text())
    monkeypatch.setattr(library, "SOURCE", tmp_path)
    found.add(key())
    (tmp_path / "simd.py").write_text("# changed\n")
    found.add(key())
    monkeypatch.setattr(library, "version", lambda package: "0.1")
    found.add(key())
    monkeypatch.setattr(library.llvm, "get_host_cpu_name", lambda: "another")
    found.add(key())
    assert len(found) == 5


def test_those_who_come_together_build_once(builds: list[str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        libraries = list(pool.map(lambda _: fresh(), range(4)))
    assert len(builds) == 1
    assert len({kernels.address("answer") for kernels in libraries}) == 4, "each has its own copy"


def test_what_is_damaged_is_built_again(builds: list[str], tmp_path: Path) -> None:
    fresh()
    (path,) = (path for path in (tmp_path / "kernels").iterdir() if not path.name.startswith("."))
    whole = path.read_bytes()
    for content in (b"", whole[: len(whole) // 2], whole[:-1] + b"x", b"x" * 999):
        path.write_bytes(content)
        assert answer_of(Kernel("answer", fresh)) == 42
        assert library._kept_at(path)
    assert len(builds) == 5


def test_what_is_not_ours_is_not_run(builds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()
    monkeypatch.setattr(library.os, "geteuid", lambda: 12345)
    if os.getuid() != 0:  # root's is trusted
        fresh()
        assert len(builds) == 2


def test_a_folder_that_cannot_be_written_is_no_error(
    builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kernels").write_text("in the way")
    assert answer_of(Kernel("answer", fresh)) == 42
    assert "compiled anew in every process" in caplog.text


@pytest.mark.parametrize("full", [False, True])
def test_the_next_folder_serves_where_the_first_cannot(
    full: bool, builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    if not full:
        first.write_text("in the way")
    write = library.write_atomically

    def no_space(path: Path, content: Any) -> None:
        if path.parent == first:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(library, "write_atomically", no_space)
    monkeypatch.setattr(library, "cache_folders", lambda: [first, second])
    assert answer_of(Kernel("answer", fresh)) == 42
    assert any(second.iterdir())
    assert answer_of(Kernel("answer", fresh)) == 42


def test_what_cannot_be_compiled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = library._compiled.__wrapped__
    monkeypatch.setattr(library, "source_key", lambda: "another")
    with pytest.raises(RuntimeError, match="cannot be compiled: the kernels' source has changed meanwhile"):
        compiled()
    monkeypatch.setattr(library.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="cannot be compiled: the compiler ended with code 1"):
        compiled()


def test_who_serves_does_not_import_the_compiler() -> None:
    code = """
import sys, torch
from dspark_core.kernels import storage
from dspark_core.kernels.matmul import matmul
weight, x, out = torch.arange(64.0).view(2, 32) / 64, torch.ones(1, 32), torch.empty(1, 2)
matmul(storage.pack(weight, 0), x, out)
import server.engine, server.loader
print("numba" in sys.modules, *out[0].tolist())
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "7.75", "23.75"]


def test_kernels_of_the_same_name_do_not_meet() -> None:
    """Closures of one function have the same names inside; each library's are its own."""

    def make(number: int) -> Kernel:
        def answer(a: Any) -> None:
            take(a)
            integers(a[2])[0] = number

        return local_kernel(answer)

    assert [answer_of(make(number)) for number in (1, 2)] == [1, 2]
