"""Kernels run every task once, on torch's threads or alone, from several Python threads at a time."""

from __future__ import annotations

import ctypes
import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dspark_core.kernels import launch
from dspark_core.kernels.launch import Program
from dspark_core.kernels.source.simd import integers, take
from tests.core.kernels.local import local_kernel


def _count(a):  # type: ignore[no-untyped-def]
    done = integers(a[2])
    task = take(a)
    while task < a[1]:
        done[task] += a[3]
        task = take(a)


COUNT = local_kernel(_count)


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


def _accumulate(a):  # type: ignore[no-untyped-def]
    """Every element becomes the sum of all: wrong unless the kernel before it is over."""
    values, results, size = integers(a[2]), integers(a[3]), a[4]
    task = take(a)
    while task < a[1]:
        results[task] = 0
        for i in range(size):
            results[task] += values[i]
        task = take(a)


ACCUMULATE = local_kernel(_accumulate)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_program_runs_its_kernels_one_after_the_other(threads: int) -> None:
    size, rounds = 37, 6
    program, memory = Program(), np.zeros((2, size), np.int64)
    addresses = [row.ctypes.data for row in memory]
    for number in range(rounds):
        program.add(ACCUMULATE, "tasks", "first" if number % 2 == 0 else "second", addresses[1 - number % 2], size)
    program.freeze()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for start in (1, 2):
            memory[0] = start
            program.run({"tasks": size, "first": addresses[0], "second": addresses[1]})
            assert (memory[0] == start * size**rounds).all()
    finally:
        torch.set_num_threads(before)


def test_a_program_needs_all_its_numbers() -> None:
    program = Program()
    program.add(COUNT, 1, "done", 1)
    program.freeze()
    with pytest.raises(KeyError, match="done"):
        program.run({"tasks": 1})


def _give_up(a):  # type: ignore[no-untyped-def]
    """As when memory for a kernel's own arrays is refused: it returns with tasks left."""
    integers(a[2])[0] = 1


def test_a_kernel_that_gave_up_is_an_error() -> None:
    kernel, done = local_kernel(_give_up), np.zeros(1, np.int64)
    with pytest.raises(MemoryError, match="no memory to work with"):
        kernel(3, done.ctypes.data)
    program = Program()
    program.add(COUNT, 1, done.ctypes.data, 1)
    program.add(kernel, 3, done.ctypes.data)
    program.freeze()
    with pytest.raises(MemoryError, match="no memory to work with"):
        program.run({})


def test_torch_s_threads_are_used() -> None:
    """The library that runs the kernels is the one whose number of threads torch sets."""
    openmp = launch.find_openmp()
    assert openmp is not None
    seen: set[int] = set()
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        body = kind(lambda _: seen.add(__import__("threading").get_native_id()))
        openmp.GOMP_parallel(ctypes.cast(body, ctypes.c_void_p).value, None, 2, 0)
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 2


def test_without_openmp_they_run_alone_and_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launch.find_openmp.cache_clear()
    monkeypatch.setattr(launch, "_OPENMP_NAMES", ("libnothing",))
    try:
        with caplog.at_level(logging.WARNING):
            done = np.zeros(50, np.int64)
            COUNT(50, done.ctypes.data, 1)
        assert (done == 1).all()
        assert "kernels run on one thread" in caplog.text
    finally:
        monkeypatch.undo()
        launch.find_openmp.cache_clear()
