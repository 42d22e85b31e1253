"""Kernels for float32 models on a CPU, written in Python and compiled by Numba when they are first used."""

from __future__ import annotations

import logging
from functools import cache

# Attention's work is cut into tiles: so many query rows, each with the query heads that share a key-value head.
TILE_ROWS = 16
TILE_FIELDS = 5  # first row, rows, limit of the first row, step of the limit from row to row, place of the page table

logger = logging.getLogger(__name__)


@cache
def have_kernels() -> bool:
    """Whether kernels can be compiled here."""
    try:
        import numba  # noqa: F401
    except ImportError as error:
        logger.warning("no CPU kernels (%s): slower, and exact only up to near-ties of the two best tokens", error)
        return False
    return True
