"""Products of activations with packed weights: x [N, K] times W [outputs, K] transposed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from dspark_core.kernels.formats import FLOAT32, GROUP, GROUP_BYTES, GROUPED, NAMES, PANEL
from dspark_core.kernels.source.names import named
from dspark_core.kernels.source.simd import allocate, array, pointer, release, room, take
from dspark_core.kernels.source.tile import COLUMNS, MAX_ROWS, VECTORS, multiply_tile, unpack_tile

ROW_BLOCK = 64  # rows whose sums wait in the cache for the rest of the work on them
# From so many rows on a panel is turned into float32 once, instead of in registers for every tile of rows.
UNPACK_ROWS = 3 * MAX_ROWS
STRIDE = PANEL * 4  # bytes of a row of a float32 panel


# Bytes from k to k of a panel, or from group to group.
W_STRIDE = {kind: size if kind in GROUPED else size // GROUP for kind, size in GROUP_BYTES.items()}


def _tile(kind: int) -> Any:
    """x [rows, count] times some columns of a panel of a kind, for 1 to 8 rows."""
    stride = W_STRIDE[kind]

    def multiply(rows, x, x_stride, w, column, out, count):
        if rows == 8:
            multiply_tile(kind, 8, VECTORS, 0, x, x_stride, w, stride, column, out, STRIDE, count)
        elif rows == 7:
            multiply_tile(kind, 7, VECTORS, 0, x, x_stride, w, stride, column, out, STRIDE, count)
        elif rows == 6:
            multiply_tile(kind, 6, VECTORS, 0, x, x_stride, w, stride, column, out, STRIDE, count)
        elif rows == 5:
            multiply_tile(kind, 5, VECTORS, 0, x, x_stride, w, stride, column, out, STRIDE, count)
        elif rows == 4:
            multiply_tile(kind, 4, VECTORS, 0, x, x_stride, w, stride, column, out, STRIDE, count)
        elif rows == 3:
            multiply_tile(kind, 3, VECTORS, 0, x, x_stride, w, stride, column, out, STRIDE, count)
        elif rows == 2:
            multiply_tile(kind, 2, VECTORS, 0, x, x_stride, w, stride, column, out, STRIDE, count)
        else:
            multiply_tile(kind, 1, VECTORS, 0, x, x_stride, w, stride, column, out, STRIDE, count)

    return njit(error_model="numpy")(named(multiply, f"tile_{NAMES[kind]}"))


def _panel_product(kind: int) -> Any:
    """x [rows, count] times one panel of a kind into `out` [rows, PANEL]; addresses, strides in bytes."""
    tile = _tile(kind)

    def multiply(x, x_stride, w, out, rows, count):
        for done in range(0, rows, MAX_ROWS):
            row, place = x + done * x_stride, out + done * STRIDE
            for column in range(0, PANEL, COLUMNS):
                tile(min(rows - done, MAX_ROWS), row, x_stride, w, column, place + column * 4, count)

    return njit(error_model="numpy")(named(multiply, f"multiply_{NAMES[kind]}"))


@njit(error_model="numpy")
def _finish(sums, out, bias, residual, rows, outputs, first):
    """Add bias and residual (addresses, 0 for none) to a panel's sums and store them at column `first` of `out`."""
    width = min(PANEL, outputs - first)
    for r in range(rows):
        row = (r * outputs + first) * 4
        target = pointer(out + row)
        if bias != 0:
            added = pointer(bias + first * 4)
            for c in range(width):
                sums[r, c] += added[c]
        if residual != 0:
            added = pointer(residual + row)
            for c in range(width):
                sums[r, c] += added[c]
        for c in range(width):
            target[c] = sums[r, c]


_PANEL_PRODUCTS = {kind: _panel_product(kind) for kind in GROUP_BYTES}


def _kernel(kind: int) -> Callable[[Any], None]:
    group_bytes, stride = GROUP_BYTES[kind], W_STRIDE[kind]
    multiply, multiply_float32 = _PANEL_PRODUCTS[kind], _PANEL_PRODUCTS[FLOAT32]

    def matmul(a):
        tasks, x, x_stride, w, bias, residual, out, rows, count, outputs = (
            a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]
        )  # fmt: skip
        panels, panel_bytes = -(-outputs // PANEL), count * group_bytes // GROUP
        unpack = kind != FLOAT32 and rows >= UNPACK_ROWS
        first = room(ROW_BLOCK * PANEL)
        memory = allocate(first + room((count if unpack else 1) * PANEL))
        if memory == 0:
            return
        sums = array(memory, (ROW_BLOCK, PANEL))
        unpacked = array(memory + first, (count if unpack else 1, PANEL))
        task = take(a)
        while task < tasks:
            for number in range(panels * task // tasks, panels * (task + 1) // tasks):
                panel = w + number * panel_bytes
                if unpack:
                    for column in range(0, PANEL, COLUMNS):
                        unpack_tile(kind, panel, stride, column, unpacked.ctypes.data + column * 4, STRIDE, count)
                for start in range(0, rows, ROW_BLOCK):
                    size, block = min(ROW_BLOCK, rows - start), x + start * x_stride
                    if unpack:
                        multiply_float32(block, x_stride, unpacked.ctypes.data, sums.ctypes.data, size, count)
                    else:
                        multiply(block, x_stride, panel, sums.ctypes.data, size, count)
                    skip = start * outputs * 4
                    own = residual + skip if residual != 0 else 0
                    _finish(sums, out + skip, bias, own, size, outputs, number * PANEL)
            task = take(a)
        release(memory)

    return named(matmul, f"matmul_{NAMES[kind]}")


KERNELS = {f"matmul_{NAMES[kind]}": _kernel(kind) for kind in GROUP_BYTES}
