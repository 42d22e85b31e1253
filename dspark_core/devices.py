"""From the words a user types for device and number type to torch's."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark_core.errors import CheckpointError

NUMPY_TYPES = {torch.int64: np.int64, torch.float32: np.float32}


def find_device(name: str) -> torch.device:
    """`auto` is CUDA where there is any. Raises CheckpointError for a device that cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CheckpointError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU and bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def tensor_on(device: torch.device, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of host values on a device, int64 or float32, without waiting for what the device is doing."""
    # A third of the time that torch takes for a list.
    tensor = torch.from_numpy(np.array(values, NUMPY_TYPES[dtype]))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


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
