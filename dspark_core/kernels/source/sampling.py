"""What sampling is made of: the softmax of wide rows, a row a task, and random numbers."""

from __future__ import annotations

import numpy as np
from numba import njit

from dspark_core.kernels.source.simd import (
    LANES,
    allocate,
    array,
    doubles,
    exp,
    integers,
    lane_max,
    lane_sum,
    load,
    maximum,
    pointer,
    release,
    room,
    splat,
    store,
    take,
)

BLOCK = 512  # values that are summed apart before their sum is added: fewer roundings, and fewer steps to search


@njit
def block_count(size):
    return -(-size // BLOCK)


@njit
def row_room(size):
    """Bytes that a kernel needs to go through rows of `size` values."""
    return room(2 * block_count(size)) + 2 * room(LANES)


@njit
def row_memory(memory, size):
    """At the address of so many bytes: a float64 for each block of a row, and two vectors."""
    vectors = memory + room(2 * block_count(size))
    return doubles(memory), array(vectors, LANES), array(vectors + room(LANES), LANES)


@njit
def tail(x, i, size, spare):
    """The floats of a row at address `x` from place `i` to its end, then minus infinity. `spare`: memory for 16."""
    row = pointer(x)
    for j in range(LANES):
        spare[j] = row[i + j] if i + j < size else np.float32(-np.inf)
    return load(spare.ctypes.data)


@njit
def weighed(found, row):
    """exp((value - shift) * scale) * share of 16 values of a row (address, shift, scale, share)."""
    return exp((found - splat(row[1])) * splat(row[2])) * splat(row[3])


@njit(error_model="numpy")
def normalised(x, size, inverse, spare):
    """A row at address `x` with what makes its weights the softmax of its values times `inverse`.

    Its largest value becomes 0 first, so that tiny temperatures lose no digits.
    """
    full, largest = size - size % LANES, splat(np.float32(-np.inf))
    for i in range(0, full, LANES):
        largest = maximum(largest, load(x + i * 4))
    if full < size:
        largest = maximum(largest, tail(x, full, size, spare))
    row, total = (x, lane_max(largest), inverse, np.float32(1)), 0.0
    for start in range(0, full, BLOCK):
        sums = splat(np.float32(0))
        for i in range(start, min(start + BLOCK, full), LANES):
            sums = sums + weighed(load(x + i * 4), row)
        total += lane_sum(sums)
    if full < size:
        total += lane_sum(weighed(tail(x, full, size, spare), row))
    return x, row[1], inverse, np.float32(1 / total)


@njit(error_model="numpy")
def inverse_of(temperatures, row):
    """1 / temperature of a row; the address 0 stands for 1 everywhere."""
    return np.float32(1) / pointer(temperatures)[row] if temperatures != 0 else np.float32(1)


def _softmax(a):
    x, out, size = a[2], a[3], a[4]
    memory = allocate(row_room(size))
    if memory == 0:
        return
    _, spare, _ = row_memory(memory, size)
    row = take(a)
    while row < a[1]:
        own, target = normalised(x + row * size * 4, size, inverse_of(a[5], row), spare), out + row * size * 4
        full = size - size % LANES
        for i in range(0, full, LANES):
            store(target + i * 4, weighed(load(own[0] + i * 4), own))
        if full < size:
            store(spare.ctypes.data, weighed(tail(own[0], full, size, spare), own))
            for i in range(full, size):
                pointer(target)[i] = spare[i - full]
        row = take(a)
    release(memory)


@njit(error_model="numpy")
def mix(x, counter):
    """`dspark_core.randomness`, in int64, which wraps; its shift brings in the sign, which the masks take off."""
    z = x + (counter + 1) * -0x61C8864680B583EB
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def _uniform(a):
    keys, rounds, out, purpose, slots = integers(a[2]), integers(a[3]), doubles(a[4]), a[5], a[6]
    row = take(a)
    while row < a[1]:
        state = mix(mix(mix(keys[row], 0), rounds[row]), purpose)
        for slot in range(slots):
            out[row * slots + slot] = ((mix(state, slot) >> 11) & 0x1FFFFFFFFFFFFF) * 2.0**-53
        row = take(a)


KERNELS = {"softmax": _softmax, "uniform": _uniform}
