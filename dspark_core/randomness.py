"""Random numbers as pure functions of a key and counters.

No global stream: a number depends on its key and counters alone, so that it is the same whatever ran before and
whatever else is in the batch. The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood 2014), applied
once per counter; int64 arithmetic wraps, which is what it needs.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import torch
from torch import Tensor

from dspark_core.kernels import have_kernels

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Purpose(IntEnum):
    """Independent streams of the ratio rule, and the noise of the coupled rule."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    NOISE = 4


def derive_key(*parts: int | str) -> int:
    """A 63-bit key from any parts (seed, choice index, ...), for `uniform` and `gumbel`."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch shifts the sign in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor, counter: Tensor | int) -> Tensor:
    if isinstance(counter, int):
        z = x + _signed((counter + 1) * _GOLDEN % (1 << 64))
    else:
        z = x + (counter + 1) * _signed(_GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(_MIX[0])
    z = (z ^ _shift(z, 27)) * _signed(_MIX[1])
    return z ^ _shift(z, 31)


def bits(keys: Tensor, *counters: Tensor | int) -> Tensor:
    """64 random bits as int64, shape of the broadcast of `keys` and `counters` (int64 tensors or ints)."""
    state = _mix(keys, 0)
    for counter in counters:
        state = _mix(state, counter)
    return state


def uniform(keys: Tensor, *counters: Tensor | int) -> Tensor:
    """Uniform float64 in [0, 1): the top 53 bits."""
    return _shift(bits(keys, *counters), 11).double() * 2.0**-53


def round_uniform(keys: Tensor, rounds: Tensor, purpose: Purpose, slots: int) -> Tensor:
    """The numbers of slots 0, 1, ... of a round of requests: [R, slots] from keys and rounds [R]."""
    if keys.device.type == "cpu" and have_kernels():  # torch takes 30 times as long for so few numbers
        from dspark_core.kernels import rows as kernels  # needs llvmlite

        return kernels.uniform(keys, rounds, int(purpose), slots)
    places = torch.arange(slots, device=keys.device)
    return uniform(keys.unsqueeze(-1), rounds.unsqueeze(-1), int(purpose), places)


def gumbel(keys: Tensor, *counters: Tensor | int) -> Tensor:
    """Standard Gumbel noise in float64, always finite.

    52 bits and a half step give numbers strictly inside (0, 1): both logarithms stay finite.
    """
    u = (_shift(bits(keys, *counters), 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(u))
