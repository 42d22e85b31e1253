"""Giving memory back to the system, where it can be done: elsewhere nothing happens."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from pathlib import Path


def give_back_memory() -> None:
    """Return freed heap to the system, where the C library can: packing weights leaves tens of megabytes of it."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def give_back_library(name: str) -> None:
    """Let go of the memory of a shared library that nobody calls any more; should somebody, its file is read again.

    Args:
        name: a part of its file's name.
    """
    try:
        mappings = re.split(rb"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_bytes())
    except OSError:  # another system, or one that does not show this
        return
    memory = ctypes.CDLL(None)
    for mapping in filter(None, mappings):
        first, *lines = mapping.splitlines()
        place, access, _, _, _, *path = first.split(None, 5)
        if not path or name.encode() not in path[0].rpartition(b"/")[2] or b"w" in access:
            continue
        sizes = {key: value.strip() for key, _, value in (line.partition(b":") for line in lines)}
        # Pages that were written to, as the loader writes to some, are not those of the file.
        if sizes.get(b"Rss") != b"0 kB" and sizes.get(b"Anonymous") == sizes.get(b"Swap", b"0 kB") == b"0 kB":
            begin, end = (int(part, 16) for part in place.split(b"-"))
            memory.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
