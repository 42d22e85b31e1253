"""Linear layers for inference on a CPU: weights laid out once for the kernels that read them.

Three kinds of weights (`CpuWeights`), all with float32 inputs and outputs:

* float32, packed for oneDNN: the checkpoint's own values. 2 to 3 times faster than `F.linear` between 2 and 8 rows.
* float16, packed for FBGEMM: half the memory traffic, sums in float32. Few rows are the faster for it, many the slower.
* int4: groups of 32 inputs share a scale and a zero point (bfloat16). An eighth of the traffic; not the same model.

In every kind a row's result has the same bits whatever rows lie beside it, which is checked when packing. The operators
are torch-internal. Without those for float32 the stock layer stays, with a warning; the other kinds are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_core.errors import CheckpointError
from dspark_core.settings import CpuWeights

logger = logging.getLogger(__name__)

# The row count that oneDNN lays the weights out for. Any value from 8 up measured alike; 1 picks a layout whose
# results depend on the number of rows.
ROWS_HINT = 16
# Up to here oneDNN takes longer for fewer rows (docs/LOG.md, 2026-11-30), so that padding them saves time.
MIN_ROWS = 6
INT4_GROUP = 32
INT4_OUTPUTS = 16  # the int4 kernel wants a multiple of this many


class PackedLinear(nn.Module):
    """Inference-only replacement for `nn.Linear` on the CPU, [N, in_features] to [N, out_features] float32.

    Attributes:
        row_invariant: whether a row's bits are the same whatever rows lie beside it, as found on random rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.run = self.pack(weight)
        self.row_invariant = self._check_rows()

    def pack(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        """Lay out the weights; returns the kernel over them.

        Raises:
            RuntimeError, AttributeError: this build of torch cannot do it.
        """
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)

    def _check_rows(self) -> bool:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(33, self.in_features, generator=generator)
        whole = self(x)
        return all(torch.equal(self(x[:rows]), whole[:rows]) for rows in (1, 2, 3, 8, 17))


class Float32Linear(PackedLinear):
    """Weights packed for oneDNN."""

    def pack(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        packed, bias = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT), self.bias
        linear = torch.ops.mkldnn._linear_pointwise.default
        return lambda x: linear(x, packed, bias, "none", [], "")

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        return self.run(F.pad(x, (0, 0, 0, MIN_ROWS - rows)))[:rows] if rows < MIN_ROWS else self.run(x)


class Float16Linear(PackedLinear):
    """Weights rounded to float16 and packed for FBGEMM."""

    def pack(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        largest, found = torch.finfo(torch.float16).max, weight.abs().max().item()
        if not found <= largest:  # nor if it is NaN, which would become a number
            raise RuntimeError(f"the largest weight is {found:g}, expected at most {largest:g}, the largest float16")
        packed = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), self.bias)
        linear = torch.ops.quantized.linear_dynamic_fp16.default
        return lambda x: linear(x, packed)


class Int4Linear(PackedLinear):
    """Weights rounded to 16 levels in every group of 32 inputs; inputs and outputs of the kernel are bfloat16."""

    def pack(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        if not weight.isfinite().all():
            raise RuntimeError("some weights are not finite")
        codes, scales_and_zeros = quantise_int4(weight)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        linear, bias = torch.ops.aten._weight_int4pack_mm_for_cpu.default, self.bias

        def run(x: Tensor) -> Tensor:
            out = linear(x.bfloat16(), packed, INT4_GROUP, scales_and_zeros).float()
            return out if bias is None else out + bias  # type: ignore[no-any-return]

        return run

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether the kernel can take weights of this shape."""
        return weight.shape[0] % INT4_OUTPUTS == 0 and weight.shape[1] % INT4_GROUP == 0


def quantise_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N, K] int32 from 0 to 15, and scales and zero points [K / 32, N, 2] bfloat16: w = (code - 8) scale + zero.

    The levels span each group's smallest to largest weight, so weights that were 4-bit with a minimum and groups of 32
    (GGUF's Q4_1) get their own codes back. Codes are chosen after the scales were rounded.
    """
    groups = weight.float().unflatten(1, (-1, INT4_GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / 15).bfloat16()
    zero = (low + 8 * scale.float()).bfloat16()
    steps = (groups - zero.float().unsqueeze(-1)) / scale.float().clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(
        -1
    )
    codes = (steps.round() + 8).clamp(0, 15).int()
    return codes.flatten(1), torch.stack((scale, zero), -1).transpose(0, 1).contiguous()


class PlainLinear(nn.Module):
    """`F.linear` over given tensors: on other devices and dtypes, and where float32 cannot be packed."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """[N, in_features] to [N, out_features]."""
        return F.linear(x, self.weight, self.bias)


def pack_linear(*linears: nn.Module, rows: int | None = None, weights: CpuWeights = "float32") -> nn.Module:
    """One inference layer for one or more `nn.Linear` that read the same input, outputs side by side.

    Args:
        rows: keep only the first so many outputs.
        weights: kind of weights; others than float32 need float32 layers on a CPU.

    Raises:
        CheckpointError: this kind of weights cannot be had here.
    """
    layers = [layer for layer in linears if isinstance(layer, nn.Linear)]
    assert len(layers) == len(linears), "already packed"
    weight = torch.cat([layer.weight.detach() for layer in layers]) if len(layers) > 1 else layers[0].weight.detach()
    biases = [layer.bias for layer in layers if layer.bias is not None]
    bias = torch.cat([b.detach() for b in biases]) if biases else None
    if rows is not None:
        weight, bias = weight[:rows], None if bias is None else bias[:rows]
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    if weights != "float32":
        return _pack_small(weight, bias, weights, on_cpu)
    return _pack_float32(weight, bias) if on_cpu else PlainLinear(weight, bias)


def _pack_float32(weight: Tensor, bias: Tensor | None) -> nn.Module:
    shape = tuple(weight.shape)
    if not (hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and torch.backends.mkldnn.is_available()):
        logger.warning("this torch build has no oneDNN packing: exactness across batch sizes is not guaranteed")
        return PlainLinear(weight, bias)
    try:
        layer = Float32Linear(weight, bias)
    except RuntimeError as error:
        logger.warning("linear layer %s stays unpacked: %s", shape, error)
        return PlainLinear(weight, bias)
    if not layer.row_invariant:
        logger.warning("linear layer %s stays unpacked: oneDNN's results depend on the batch", shape)
        return PlainLinear(weight, bias)
    return layer


def _pack_small(weight: Tensor, bias: Tensor | None, weights: CpuWeights, on_cpu: bool) -> nn.Module:
    if not on_cpu:
        found = f"{weight.dtype} on {weight.device.type}".removeprefix("torch.")
        raise CheckpointError(f"cpu_weights is {weights}, which is for float32 layers on a CPU, found {found}")
    # Where the kernel does not take a layer's shape, more precise weights serve it.
    kind = Int4Linear if weights == "int4" and Int4Linear.fits(weight) else Float16Linear
    try:
        return kind(weight, bias)
    except (RuntimeError, AttributeError) as error:
        shape = tuple(weight.shape)
        raise CheckpointError(
            f"cpu_weights is {weights}: a layer of shape {shape} cannot be packed: {error}"
        ) from error


def never_int4(weights: CpuWeights) -> CpuWeights:
    """The kind for layers that int4 would spoil."""
    return "float16" if weights == "int4" else weights


def is_row_invariant(model: nn.Module) -> bool:
    """Whether every prepared linear layer gives a row the same bits whatever rows lie beside it."""
    packed = [m.row_invariant for m in model.modules() if isinstance(m, PackedLinear)]
    return all(packed) and not any(isinstance(module, PlainLinear) for module in model.modules())
