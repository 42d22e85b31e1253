"""Kernels for float32 models on a CPU, written in Python and compiled by Numba, once for a machine.

What is here calls them; they themselves are in `source`. Numbers that both sides must agree on:
"""

from __future__ import annotations

import logging
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError

# Attention's work is cut into tiles: so many query rows, each with the query heads that share a key-value head.
TILE_ROWS = 16
TILE_FIELDS = 5  # first row, rows, limit of the first row, step of the limit from row to row, place of the page table
ROWS_PER_TASK = 8  # of pointwise kernels; fewer are done before another thread has come
# Of an instruction in a program, and of the numbers that a kernel gets: where they begin, in int64.
ADDRESS, COUNTER, TASKS, ARGUMENTS = 0, 1, 2, 3
MAX_ARGUMENTS = 20
WIDTH = ARGUMENTS + MAX_ARGUMENTS
NO_CHOICE = -1  # in place of a token, where scores had NaN or plus infinity, or nothing above minus infinity

logger = logging.getLogger(__name__)


@cache
def have_kernels() -> bool:
    """Whether kernels run here. They are compiled when this is first asked, if they never were."""
    reason = _missing()
    if reason:
        logger.warning("no CPU kernels (%s): slower, and exact only up to near-ties of the two best tokens", reason)
    return not reason


def _missing() -> str:
    try:
        import llvmlite.binding as llvm
    except ImportError as error:
        return str(error)
    wanted = ("f16c", "fma") if platform.machine() in ("x86_64", "AMD64") else ()
    features = llvm.get_host_cpu_features()
    if missing := [f"the CPU has no {name.upper()}" for name in wanted if not features.get(name)]:
        return ", ".join(missing)
    from dspark_core.kernels.library import built_library  # needs llvmlite

    try:
        built_library()
    except (OSError, RuntimeError, PackageNotFoundError) as error:
        return str(error)
    return ""
