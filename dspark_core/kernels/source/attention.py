"""Attention of a flat batch over pages of keys and values, read where they lie.

Work is cut into tiles of query rows and key-value heads. A tile goes through the pages of its request in order with a
running softmax (Milakov and Gimelshein 2018; FlashAttention, arXiv 2205.14135). What a row computes depends on its own
pages and limit alone: later pages add exact zeros, so the tiling may be anything.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from dspark_core.kernels import TILE_FIELDS, TILE_ROWS
from dspark_core.kernels.formats import FLOAT32
from dspark_core.kernels.source.names import named
from dspark_core.kernels.source.pointwise import layer_address
from dspark_core.kernels.source.simd import (
    LANES,
    allocate,
    array,
    exp,
    fma,
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
from dspark_core.kernels.source.tile import MAX_ROWS, multiply_tile


def _product(onto: int) -> Any:
    """A function: out = (out if `onto` else 0) + x [rows, count] @ w [count, columns].

    Columns are a multiple of 16, strides bytes.
    """

    def multiply(x, x_stride, w, w_stride, out, out_stride, rows, columns, count):
        done = 0
        while done < rows:
            left = min(rows - done, MAX_ROWS)
            row, place = x + done * x_stride, out + done * out_stride
            for column in range(0, columns, LANES):
                to = place + column * 4
                if left >= 8:
                    multiply_tile(FLOAT32, 8, 1, onto, row, x_stride, w, w_stride, column, to, out_stride, count)
                elif left >= 6:
                    multiply_tile(FLOAT32, 6, 1, onto, row, x_stride, w, w_stride, column, to, out_stride, count)
                elif left >= 3:
                    multiply_tile(FLOAT32, 3, 1, onto, row, x_stride, w, w_stride, column, to, out_stride, count)
                else:
                    multiply_tile(FLOAT32, 1, 1, onto, row, x_stride, w, w_stride, column, to, out_stride, count)
            done += left if left == 8 else (6 if left >= 6 else (3 if left >= 3 else 1))

    return njit(error_model="numpy")(named(multiply, f"attention_product_{onto}"))


_new_product, _add_product = _product(0), _product(1)


@njit(error_model="numpy")
def _softmax_page(scores, visible, size, top, weights, sums, width):
    """Turn one row's scores of a page into weights, and rescale what was summed before.

    Args:
        scores: address of `size` scores, of which the first `visible` count; they become exp(score - largest so far).
        top: the largest score of earlier pages; the new one is returned.
        weights: address of 16 partial sums of the weights.
        sums: address of the `width` sums of weighted values.
    """
    row = pointer(scores)
    for i in range(max(visible, 0), size):
        row[i] = -np.inf
    largest = splat(top)
    for i in range(0, size * 4, LANES * 4):
        largest = maximum(largest, load(scores + i))
    new_top = lane_max(largest)
    shift, total = splat(new_top), splat(np.float32(0.0))
    for i in range(0, size * 4, LANES * 4):
        weight = exp(load(scores + i) - shift)
        store(scores + i, weight)
        total = total + weight
    rescale = exp(splat(top) - shift)
    store(weights, fma(load(weights), rescale, total))
    for i in range(0, width * 4, LANES * 4):
        store(sums + i, load(sums + i) * rescale)
    return new_top


@njit(error_model="numpy")
def _gather_queries(queries, row, rows, stride, first_head, group, dim, scale, lines):
    """Scaled queries of `rows` rows and `group` heads, side by side in `lines` [rows * group, dim]."""
    for r in range(rows):
        source = pointer(queries + (row + r) * stride + first_head * dim * 4)
        for i in range(group * dim):
            lines[r * group * dim + i] = source[i] * scale


def _attend(a):
    queries, stride, out, tiles, tables = a[2], a[3], a[4], integers(a[5]), integers(a[6])
    heads, kv_heads, dim, size, width = a[7], a[8], a[9], a[10], a[11]
    keys, values, page_heads = layer_address(a, 12, (kv_heads, dim, size, width))
    scale = pointer(a[16])[0]
    group = heads // kv_heads
    most = TILE_ROWS * group
    place_scores = room(most * dim)
    place_sums = place_scores + room(most * size)
    place_weights = place_sums + room(most * width)
    place_tops = place_weights + room(most * LANES)
    memory = allocate(place_tops + room(most))
    if memory == 0:
        return
    lines, scores = array(memory, most * dim), array(memory + place_scores, (most, size))
    sums, weights = array(memory + place_sums, (most, width)), array(memory + place_weights, (most, LANES))
    tops = array(memory + place_tops, most)
    task = take(a)
    while task < a[1]:
        tile, head = task // kv_heads * TILE_FIELDS, task % kv_heads
        row, rows, limit, step, table = (
            tiles[tile], tiles[tile + 1], tiles[tile + 2], tiles[tile + 3], tiles[tile + 4]
        )  # fmt: skip
        count, last = rows * group, limit + step * (rows - 1)
        _gather_queries(queries, row, rows, stride, head * group, group, dim, scale, lines)
        sums[:count], weights[:count], tops[:count] = 0, 0, -np.inf
        for number in range(last // size + 1):
            place = (tables[table + number] * page_heads + head) * size * 4
            used = min(size, last + 1 - number * size)
            _new_product(
                lines.ctypes.data, dim * 4, keys + place * dim, size * 4, scores.ctypes.data, size * 4, count, size, dim
            )
            for line in range(count):
                visible = limit + step * (line // group) + 1 - number * size
                tops[line] = _softmax_page(
                    scores.ctypes.data + line * size * 4, visible, size, tops[line],
                    weights.ctypes.data + line * LANES * 4, sums.ctypes.data + line * width * 4, width,
                )  # fmt: skip
            _add_product(
                scores.ctypes.data, size * 4, values + place * width, width * 4, sums.ctypes.data, width * 4, count,
                width, used,
            )  # fmt: skip
        for line in range(count):
            total = lane_sum(load(weights.ctypes.data + line * LANES * 4))
            head_of = head * group + line % group
            target = pointer(out + ((row + line // group) * heads + head_of) * dim * 4)
            for i in range(dim):
                target[i] = sums[line, i] / total
        task = take(a)
    release(memory)


KERNELS = {"attend": _attend}
