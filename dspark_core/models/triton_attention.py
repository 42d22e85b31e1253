"""Attention over pages on CUDA, in Triton: one program for each tile and head, as `attention.tiles_of` cuts the work.

The same running softmax as the CPU kernel. Runs under Triton's interpreter too (TRITON_INTERPRET=1), which is how it is
tested where there is no GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_core.kernels import TILE_ROWS
from dspark_core.models.kv_cache import KVPool


@triton.jit
def _attend(
    queries, keys, values, out, tiles, tables, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    PAGE_HEADS: tl.constexpr, TILE_FIELDS: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Queries and out [N, H, d]; keys [.., KV, d, page], values [.., KV, page, width] of one layer.

    PAGE_HEADS: heads from page to page, those of all layers.
    """
    tile, head = tl.program_id(0) * TILE_FIELDS, tl.program_id(1)
    first, rows, limit = tl.load(tiles + tile), tl.load(tiles + tile + 1), tl.load(tiles + tile + 2)
    step, table = tl.load(tiles + tile + 3), tl.load(tiles + tile + 4)
    group: tl.constexpr = HEADS // KV_HEADS
    line, column, offset = tl.arange(0, LINES), tl.arange(0, COLUMNS), tl.arange(0, PAGE)
    row = line // group
    places = ((first + row) * HEADS + head * group + line % group) * DIM
    inside = (row < rows)[:, None] & (column < DIM)[None, :]
    q = tl.load(queries + places[:, None] + column[None, :], mask=inside, other=0.0)
    limits = limit + step * row
    top = tl.full((LINES,), float("-inf"), tl.float32)
    weights = tl.zeros((LINES,), tl.float32)
    sums = tl.zeros((LINES, COLUMNS), tl.float32)
    last = limit + step * (rows - 1)
    pages = tl.where(rows > 0, last // PAGE + 1, 0)
    for number in range(pages):
        page = tl.load(tables + table + number) * PAGE_HEADS + head
        k_places = page * DIM * PAGE + column[:, None] * PAGE + offset[None, :]
        k = tl.load(keys + k_places, mask=(column < DIM)[:, None], other=0.0)
        position = number * PAGE + offset
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(position[None, :] <= limits[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp(scores - new_top[:, None])
        rescale = tl.exp(top - new_top)
        weights = weights * rescale + tl.sum(p, 1)
        v_places = page * PAGE * WIDTH + offset[:, None] * WIDTH + column[None, :]
        # Keys behind the tile's last row may be anything, NaN too: 0 * NaN would be NaN.
        v = tl.load(values + v_places, mask=(position <= last)[:, None] & (column < DIM)[None, :], other=0.0)
        sums = sums * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = new_top
    result = sums / tl.where(weights > 0, weights, 1.0)[:, None]  # a tile of no rows has no weights
    tl.store(out + places[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=inside)


def attend(queries: Tensor, pool: KVPool, layer: int, tiles: Tensor, tables: Tensor) -> Tensor:
    """Attention outputs [N, H, head_dim].

    Args:
        queries: [N, H, head_dim], rotated, contiguous.
        tiles, tables: as `attention.tiles_of` makes them, on the device; a tile of 0 rows does nothing.
    """
    keys, values = pool.keys[:, layer], pool.values[:, layer]
    heads, dim = queries.shape[1:]
    _, kv_heads, _, page_size = keys.shape
    out = torch.empty_like(queries)
    lines = triton.next_power_of_2(max(16, TILE_ROWS * (heads // kv_heads)))
    _attend[tiles.shape[0], kv_heads](
        queries, keys, values, out, tiles, tables, dim**-0.5, heads, kv_heads, dim, values.shape[-1], page_size,
        pool.keys.shape[1] * kv_heads, tiles.shape[1], lines, triton.next_power_of_2(max(16, dim)),
    )  # fmt: skip
    return out
