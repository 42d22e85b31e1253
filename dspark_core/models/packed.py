"""Linear layers for the exact float32 CPU mode: weights packed once for oneDNN.

Against `F.linear`, packed weights are 2 to 3 times faster between 2 and 8 rows, and a row's result has the same bits
whatever rows lie beside it. The operators are torch-internal: where they are missing, or fail the check made when
packing, `pack_linear` says so and the stock layer stays.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

logger = logging.getLogger(__name__)

# The row count that oneDNN lays the weights out for. Any value from 8 up measured alike; 1 picks a layout whose
# results depend on the number of rows.
ROWS_HINT = 16


class PackedLinear(nn.Module):
    """Inference-only replacement for `nn.Linear` with float32 weights on the CPU.

    Raises:
        RuntimeError: the operators are missing or not row-invariant on this machine.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
        self.pair_single_rows = False
        self._check_rows()

    def forward(self, x: Tensor) -> Tensor:
        """[N, in_features] to [N, out_features]."""
        if self.pair_single_rows and x.shape[0] == 1:
            return self._run(x.expand(2, -1).contiguous())[:1]
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")  # type: ignore[no-any-return]

    def _check_rows(self) -> None:
        """Prove row invariance on random rows; a lone row with its own kernel is run as two."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(33, self.in_features, generator=generator)
        whole = self._run(x)
        for rows in (2, 3, 8, 17):
            if not torch.equal(self._run(x[:rows]), whole[:rows]):
                raise RuntimeError(f"oneDNN linear [{self.out_features}, {self.in_features}] depends on its batch")
        self.pair_single_rows = not torch.equal(self._run(x[:1]), whole[:1])


class PlainLinear(nn.Module):
    """`F.linear` over given tensors: what packing falls back to on other devices and dtypes."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """[N, in_features] to [N, out_features]."""
        return F.linear(x, self.weight, self.bias)


def can_pack() -> bool:
    """Whether this torch build has the operators that packing needs."""
    return hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and torch.backends.mkldnn.is_available()


def pack_linear(*linears: nn.Module, rows: int | None = None) -> nn.Module:
    """One inference layer for one or more `nn.Linear` that read the same input, outputs side by side.

    Args:
        rows: keep only the first so many outputs.
    """
    layers = [layer for layer in linears if isinstance(layer, nn.Linear)]
    assert len(layers) == len(linears), "already packed"
    weight = torch.cat([layer.weight.detach() for layer in layers]) if len(layers) > 1 else layers[0].weight.detach()
    biases = [layer.bias for layer in layers if layer.bias is not None]
    bias = torch.cat([b.detach() for b in biases]) if biases else None
    if rows is not None:
        weight, bias = weight[:rows], None if bias is None else bias[:rows]
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        try:
            if can_pack():
                return PackedLinear(weight, bias)
            logger.warning("this torch build has no oneDNN packing: exactness across batch sizes is not guaranteed")
        except RuntimeError as error:
            logger.warning("linear layer stays unpacked: %s", error)
    return PlainLinear(weight, bias)


def is_row_invariant(model: nn.Module) -> bool:
    """Whether every prepared linear layer gives a row the same bits whatever rows lie beside it."""
    return not any(isinstance(module, PlainLinear) for module in model.modules())
