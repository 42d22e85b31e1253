"""Running compiled kernels on torch's own threads: one at a time, or a whole program of them in one call."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark_core.arrays import Ints
from dspark_core.kernels import COUNTER, MAX_ARGUMENTS, TASKS, WIDTH
from dspark_core.kernels.library import Library, built_library

logger = logging.getLogger(__name__)

_OPENMP_NAMES, _ENDINGS = ("libgomp", "libomp", "libiomp5"), (".so.1", ".so", ".dylib")

GAVE_UP = "a kernel got no memory to work with"
_ARRAYS = [ctypes.c_int64 * size for size in range(MAX_ARGUMENTS + 3)]


class Kernel:
    """A compiled function over numbered tasks.

    The function gets a pointer to int64 numbers: a counter of tasks taken, the number of tasks, and the arguments. It
    takes tasks from the counter (`simd.take`) until there are none; several threads run it on the same numbers. So
    a thread that loses its core delays only the task it is in.

    Args:
        name: of the function, in `dspark_core.kernels.source`.
        library: where to look for it.
    """

    def __init__(self, name: str, library: Callable[[], Library] = built_library) -> None:
        self.name, self._library = name, library

    @cached_property
    def address(self) -> int:
        return self._library().address(self.name)

    @cached_property
    def _serial(self) -> Any:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def __call__(self, tasks: int, *args: int) -> None:
        """Run all tasks; returns when they are done. The caller keeps alive what the addresses in `args` point to."""
        address, numbers = self.address, _ARRAYS[len(args) + 2](0, tasks, *args)
        self.run(address, numbers, min(tasks, torch.get_num_threads()))

    def run(self, address: int, numbers: Any, threads: int) -> None:
        """Run on so many threads. Raises MemoryError if a kernel gave up: all else in them cannot fail."""
        openmp = find_openmp()
        if threads > 1 and openmp:
            openmp.GOMP_parallel(address, numbers, threads, 0)
        else:
            self._serial(numbers)
        if numbers[0] < numbers[1]:
            raise MemoryError(GAVE_UP)


_RUN_PROGRAM = Kernel("run_program")  # address of the instructions, their number, address of the barrier or 0


class Program:
    """Kernels one after the other, without Python between them.

    Numbers that change from run to run (row counts, addresses of buffers) are named when the program is written, and
    given when it is run: one for all places where a name stands, or as many as there are, in order.
    """

    def __init__(self) -> None:
        self._instructions: list[list[int]] = []
        self._places: dict[str, list[int]] = {}

    def add(self, kernel: Kernel, tasks: int | str, *args: int | str) -> None:
        """Append a kernel; a name stands for a number that `run` is given."""
        row: list[int] = [kernel.address, 0]
        for value in (tasks, *args):
            if isinstance(value, str):
                self._places.setdefault(value, []).append(len(self._instructions) * WIDTH + len(row))
            row.append(0 if isinstance(value, str) else value)
        self._instructions.append(row + [0] * (WIDTH - len(row)))

    def freeze(self) -> None:
        """End writing."""
        self._template = np.array(self._instructions, np.int64).reshape(-1, WIDTH)
        self._indices = {name: np.array(places) for name, places in self._places.items()}

    def run(self, values: Mapping[str, int | Ints]) -> None:
        """Run all kernels; the caller keeps alive what the addresses point to."""
        numbers = self._template.copy()  # several engines may run the same program
        flat = numbers.reshape(-1)
        for name, places in self._indices.items():
            given = values[name]
            assert isinstance(given, int) or len(given) == len(places), f"{name}: {len(places)} places"
            flat[places] = given
        threads, openmp = torch.get_num_threads(), find_openmp()
        barrier = openmp.barrier_address if threads > 1 and openmp else 0
        arguments = _ARRAYS[5](0, 0, numbers.ctypes.data, len(numbers), barrier)
        _RUN_PROGRAM.run(_RUN_PROGRAM.address, arguments, threads)
        if (numbers[:, COUNTER] < numbers[:, TASKS]).any():
            raise MemoryError(GAVE_UP)


class _OpenMP:
    """The functions of an OpenMP library that kernels need."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.GOMP_parallel = library.GOMP_parallel
        self.GOMP_parallel.argtypes = [ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self.GOMP_parallel.restype = None
        self.barrier_address = ctypes.cast(library.GOMP_barrier, ctypes.c_void_p).value or 0


@cache
def find_openmp() -> _OpenMP | None:
    """The OpenMP library that torch has loaded: its threads are awake and as many as torch uses.

    A second pool of threads would fight with the first one for the cores.
    """
    own = Path(torch.__file__).parent
    folders = (own / "lib", own.with_name("torch.libs"))
    beside = [path for folder in folders for name in _OPENMP_NAMES for path in sorted(folder.glob(f"{name}*"))]
    for library in (*map(str, beside), *(f"{name}{ending}" for name in _OPENMP_NAMES for ending in _ENDINGS)):
        try:
            return _OpenMP(ctypes.CDLL(library, mode=getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW))
        except (OSError, AttributeError):
            continue
    logger.warning("torch's OpenMP library was not found: kernels run on one thread")
    return None
