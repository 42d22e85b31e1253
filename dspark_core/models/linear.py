"""Linear layers for inference, by device: packed for our own kernels on a CPU, plain elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from dspark_core.errors import CheckpointError
from dspark_core.kernels import have_kernels
from dspark_core.models.layers import RMSNorm
from dspark_core.settings import CpuWeights


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether layers of this kind are served by the CPU kernels."""
    return device.type == "cpu" and dtype == torch.float32 and have_kernels()


def pack_linear(*linears: nn.Module, rows: int | None = None, weights: CpuWeights = "exact") -> nn.Module:
    """One inference layer for one or more `nn.Linear` that read the same input, outputs side by side.

    Args:
        rows: keep only the first so many outputs.
        weights: kind of numbers on a CPU; others than exact and float32 need float32 layers there.

    Raises:
        CheckpointError: this kind of weights cannot be had here.
    """
    assert all(isinstance(layer, nn.Linear) for layer in linears), "already packed"
    weight, bias = _joined(cast(Sequence[nn.Linear], linears), rows)
    if not can_pack(weight.device, weight.dtype):
        if weights not in ("exact", "float32"):
            found = f"{weight.dtype} on {weight.device.type}".removeprefix("torch.")
            raise CheckpointError(f"cpu_weights is {weights}, which is for float32 layers on a CPU, found {found}")
        return _plain(weight, bias)
    from dspark_core.models.packed import PackedLinear  # needs llvmlite

    try:
        return PackedLinear(weight, bias, weights)
    except ValueError as error:
        shape = tuple(weight.shape)
        raise CheckpointError(f"cpu_weights is {weights}: a layer of shape {shape} cannot be packed: {error}") from None


def pack_norm(norm: RMSNorm) -> nn.Module:
    """A norm for inference: by our kernel on a CPU, as it is elsewhere."""
    weight = norm.weight.detach()
    if not can_pack(weight.device, weight.dtype):
        return norm
    from dspark_core.models.packed import KernelNorm  # needs llvmlite

    return KernelNorm(weight, norm.eps)


def _joined(linears: Sequence[nn.Linear], rows: int | None) -> tuple[Tensor, Tensor | None]:
    weights = [layer.weight.detach() for layer in linears]
    biases = [layer.bias.detach() for layer in linears if layer.bias is not None]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    bias = torch.cat(biases)[:rows].contiguous() if biases else None
    return weight[:rows], bias


def _plain(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def never_int4(weights: CpuWeights) -> CpuWeights:
    """The kind for layers that rounding to 4 bits would spoil."""
    return "int8" if weights == "int4" else weights


def stored_as(layer: nn.Module) -> tuple[str, int]:
    """Kind of number and bytes of an inference layer's weights."""
    if isinstance(layer, nn.Linear):
        return str(layer.weight.dtype).removeprefix("torch."), layer.weight.nbytes
    from dspark_core.models.packed import PackedLinear

    packed = cast(PackedLinear, layer)
    return packed.kind, packed.panels.data.nbytes
