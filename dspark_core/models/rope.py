"""Rotary position embedding: its configuration, frequencies and tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_core.errors import CheckpointError
from dspark_core.keys import Keys

ORIGINAL = "original_max_position_embeddings"
# Numbers that each scaling type needs, and those it may have. A key that is not understood is refused: a wrong
# rotation gives fluent nonsense, not an error.
ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ("factor", ORIGINAL)),
    "linear": (("factor",), (ORIGINAL,)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (ORIGINAL,)),
    "yarn": (
        ("factor",),
        (ORIGINAL, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}


@dataclass(frozen=True)
class RopeConfig:
    """Base frequency, scaling type, and that type's own numbers."""

    theta: float = 10000.0
    kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()


def read_rope(keys: Keys) -> RopeConfig:
    """From `rope_parameters` (Transformers 5) or `rope_theta` with `rope_scaling` (before).

    Raises:
        CheckpointError: an unknown type, a key that the type does not have, a number that cannot be.
    """
    layouts = [name for name in ("rope_parameters", "rope_scaling") if keys.get(name, dict, None)]
    if len(layouts) == 2:
        raise CheckpointError(f"{keys.where}: rope_parameters and rope_scaling are both set, expected one of them")
    where = f"{keys.where}: {layouts[0] if layouts else 'rope_parameters'}"
    values = Keys(keys.get(layouts[0], dict) if layouts else {}, where)
    kind = values.get("rope_type", str, None) or values.get("type", str, "default")
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"{where}: rope type '{kind}' is not supported, expected one of {', '.join(ROPE_TYPES)}")
    needed, optional = ROPE_TYPES[kind]
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *needed, *optional}
    if unknown := sorted(values.values.keys() - known):
        raise CheckpointError(f"{where}: key '{unknown[0]}' is not understood for rope type '{kind}'")
    for holder in (keys, values):
        if (partial := holder.get("partial_rotary_factor", (int, float), 1.0)) != 1.0:
            raise CheckpointError(f"{holder.where}: partial_rotary_factor is {partial}, expected 1.0")
    numbers = {name: _positive(values, name) for name in needed}
    numbers |= {n: _positive(values, n) for n in optional if values.values.get(n) is not None and n != "truncate"}
    if "truncate" in optional:
        numbers["truncate"] = float(values.get("truncate", bool, True))
    if ORIGINAL in optional and ORIGINAL not in numbers:
        numbers[ORIGINAL] = float(keys.get(ORIGINAL, int, None) or keys.positive("max_position_embeddings", 2048))
    holder = values if values.values.get("rope_theta") is not None else keys
    theta = _positive(holder, "rope_theta") if holder.values.get("rope_theta") is not None else 10000.0
    return RopeConfig(theta, kind, tuple(sorted(numbers.items())))


def _positive(keys: Keys, name: str) -> float:
    value = float(keys.get(name, (int, float)))
    if not (math.isfinite(value) and value > 0):
        raise CheckpointError(f"{keys.where}: key '{name}' is {value}, expected a positive number")
    return value


class Rotary:
    """Tables of rotary position embedding, [positions, head_dim] float32 each: cosines, and sines of alternate sign."""

    def __init__(self, rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> None:
        frequencies, scale = rope_frequencies(rope, head_dim)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self.cos = torch.cat((cos, cos), -1).to(device)
        self.sin = torch.cat((-sin, sin), -1).to(device)

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tables for rows at `positions` [...], shaped [..., 1, head_dim] to broadcast over heads."""
        return self.cos[positions].unsqueeze(-2).to(dtype), self.sin[positions].unsqueeze(-2).to(dtype)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate `x` [..., heads, head_dim] by its rows' angles (half-split layout)."""
    cos, sin = rotary
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    if x.dtype != sin.dtype:
        return swapped * sin + x * cos
    return swapped.mul_(sin).add_(x * cos)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the factor on the tables, for each supported scaling type.

    Sources: Llama 3.1's published scaling; YaRN, arXiv 2309.00071.
    """
    values = dict(rope.scaling)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / values["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(frequencies, values), 1.0
    if rope.kind == "yarn":
        return _yarn(frequencies, values, rope.theta, head_dim)
    return frequencies, 1.0


def _llama3(frequencies: Tensor, values: dict[str, float]) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    turns = values[ORIGINAL] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / values["factor"]


def _magnitude(factor: float, values: dict[str, float]) -> float:
    """What YaRN scales the tables by: longer contexts get sharper attention."""

    def of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "mscale" in values and "mscale_all_dim" in values:
        return of(values["mscale"]) / of(values["mscale_all_dim"])
    return of(1.0)


def _yarn(frequencies: Tensor, values: dict[str, float], theta: float, head_dim: int) -> tuple[Tensor, float]:
    original, factor = values[ORIGINAL], values["factor"]

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(values.get("beta_fast", 32.0)), dimension(values.get("beta_slow", 1.0))
    if values.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float32)
    stretch = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    scale = values.get("attention_factor", _magnitude(factor, values))
    return stretch * frequencies / factor + (1 - stretch) * frequencies, scale
