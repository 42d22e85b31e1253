"""A linear layer over packed weights and a norm, in kernels: float32 on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark_core.kernels import storage
from dspark_core.kernels.formats import FLOAT16, FLOAT32, NAMES, PANEL
from dspark_core.kernels.layers import RMS_NORM, row_tasks
from dspark_core.kernels.matmul import matmul
from dspark_core.settings import CpuWeights


class PackedLinear(nn.Module):
    """Inference-only replacement for `nn.Linear`, float32 in and out.

    A row's result has the same bits whatever rows lie beside it, and with exact weights whatever they are packed as.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
        weights: exact, or the kind of numbers to round to; a matrix without whole groups of 32 inputs gets float16
            where a kind with groups was asked for.

    Raises:
        ValueError: a weight does not fit the kind.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, weights: CpuWeights) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        if weights == "exact":
            kind = storage.exact_kind(weight)
        else:
            kind = storage.KINDS[weights]
            if kind != FLOAT32:
                storage.check_roundable(weight)
            kind = kind if storage.has_whole_groups(weight, kind) else FLOAT16
        self.panels = storage.pack(weight, kind)

    @property
    def kind(self) -> str:
        """Name of the numbers that the weights are stored as."""
        return NAMES[self.panels.kind]

    def forward(self, x: Tensor) -> Tensor:
        """[N, in_features] to [N, out_features]."""
        out = x.new_empty(len(x), self.out_features)
        matmul(self.panels, x if x.stride(-1) == 1 else x.contiguous(), out, bias=self.bias)
        return out

    def add_to_(self, out: Tensor, x: Tensor) -> None:
        """Add the outputs for `x` [N, in_features] to `out` [N, out_features], contiguous."""
        matmul(self.panels, x if x.stride(-1) == 1 else x.contiguous(), out, bias=self.bias, residual=out)

    def part(self, start: int) -> PackedLinear | None:
        """The outputs from `start` on as a layer over the same memory; None unless a panel begins there."""
        if start % PANEL:
            return None
        part = PackedLinear.__new__(PackedLinear)
        nn.Module.__init__(part)
        part.out_features, part.in_features = self.out_features - start, self.in_features
        part.bias = None if self.bias is None else self.bias[start:]
        part.panels = self.panels.part(start)
        return part


class KernelNorm(nn.Module):
    """Inference-only replacement for `RMSNorm`: the layers' own norm. torch's takes ten times as long."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, torch.tensor([eps])

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] to [N, D]."""
        rows, size = x.shape
        x, out = x.contiguous(), torch.empty(rows, size)
        assert (x.dtype, size) == (torch.float32, len(self.weight))
        arguments = (x.data_ptr(), self.weight.data_ptr(), out.data_ptr(), rows, size, self.eps.data_ptr())
        RMS_NORM(row_tasks(rows), *arguments)
        return out
