"""Weights as the kernels read them: panels of 32 outputs, in one of five kinds of numbers.

A kind is *exact* for a matrix when it gives back its very float32 values. Many checkpoints are float32 in name only:
trained in bfloat16, or once quantised to 4 or 8 bits (GGUF's Q4_1 and Q8_0). Stored as what they are they take a half
to a sixth of the memory, and the products keep every bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark_core.kernels.formats import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    GROUP,
    GROUP_BYTES,
    GROUPED,
    INT4,
    INT8,
    NAMES,
    PANEL,
)

KINDS = {name: kind for kind, name in NAMES.items()}
CHUNK = 64 * PANEL  # outputs that are looked at together, so that a large matrix needs little room beside itself
LARGEST_FLOAT16 = torch.finfo(torch.float16).max


@dataclass
class Panels:
    """A packed matrix [outputs, inputs]: its kind and its bytes, one row of `data` per panel."""

    kind: int
    data: np.ndarray[Any, Any]
    outputs: int
    inputs: int
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = self.data.ctypes.data

    def part(self, start: int) -> Panels:
        """The outputs from `start` on, which must begin a panel; nothing is copied."""
        assert start % PANEL == 0
        return Panels(self.kind, self.data[start // PANEL :], self.outputs - start, self.inputs)


def pack(weight: Tensor, kind: int) -> Panels:
    """Store a float32 matrix [outputs, inputs] in a kind, rounding if need be."""
    outputs, inputs = weight.shape
    data = np.empty((-(-outputs // PANEL), inputs * GROUP_BYTES[kind] // GROUP), np.uint8)
    for start in range(0, outputs, CHUNK):
        rows = weight[start : start + CHUNK]
        padding = rows.new_zeros(-len(rows) % PANEL, inputs)
        panels = _ENCODE[kind](torch.cat((rows, padding)) if len(padding) else rows)
        data[start // PANEL : start // PANEL + len(panels)] = panels.numpy()
    return Panels(kind, data, outputs, inputs)


def check_roundable(weight: Tensor) -> None:
    """Raise ValueError if rounding a matrix could give something that is no number (scales are float16)."""
    found = weight.abs().max().item()
    if not found <= LARGEST_FLOAT16:
        expected = f"expected at most {LARGEST_FLOAT16:g}, the largest float16"
        raise ValueError(f"the largest weight is {found:g}, {expected}")


def exact_kind(weight: Tensor) -> int:
    """The smallest kind that gives back the very values of a float32 matrix."""
    kinds = [INT4, INT8] if weight.shape[1] % GROUP == 0 else []
    for kind in [*kinds, BFLOAT16, FLOAT16]:
        if all(_is_exact(kind, weight[start : start + CHUNK]) for start in range(0, len(weight), CHUNK)):
            return kind
    return FLOAT32


def has_whole_groups(weight: Tensor, kind: int) -> bool:
    """Whether a kind can store a matrix of this shape."""
    return kind not in GROUPED or weight.shape[1] % GROUP == 0


def _is_exact(kind: int, rows: Tensor) -> bool:
    if kind == BFLOAT16:
        return not bool((_bits(rows) & 0xFFFF).any())
    # By bits, for -0 equals 0. The first rows say no soonest.
    return all(torch.equal(_bits(ROUND[kind](part)), _bits(part)) for part in (rows[:4], rows))


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def quantise_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N, K] from -127 to 127 and float16 scales [N, K / 32]: w = scale * code."""
    groups = rows.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / 127).half()
    return _codes(groups, scale).clamp_(-127, 127).flatten(1), scale


def quantise_int4(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K] from 0 to 15, float16 scales and minima [N, K / 32]: w = scale * code + minimum.

    The levels span each group's smallest to largest weight. Codes are chosen after scale and minimum were rounded.
    """
    groups = rows.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scale, minimum = ((high - low) / 15).half(), low.half()
    return _codes(groups - minimum.float().unsqueeze(-1), scale).clamp_(0, 15).flatten(1), scale, minimum


def _codes(groups: Tensor, scale: Tensor) -> Tensor:
    """Groups in units of their scales, rounded; 0 where the scale is 0."""
    inverse = torch.where(scale == 0, 0, 1 / scale.float())
    codes: Tensor = groups * inverse.unsqueeze(-1)
    return codes.round_().add_(0.0)  # no code is -0


def round_int8(rows: Tensor) -> Tensor:
    """The values that the int8 kind gives back, rounded as its reader rounds."""
    codes, scale = quantise_int8(rows)
    values: Tensor = codes.unflatten(1, (-1, GROUP)) * scale.float().unsqueeze(-1)
    return values.flatten(1)


def round_int4(rows: Tensor) -> Tensor:
    """The values that the int4 kind gives back. The product is exact in float32, so adding rounds like one FMA."""
    codes, scale, minimum = (part.float() for part in quantise_int4(rows))
    values: Tensor = codes.unflatten(1, (-1, GROUP)) * scale.unsqueeze(-1) + minimum.unsqueeze(-1)
    return values.flatten(1)


def _by_panel(values: Tensor) -> Tensor:
    """[outputs, n] to [panels, n, PANEL]: what is read together lies together."""
    panels: Tensor = values.unflatten(0, (-1, PANEL))
    return panels.transpose(1, 2).contiguous()


def _bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8).flatten(1)


def _encode_int8(rows: Tensor) -> Tensor:
    codes, scale = quantise_int8(rows)
    grouped = _by_panel(codes.to(torch.int8)).unflatten(1, (-1, GROUP)).flatten(2).view(torch.uint8)
    return torch.cat((_by_panel(scale).view(torch.uint8), grouped), -1).flatten(1)


def _encode_int4(rows: Tensor) -> Tensor:
    codes, scale, minimum = quantise_int4(rows)
    pairs = _by_panel(codes.to(torch.uint8)).unflatten(1, (-1, 2))  # [panels, K / 2, 2, PANEL]
    both = (pairs[:, :, 0] | pairs[:, :, 1] << 4).unflatten(1, (-1, GROUP // 2)).flatten(2)
    scales = [_by_panel(part).view(torch.uint8) for part in (scale, minimum)]
    return torch.cat((*scales, both), -1).flatten(1)


_ENCODE: dict[int, Callable[[Tensor], Tensor]] = {
    FLOAT32: lambda rows: _bytes(_by_panel(rows)),
    BFLOAT16: lambda rows: _bytes(_by_panel(rows.bfloat16())),
    FLOAT16: lambda rows: _bytes(_by_panel(rows.half())),
    INT8: _encode_int8,
    INT4: _encode_int4,
}
# What a kind's reader gives back for a matrix that was packed, of whatever values.
ROUND: dict[int, Callable[[Tensor], Tensor]] = {
    FLOAT16: lambda rows: rows.half().float(),
    INT8: round_int8,
    INT4: round_int4,
}
