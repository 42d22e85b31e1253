"""Kernels run every task once, on torch's threads or alone, from several Python threads at a time."""

from __future__ import annotations

import ctypes
import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dspark_core.kernels import launch
from dspark_core.kernels.launch import Kernel
from dspark_core.kernels.simd import integers, take


def _count(a):  # type: ignore[no-untyped-def]
    done = integers(a[2])
    task = take(a)
    while task < a[1]:
        done[task] += a[3]
        task = take(a)


COUNT = Kernel(_count)


@pytest.mark.parametrize("tasks", [1, 2, 3, 1000])
def test_every_task_runs_once(tasks: int) -> None:
    done = np.zeros(tasks, np.int64)
    for _ in range(20):
        COUNT(tasks, done.ctypes.data, 3)
    assert (done == 60).all()


def test_engines_in_several_threads_do_not_disturb_each_other() -> None:
    def work(number: int) -> np.ndarray:
        done = np.zeros(100, np.int64)
        for _ in range(200):
            COUNT(100, done.ctypes.data, number)
        return done

    with ThreadPoolExecutor(4) as pool:
        for number, done in enumerate(pool.map(work, range(4))):
            assert (done == 200 * number).all()


def test_torch_s_threads_are_used() -> None:
    """The library that runs the kernels is the one whose number of threads torch sets."""
    region = launch.parallel_region()
    assert region is not None
    seen: set[int] = set()
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        body = kind(lambda _: seen.add(__import__("threading").get_native_id()))
        region(ctypes.cast(body, ctypes.c_void_p).value, None, 2, 0)
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 2


def test_without_openmp_they_run_alone_and_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launch.parallel_region.cache_clear()
    monkeypatch.setattr(launch.torch, "__file__", "/nowhere/torch/__init__.py")
    try:
        with caplog.at_level(logging.WARNING):
            done = np.zeros(50, np.int64)
            COUNT(50, done.ctypes.data, 1)
        assert (done == 1).all()
        assert "kernels run on one thread" in caplog.text
    finally:
        monkeypatch.undo()
        launch.parallel_region.cache_clear()
