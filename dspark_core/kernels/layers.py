"""Kernels of a decoder's layers, by name, and what they take.

All arguments are int64; addresses are of contiguous float32 arrays unless said otherwise.
"""

from __future__ import annotations

from dspark_core.kernels import ROWS_PER_TASK
from dspark_core.kernels.launch import Kernel

# Tasks: tiles x KV heads. Arguments: rows that begin with the queries, bytes from row to row, out [N, H * d], tiles
# [T, TILE_FIELDS] (int64), page tables one after the other (int64), heads, KV heads, head_dim, page size, width of a
# value, pool of keys, pool of values, layers, layer, address of the scale of the scores
ATTEND = Kernel("attend")
RMS_NORM = Kernel("rms_norm")  # x, weight, out (may be x), rows, size, address of eps
# qkv, cosines, signed sines, positions (int64), slots (int64), rows, heads (0: keys and values only), KV heads,
# head_dim, page size, width of a value, pool of keys, pool of values, layers, layer, query norm or 0, key norm or 0,
# address of eps
ROTATE_AND_STORE = Kernel("rotate_and_store")
SILU_MUL = Kernel("silu_mul")  # gates and ups side by side, out, rows, size
# Tasks: rows. Arguments: int64 ids (below 0: the first row), table [V, size], out [rows, size], size
GATHER_ROWS = Kernel("gather_rows")
COPY_COLUMNS = Kernel("copy_columns")  # x, out, rows, size, bytes from row to row of out, bytes to the first column


def row_tasks(rows: int) -> int:
    """Into how many tasks kernels over rows are cut, unless they say otherwise above."""
    return -(-rows // ROWS_PER_TASK)
