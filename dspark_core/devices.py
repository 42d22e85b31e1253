"""From the words a user types for device and number type to torch's."""

from __future__ import annotations

from collections.abc import Sequence
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
