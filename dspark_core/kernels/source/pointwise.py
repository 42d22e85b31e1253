"""The small steps between matrix products, row by row: norm, rotation with storing of keys and values, gating.

A row's result depends on that row alone, by construction.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from dspark_core.kernels import ROWS_PER_TASK
from dspark_core.kernels.source.simd import (
    LANES,
    allocate,
    array,
    exp,
    fma,
    integers,
    lane_sum,
    load,
    pointer,
    release,
    room,
    splat,
    store,
    take,
)


@njit(error_model="numpy")
def _norm(x, weight, out, size, eps):
    """RMS norm of `size` floats at address `x` into `out`, which may be the same."""
    full = size - size % LANES
    squares = splat(np.float32(0.0))
    for i in range(0, full, LANES):
        part = load(x + i * 4)
        squares = fma(part, part, squares)
    total, values, target, factors = lane_sum(squares), pointer(x), pointer(out), pointer(weight)
    for i in range(full, size):
        total += values[i] * values[i]
    scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        target[i] = values[i] * scale * factors[i]


def _rms_norm(a):
    x, weight, out, rows, size, eps = a[2], a[3], a[4], a[5], a[6], pointer(a[7])[0]
    task = take(a)
    while task < a[1]:
        for row in range(task * ROWS_PER_TASK, min(rows, (task + 1) * ROWS_PER_TASK)):
            _norm(x + row * size * 4, weight, out + row * size * 4, size, eps)
        task = take(a)


@njit(error_model="numpy")
def _rotate(x, cos, sin, size):
    """Rotate one head at address `x` in place, by tables of `size` floats (half-split layout, signed sines)."""
    values, cosines, sines, half = pointer(x), pointer(cos), pointer(sin), size // 2
    for i in range(half):
        first, second = values[i], values[i + half]
        values[i] = second * sines[i] + first * cosines[i]
        values[i + half] = first * sines[i + half] + second * cosines[i + half]


@njit(error_model="numpy")
def _store_head(keys, values, key, value, place, offset, shape):
    """Put a key and a value of one head at `offset` of a page. `shape`: heads, head_dim, page size, value width."""
    _, head_dim, page_size, width = shape
    source, target = pointer(key), pointer(keys + place * head_dim * page_size * 4)
    for i in range(head_dim):
        target[i * page_size + offset] = source[i]
    source = pointer(value)
    target = pointer(values + (place * page_size + offset) * width * 4)
    for i in range(head_dim):
        target[i] = source[i]


@njit(error_model="numpy")
def layer_address(a, first, shape):
    """Addresses of one layer's keys and values in page 0, and heads from page to page.

    From argument `first` on come both pools, the number of layers and the layer.
    """
    kv_heads, head_dim, page_size, width = shape
    rows = a[first + 3] * kv_heads * page_size * 4
    return a[first] + rows * head_dim, a[first + 1] + rows * width, a[first + 2] * kv_heads


def _rotate_and_store(a):
    x, cos, sin, positions, slots, rows = a[2], a[3], a[4], integers(a[5]), integers(a[6]), a[7]
    heads, shape = a[8], (a[9], a[10], a[11], a[12])
    keys, values, page_heads = layer_address(a, 13, shape)
    q_weight, k_weight, eps = a[17], a[18], pointer(a[19])[0]
    kv_heads, dim, page_size, _ = shape
    task = take(a)
    while task < a[1]:
        for row in range(task * ROWS_PER_TASK, min(rows, (task + 1) * ROWS_PER_TASK)):
            start = x + row * (heads + 2 * kv_heads) * dim * 4
            angle = positions[row] * dim * 4
            for head in range(heads + kv_heads):
                place, weight = start + head * dim * 4, q_weight if head < heads else k_weight
                if weight != 0:
                    _norm(place, weight, place, dim, eps)
                _rotate(place, cos + angle, sin + angle, dim)
            page, offset = slots[row] // page_size, slots[row] % page_size
            for head in range(kv_heads):
                key = start + (heads + head) * dim * 4
                _store_head(keys, values, key, key + kv_heads * dim * 4, page * page_heads + head, offset, shape)
        task = take(a)


def _silu_mul(a):
    gate_up, out, rows, size = a[2], a[3], a[4], a[5]
    memory = allocate(room(2 * LANES))
    if memory == 0:
        return
    rest, one = array(memory, 2 * LANES), splat(np.float32(1.0))
    rest[:] = 0
    task = take(a)
    while task < a[1]:
        for row in range(task * ROWS_PER_TASK, min(rows, (task + 1) * ROWS_PER_TASK)):
            gate, target = gate_up + row * 2 * size * 4, out + row * size * 4
            up = gate + size * 4
            full = size - size % LANES
            for i in range(0, full * 4, LANES * 4):
                x = load(gate + i)
                store(target + i, x / (one + exp(splat(np.float32(0.0)) - x)) * load(up + i))
            for i in range(full, size):  # the same operations, through a vector of their own
                rest[i - full], rest[LANES + i - full] = pointer(gate)[i], pointer(up)[i]
            if full < size:
                x = load(rest.ctypes.data)
                gated = x / (one + exp(splat(np.float32(0.0)) - x)) * load(rest.ctypes.data + LANES * 4)
                store(rest.ctypes.data, gated)
                for i in range(full, size):
                    pointer(target)[i] = rest[i - full]
        task = take(a)
    release(memory)


def _copy_columns(a):
    """Copy rows [rows, size] to columns of a wider array, whose rows are `stride` bytes apart."""
    x, out, rows, size, stride = a[2], a[3] + a[7], a[4], a[5], a[6]
    task = take(a)
    while task < a[1]:
        for row in range(task * ROWS_PER_TASK, min(rows, (task + 1) * ROWS_PER_TASK)):
            source, target = pointer(x + row * size * 4), pointer(out + row * stride)
            for i in range(size):
                target[i] = source[i]
        task = take(a)


def _gather_rows(a):
    ids, table, out, size = integers(a[2]), a[3], a[4], a[5]
    task = take(a)
    while task < a[1]:
        source, target = pointer(table + max(ids[task], 0) * size * 4), pointer(out + task * size * 4)
        for i in range(size):
            target[i] = source[i]
        task = take(a)


KERNELS = {
    "gather_rows": _gather_rows,
    "rms_norm": _rms_norm,
    "rotate_and_store": _rotate_and_store,
    "silu_mul": _silu_mul,
    "copy_columns": _copy_columns,
}
