"""Kernels for float32 models on a CPU, written in Python and compiled by Numba when they are first used."""

from __future__ import annotations

import hashlib
import logging
import platform
from functools import cache
from pathlib import Path

# Attention's work is cut into tiles: so many query rows, each with the query heads that share a key-value head.
TILE_ROWS = 16
TILE_FIELDS = 5  # first row, rows, limit of the first row, step of the limit from row to row, place of the page table

logger = logging.getLogger(__name__)


@cache
def have_kernels() -> bool:
    """Whether kernels can be compiled here."""
    reason = _missing()
    if reason:
        logger.warning("no CPU kernels (%s): slower, and exact only up to near-ties of the two best tokens", reason)
    return not reason


def _missing() -> str:
    try:
        import llvmlite.binding as llvm
        import numba  # noqa: F401
    except ImportError as error:
        return str(error)
    wanted = ("f16c", "fma") if platform.machine() in ("x86_64", "AMD64") else ()
    features = llvm.get_host_cpu_features()
    return ", ".join(f"the CPU has no {name.upper()}" for name in wanted if not features.get(name))


@cache
def source_key() -> str:
    """Of all kernels' source: a kernel contains what it calls in other files."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
