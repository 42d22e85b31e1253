"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_core.memory import give_back_memory

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


def resident_of(name: str) -> int:
    """Bytes of a shared library's mappings that are in memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = name in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_library_whose_memory_was_given_back_still_works() -> None:
    code = """
import sys
import llvmlite.binding as llvm
from dspark_core.memory import give_back_library
from tests.core.test_memory import resident_of
def use():
    module = llvm.parse_assembly("define i32 @f() { ret i32 7 }")
    return str(module)
llvm.initialize_native_target()
said = use()
before = resident_of("llvmlite")
give_back_library("llvmlite")
after = resident_of("llvmlite")
assert after < 0.3 * before, (before, after)
assert use() == said
assert resident_of("llvmlite") > after
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
