"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from dspark_core.devices import give_back_memory

COUNT, SIZE = 1500, 60_000  # below the size from which the C library maps every block on its own


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs the GNU C library"
)
def test_freed_heap_is_given_back_even_below_what_is_still_used() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(SIZE) for _ in range(COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, SIZE)
    for block in blocks[:-1]:
        libc.free(block)
    before = resident_bytes()
    give_back_memory()
    assert before - resident_bytes() > 0.8 * COUNT * SIZE
    libc.free(blocks[-1])
