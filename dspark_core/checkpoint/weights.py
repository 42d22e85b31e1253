"""Reading safetensors checkpoints, whole or sharded, so that damage is named and nothing stays at random values."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dspark_core.errors import CheckpointError
from dspark_core.keys import Keys

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_NAMES_SHOWN = 8


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder, memory-mapped, in their stored dtype.

    The index decides which files count; stray safetensors files are left alone with a warning.

    Raises:
        CheckpointError: no weights, a shard that the index names is missing, a file that is no safetensors file.
    """
    index = folder / INDEX_FILE
    files = _shards(index) if index.exists() else [folder / SINGLE_FILE]
    missing = [path.name for path in files if not path.exists()]
    if missing:
        source = f"{INDEX_FILE} names them" if index.exists() else f"expected {SINGLE_FILE} or {INDEX_FILE}"
        raise CheckpointError(f"{folder}: weights are incomplete, missing {_names(missing)} ({source})")
    strays = sorted({p.name for p in folder.glob("*.safetensors")} - {p.name for p in files})
    if strays:
        logger.warning("%s: ignoring %s, not part of the checkpoint", folder, _names(strays))
    weights: dict[str, Tensor] = {}
    for path in files:
        tensors = _read_file(path)
        if doubled := sorted(tensors.keys() & weights.keys()):
            raise CheckpointError(f"{path}: {_names(doubled)} also in another file of the checkpoint")
        weights.update(tensors)
    if index.exists():
        named = set(Keys.of_file(index).get("weight_map", dict))
        if absent := sorted(named - weights.keys()):
            raise CheckpointError(f"{index} names tensors that its files do not hold: {_names(absent)}")
    return weights


def _shards(index: Path) -> list[Path]:
    files = Keys.of_file(index).get("weight_map", dict).values()
    if not files or not all(isinstance(f, str) and Path(f).name == f for f in files):
        raise CheckpointError(f"{index}: key 'weight_map' must map tensor names to files of the same folder")
    return [index.parent / name for name in sorted(set(files))]


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the weights; fetch the real file with git lfs")
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
        return {name: _tensor(path, name) for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        size = path.stat().st_size
        raise CheckpointError(
            f"{path} ({size} bytes) is not a whole safetensors file, expected one; truncated download? ({error})"
        ) from None


def _tensor(path: Path, name: str) -> Tensor:
    """A tensor in a mapping of its own: the pages of weights that are packed and dropped leave memory with them."""
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def assign_weights(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    *,
    where: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Give every parameter of `module` its tensor: every weight used, every parameter present, every shape right.

    Raises:
        CheckpointError: lists what is missing, extra and mis-shaped.
    """
    expected = {name: tuple(p.shape) for name, p in module.named_parameters()}
    problems = []
    if missing := sorted(expected.keys() - weights.keys()):
        problems.append(f"missing {_names(missing)}")
    if extra := sorted(weights.keys() - expected.keys()):
        problems.append(f"unexpected {_names(extra)}")
    shapes = [
        f"{name} has shape {list(weights[name].shape)}, expected {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in weights and tuple(weights[name].shape) != shape
    ]
    if shapes:
        problems.append(_names(shapes))
    if problems:
        raise CheckpointError(f"{where}: weights do not fit config.json: {'; '.join(problems)}")
    for name, tensor in weights.items():
        if not tensor.is_floating_point():
            raise CheckpointError(f"{where}: {name} has dtype {tensor.dtype}, expected a floating-point type")
        owner, _, leaf = name.rpartition(".")
        parameter = nn.Parameter(tensor.to(device=device, dtype=dtype), requires_grad=False)
        setattr(module.get_submodule(owner), leaf, parameter)


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES_SHOWN])
    return shown if len(names) <= MAX_NAMES_SHOWN else f"{shown} and {len(names) - MAX_NAMES_SHOWN} more"
