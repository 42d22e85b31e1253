"""Where kernels cannot be compiled torch serves, and says so."""

from __future__ import annotations

import sys
from typing import Any

import llvmlite.binding as llvm
import pytest

from dspark_core import kernels
from dspark_core.kernels import library


@pytest.fixture(autouse=True)
def _forget() -> Any:
    kernels.have_kernels.cache_clear()
    yield
    kernels.have_kernels.cache_clear()


def test_they_are_here() -> None:
    assert kernels.have_kernels()


def test_a_cpu_without_half_precision_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: {"avx": True, "f16c": False, "fma": True})
    assert not kernels.have_kernels()
    assert "no CPU kernels (the CPU has no F16C): slower, and exact only up to near-ties" in caplog.text


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    assert not kernels.have_kernels()
    assert "llvmlite" in caplog.text


def test_a_compiler_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("the CPU kernels cannot be compiled: Numba needs NumPy 2.4 or less")

    monkeypatch.setattr(library, "built_library", fail)
    assert not kernels.have_kernels()
    assert "Numba needs NumPy 2.4 or less" in caplog.text
