"""Running compiled kernels on torch's own threads."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from numba import cfunc, types

logger = logging.getLogger(__name__)

_SIGNATURE = types.void(types.CPointer(types.int64))
_ARRAYS = [ctypes.c_int64 * size for size in range(24)]


class Kernel:
    """A function over numbered tasks, compiled when first called.

    The function gets a pointer to int64 numbers: a counter of tasks taken, the number of tasks, and the arguments. It
    takes tasks from the counter (`simd.take`) until there are none; several threads run it on the same numbers. So
    a thread that loses its core delays only the task it is in.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function
        self._address = 0
        self._serial: Any = None
        self._lock = threading.Lock()

    def __call__(self, tasks: int, *args: int) -> None:
        """Run all tasks; returns when they are done. The caller keeps alive what the addresses in `args` point to."""
        if not self._address:
            self._compile()
        numbers = _ARRAYS[len(args) + 2](0, tasks, *args)
        threads = min(tasks, torch.get_num_threads())
        parallel = parallel_region()
        if threads > 1 and parallel is not None:
            parallel(self._address, numbers, threads, 0)
        else:
            self._serial(numbers)

    def _compile(self) -> None:
        with self._lock:
            if not self._address:
                self._compiled = cfunc(_SIGNATURE, cache=True, error_model="numpy")(self._function)
                self._serial = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._compiled.address)
                self._address = self._compiled.address


@cache
def parallel_region() -> Any:
    """`GOMP_parallel` of the OpenMP library that torch has loaded: its threads are awake and as many as torch uses.

    A second pool of threads would fight with the first one for the cores.
    """
    libraries = Path(torch.__file__).parent.parent.glob("torch*/**/lib*omp*.*")
    for path in sorted(libraries):
        if path.suffix == ".dylib" or ".so" in path.suffixes:
            try:
                function = ctypes.CDLL(str(path)).GOMP_parallel
            except (OSError, AttributeError):
                continue
            function.argtypes, function.restype = [ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
            return function
    logger.warning("torch's OpenMP library was not found beside it: kernels run on one thread")
    return None
