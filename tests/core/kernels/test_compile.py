"""The cache of compiled kernels: kept between processes, never taken for another kernel or another version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from dspark_core.kernels import compile as compiling
from dspark_core.kernels.launch import Kernel
from dspark_core.kernels.simd import integers

ROOT = Path(__file__).parents[3]
PRODUCTS = """
import sys, torch
from dspark_core.kernels import storage
from dspark_core.kernels.matmul import MATMUL, matmul
weight, x = torch.arange(64.0).view(2, 32) / 64, torch.ones(1, 32)
for kind in map(int, sys.argv[1:]):
    out = torch.empty(1, 2)
    matmul(storage.pack(weight, kind), x, out)
    print(kind, MATMUL[kind]._compiled._cache_hits, *out[0].tolist())
"""


def run(folder: Path, *kinds: int) -> dict[int, list[float]]:
    """Cache hits and products of some kinds of weights, from a process of its own."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PRODUCTS, *map(str, kinds)]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [[float(word) for word in line.split()] for line in lines]
    return {int(row[0]): row[1:] for row in rows}


def test_kernels_of_several_processes_meet_in_one(tmp_path: Path) -> None:
    """Closures of one function, compiled apart, have the same names inside: one must not be linked for the other."""
    first, second = run(tmp_path, 3)[3], run(tmp_path, 4)[4]
    both = run(tmp_path, 3, 4)
    assert first[0] == second[0] == 0, "compiled"
    assert both == {3: [1, *first[1:]], 4: [1, *second[1:]]}, "and taken from the cache"
    assert first[1:] == pytest.approx([7.75, 23.75], rel=0.02)
    assert second[1:] == pytest.approx([7.75, 23.75], rel=0.02)
    assert first[1:] != second[1:], "the two kinds round differently"


def _answer(a):  # type: ignore[no-untyped-def]
    integers(a[2])[0] = 42


def test_other_source_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path))
    for version, hits in (("a", 0), ("a", 1), ("b", 0), ("b", 1)):
        monkeypatch.setattr(compiling, "source_key", lambda version=version: version)
        kernel = Kernel(_answer)
        assert kernel.address
        assert kernel._compiled._cache_hits == hits, version


def test_a_folder_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: object, function: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(compiling._Cache, "__init__", refuse)
    assert Kernel(_answer).address
    assert "compiled anew in every process: cannot cache" in caplog.text
