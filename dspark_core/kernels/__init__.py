"""Kernels for float32 models on a CPU, written in Python and compiled by Numba when they are first used."""

from __future__ import annotations

import logging
from functools import cache

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
