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
    """A tensor of host values on a device, without waiting for what the device is doing."""
    # A third of the time that torch takes for a list.
    tensor = torch.from_numpy(np.array(values, np.int64 if dtype == torch.int64 else np.float32)).to(dtype)
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
    if sys.platform != "linux":
        return
    memory, place, in_library = ctypes.CDLL(None), (0, 0), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.*)", line):
            place = int(found[1], 16), int(found[2], 16)
            in_library = name in Path(found[4]).name and "w" not in found[3]
        # Pages that were written to, as the loader does, are not those of the file.
        elif in_library and line.split() == ["Anonymous:", "0", "kB"]:
            memory.madvise(ctypes.c_void_p(place[0]), ctypes.c_size_t(place[1] - place[0]), mmap.MADV_DONTNEED)
