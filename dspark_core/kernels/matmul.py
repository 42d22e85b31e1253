"""Products of activations with packed weights: x [N, K] times W [outputs, K] transposed."""

from __future__ import annotations

import torch

from dspark_core.kernels.formats import NAMES, PANEL
from dspark_core.kernels.launch import Kernel
from dspark_core.kernels.storage import Panels

# A thread takes a run of panels, so that it reads on where it has read; a few runs each, so that none waits long.
RUNS_PER_THREAD = 4

# By kind of weights. x, bytes from row to row of x, panels, bias or 0, residual or 0, out, rows, inputs, outputs
MATMUL = {kind: Kernel(f"matmul_{name}") for kind, name in NAMES.items()}


def runs_of(weights: Panels) -> int:
    """Into how many tasks a product is cut."""
    return min(-(-weights.outputs // PANEL), RUNS_PER_THREAD * torch.get_num_threads())


def matmul(
    weights: Panels, x: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """out = x @ W.T + bias + residual, all float32.

    Args:
        weights: packed W [outputs, inputs].
        x: [N, inputs], rows contiguous.
        out: [N, outputs] contiguous; may be `residual` itself.
    """
    assert x.dtype == out.dtype == torch.float32
    assert x.shape[1:] == (weights.inputs,), "inputs"
    assert out.shape == (x.shape[0], weights.outputs), "outputs"
    assert x.stride(1) == 1, "rows must be contiguous"
    MATMUL[weights.kind](
        runs_of(weights), x.data_ptr(), x.stride(0) * 4, weights.address, 0 if bias is None else bias.data_ptr(),
        0 if residual is None else residual.data_ptr(), out.data_ptr(), x.shape[0], weights.inputs, weights.outputs,
    )  # fmt: skip
