"""Sampling: softmax of wide rows and drawing from them, a row a task, and the random numbers for it."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from dspark_core.kernels.launch import Kernel
from dspark_core.kernels.simd import (
    LANES,
    doubles,
    exp,
    integers,
    lane_max,
    lane_sum,
    load,
    maximum,
    pointer,
    splat,
    store,
    take,
)

BLOCK = 512  # values that are summed apart before their sum is added: fewer roundings, and fewer steps to search


@njit(error_model="numpy")
def _row_softmax(x, out, size, inverse):
    """Softmax of `size` floats at address `x` times `inverse`."""
    full = size - size % LANES
    values, results, largest = pointer(x), pointer(out), splat(np.float32(-np.inf))
    for i in range(0, full * 4, LANES * 4):
        largest = maximum(largest, load(x + i))
    top = lane_max(largest)
    for i in range(full, size):
        top = max(top, values[i])
    shift, scale, total = splat(top), splat(inverse), np.float32(0)
    rest = np.full(LANES, -np.inf, np.float32)
    for start in range(0, full, BLOCK):
        sums = splat(np.float32(0))
        for i in range(start * 4, min(start + BLOCK, full) * 4, LANES * 4):
            weight = exp((load(x + i) - shift) * scale)
            store(out + i, weight)
            sums = sums + weight
        total += lane_sum(sums)
    for i in range(full, size):
        rest[i - full] = values[i]
    weight = exp((load(rest.ctypes.data) - shift) * scale)
    store(rest.ctypes.data, weight)
    total += lane_sum(weight)
    for i in range(full, size):
        results[i] = rest[i - full]
    share = np.float32(1) / total
    shares = splat(share)
    for i in range(0, full * 4, LANES * 4):
        store(out + i, load(out + i) * shares)
    for i in range(full, size):
        results[i] *= share


def _softmax(a):
    x, out, size, temperatures = a[2], a[3], a[4], pointer(a[5])
    row = take(a)
    while row < a[1]:
        inverse = np.float32(1) / temperatures[row] if a[5] != 0 else np.float32(1)
        _row_softmax(x + row * size * 4, out + row * size * 4, size, inverse)
        row = take(a)


@njit(error_model="numpy")
def _block_sums(weights, size, sums):
    """Sums of blocks of weights in float64, each always added in the same order; their sum."""
    total = 0.0
    for block in range(-(-size // BLOCK)):
        a, b, c, d = 0.0, 0.0, 0.0, 0.0
        start, end = block * BLOCK, min(size, (block + 1) * BLOCK)
        for i in range(start, end - 3, 4):
            a, b, c, d = a + weights[i], b + weights[i + 1], c + weights[i + 2], d + weights[i + 3]
        for i in range(end - (end - start) % 4, end):
            a += weights[i]
        sums[block] = (a + b) + (c + d)
        total += sums[block]
    return total


@njit(error_model="numpy")
def _row_draw(weights, u, size, sums):
    """Index of the first weight at which the cumulative sum passes u times the whole."""
    point, before, found = u * _block_sums(weights, size, sums), 0.0, -1
    for block in range(-(-size // BLOCK)):
        if sums[block] > 0:
            found = block  # the last one with any weight serves a point that rounding left beyond it
            if before + sums[block] > point:
                break
            before += sums[block]
    choice = size - 1  # of a row without any weight, or of one that is not numbers
    for i in range(max(found, 0) * BLOCK, min(size, (found + 1) * BLOCK)):
        if weights[i] > 0:
            choice = i
            before += weights[i]
            if before > point:
                break
    return choice


def _draw(a):
    weights, numbers, out, size = a[2], doubles(a[3]), integers(a[4]), a[5]
    sums = np.empty(-(-size // BLOCK), np.float64)
    row = take(a)
    while row < a[1]:
        out[row] = _row_draw(pointer(weights + row * size * 4), numbers[row], size, sums)
        row = take(a)


@njit(error_model="numpy")
def _mix(x, counter):
    """`dspark_core.randomness`, in int64, which wraps; its shift brings in the sign, which the masks take off."""
    z = x + (counter + 1) * -0x61C8864680B583EB
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def _uniform(a):
    keys, rounds, out, purpose, slots = integers(a[2]), integers(a[3]), doubles(a[4]), a[5], a[6]
    row = take(a)
    while row < a[1]:
        state = _mix(_mix(_mix(keys[row], 0), rounds[row]), purpose)
        for slot in range(slots):
            out[row * slots + slot] = ((_mix(state, slot) >> 11) & 0x1FFFFFFFFFFFFF) * 2.0**-53
        row = take(a)


SOFTMAX = Kernel(_softmax)  # x, out, size of a row, temperatures or 0
UNIFORM = Kernel(_uniform)  # int64 keys, int64 rounds, float64 out, purpose, slots
DRAW = Kernel(_draw)  # weights, float64 numbers in [0, 1), int64 out, size of a row


def softmax(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Softmax of the rows of `logits` [N, V] divided by `temperature` [N]; float32, contiguous."""
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    assert temperature is None or temperature.shape == logits.shape[:1]
    out = torch.empty_like(logits)
    divisors = 0 if temperature is None else temperature.data_ptr()
    SOFTMAX(logits.shape[0], logits.data_ptr(), out.data_ptr(), logits.shape[1], divisors)
    return out


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """As `dspark_core.sampling.draw`, for float32 rows that are contiguous."""
    assert (weights.dtype, u.dtype) == (torch.float32, torch.float64)
    assert weights.is_contiguous()
    assert u.is_contiguous()
    assert u.shape == weights.shape[:1], "a number for each row"
    out = torch.empty(len(u), dtype=torch.int64)
    DRAW(weights.shape[0], weights.data_ptr(), u.data_ptr(), out.data_ptr(), weights.shape[1])
    return out


def uniform(keys: Tensor, rounds: Tensor, purpose: int, slots: int) -> Tensor:
    """`dspark_core.randomness.uniform` of keys and rounds [R], a purpose and slots 0, 1, ...: [R, slots]."""
    assert keys.is_contiguous()
    assert rounds.is_contiguous()
    assert keys.shape == rounds.shape
    out = torch.empty(len(keys), slots, dtype=torch.float64)
    UNIFORM(len(keys), keys.data_ptr(), rounds.data_ptr(), out.data_ptr(), purpose, slots)
    return out
