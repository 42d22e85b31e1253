"""The one loop that costs time: a tile of a matrix product, its sums kept in registers.

out[r, c] = start + sum over k of x[r, k] * w[k, c], each sum in the order of k with one rounding a step (FMA). So an
entry has the same bits however the rows and columns around it are cut into tiles, on whatever CPU.

The weights are float32, or smaller numbers that are turned back into float32 in registers as they are read: the kinds.
A reader of a kind is a loop over k that hands the float32 weights of each step to `step`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dspark_core.kernels.formats import BFLOAT16, FLOAT16, FLOAT32, GROUP, INT4, INT8, PANEL
from dspark_core.kernels.source.simd import (
    F32,
    I64,
    INTS,
    LANES,
    VECTOR,
    call_vector_intrinsic,
    load_value,
    splat_value,
    store_value,
)

# Registers: rows x vectors sums, and the weights. AVX-512 has 32 of 16 lanes, AVX2 16 of 8.
_WIDE = bool(dict(llvm.get_host_cpu_features()).get("avx512f"))
MAX_ROWS = 8 if _WIDE else 6
VECTORS = 2 if _WIDE else 1
COLUMNS = VECTORS * LANES

Sums = list[Any]
Step = Callable[[Any, Any, Sums, Sums], Sums]  # (builder, index of k, weights, sums) to sums


def _loop(builder: Any, count: Any, carried: Sums, body: Callable[[Any, Sums], Sums]) -> Sums:
    """Emit `for i in range(count)` around a body that replaces the carried values; count is at least 1."""
    before = builder.block
    head, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(I64(0), before)
    values = [builder.phi(value.type) for value in carried]
    for phi, value in zip(values, carried, strict=True):
        phi.add_incoming(value, before)
    results = body(index, values)
    following = builder.add(index, I64(1))
    for phi, value in zip([index, *values], [following, *results], strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), head, after)
    builder.position_at_end(after)
    return results


def _read_plain(kind: int, vectors: int) -> Callable[..., Sums]:
    """One number per weight: float32, bfloat16 or float16; rows of k are `stride` bytes apart."""
    width = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2}[kind]

    def as_float32(builder: Any, address: Any) -> Any:
        if kind == FLOAT32:
            return load_value(builder, address, VECTOR)
        if kind == FLOAT16:
            return builder.fpext(load_value(builder, address, ir.VectorType(ir.HalfType(), LANES)), VECTOR)
        upper_half = load_value(builder, address, ir.VectorType(ir.IntType(16), LANES))
        return builder.bitcast(builder.shl(builder.zext(upper_half, INTS), ir.Constant(INTS, [16] * LANES)), VECTOR)

    def read(builder: Any, address: Any, stride: Any, column: Any, count: Any, sums: Sums, step: Step) -> Sums:
        first = builder.add(address, builder.mul(column, I64(width)))

        def body(k: Any, values: Sums) -> Sums:
            row = builder.add(first, builder.mul(k, stride))
            weights = [as_float32(builder, builder.add(row, I64(v * LANES * width))) for v in range(vectors)]
            return step(builder, k, weights, values)

        return _loop(builder, count, sums, body)

    return read


def _halves(builder: Any, address: Any, column: Any, vectors: int) -> Sums:
    """Some vectors of float16 numbers as float32, from a column on."""
    kind = ir.VectorType(ir.HalfType(), LANES)
    address = builder.add(address, builder.mul(column, I64(2)))
    return [
        builder.fpext(load_value(builder, builder.add(address, I64(v * LANES * 2)), kind), VECTOR)
        for v in range(vectors)
    ]


def _read_int8(kind: int, vectors: int) -> Callable[..., Sums]:
    """Groups of 32 k: a float16 scale d for each output, then signed bytes q; w = d q."""
    codes_type = ir.VectorType(ir.IntType(8), LANES)

    def read(builder: Any, address: Any, stride: Any, column: Any, count: Any, sums: Sums, step: Step) -> Sums:

        def group(g: Any, values: Sums) -> Sums:
            base = builder.add(address, builder.mul(g, stride))
            scales = _halves(builder, base, column, vectors)
            codes = builder.add(base, builder.add(I64(PANEL * 2), column))

            def body(i: Any, inner: Sums) -> Sums:
                row = builder.add(codes, builder.mul(i, I64(PANEL)))
                weights = []
                for v in range(vectors):
                    code = load_value(builder, builder.add(row, I64(v * LANES)), codes_type)
                    weights.append(builder.fmul(builder.sitofp(builder.sext(code, INTS), VECTOR), scales[v]))
                return step(builder, builder.add(builder.mul(g, I64(GROUP)), i), weights, inner)

            return _loop(builder, I64(GROUP), values, body)

        return _loop(builder, builder.sdiv(count, I64(GROUP)), sums, group)

    return read


def _read_int4(kind: int, vectors: int) -> Callable[..., Sums]:
    """Groups of 32 k: float16 scales d, float16 minima m, then bytes of two codes, of even and odd k; w = d q + m."""
    codes_type = ir.VectorType(ir.IntType(8), LANES)

    def read(builder: Any, address: Any, stride: Any, column: Any, count: Any, sums: Sums, step: Step) -> Sums:

        def group(g: Any, values: Sums) -> Sums:
            base = builder.add(address, builder.mul(g, stride))
            scales, minima = (
                _halves(builder, builder.add(base, I64(part)), column, vectors) for part in (0, PANEL * 2)
            )
            codes = builder.add(base, builder.add(I64(PANEL * 4), column))

            def weights(whole: Sums) -> Sums:
                numbers = [builder.sitofp(number, VECTOR) for number in whole]
                return [
                    call_vector_intrinsic(builder, "fma", q, d, m)
                    for q, d, m in zip(numbers, scales, minima, strict=True)
                ]

            def body(i: Any, inner: Sums) -> Sums:
                row = builder.add(codes, builder.mul(i, I64(PANEL)))
                pairs = [
                    builder.zext(load_value(builder, builder.add(row, I64(v * LANES)), codes_type), INTS)
                    for v in range(vectors)
                ]
                even = [builder.and_(pair, ir.Constant(INTS, [15] * LANES)) for pair in pairs]
                odd = [builder.lshr(pair, ir.Constant(INTS, [4] * LANES)) for pair in pairs]
                k = builder.add(builder.mul(g, I64(GROUP)), builder.mul(i, I64(2)))
                inner = step(builder, k, weights(even), inner)
                return step(builder, builder.add(k, I64(1)), weights(odd), inner)

            return _loop(builder, I64(GROUP // 2), values, body)

        return _loop(builder, builder.sdiv(count, I64(GROUP)), sums, group)

    return read


_READERS = {
    FLOAT32: _read_plain,
    BFLOAT16: _read_plain,
    FLOAT16: _read_plain,
    INT8: _read_int8,
    INT4: _read_int4,
}


@intrinsic(prefer_literal=True)
def multiply_tile(
    context: Any, kind: Any, rows: Any, vectors: Any, onto: Any, x: Any, x_stride: Any, w: Any, w_stride: Any,
    column: Any, out: Any, out_stride: Any, count: Any,
) -> Any:  # fmt: skip
    """out[:rows, :C] = (out if `onto` else 0) + x[:rows, :count] @ w[:count, column : column + C], C = 16 vectors.

    Args:
        kind, rows, vectors, onto: numbers that the compiler knows.
        x, w, out: addresses; strides are bytes from row to row, of `w` from k to k (from group to group for integers).
    """
    num_rows, width, start_from_out = rows.literal_value, vectors.literal_value, onto.literal_value
    read = _READERS[kind.literal_value](kind.literal_value, width)

    def build(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        *_, x, x_stride, w, w_stride, column, out, out_stride, count = args
        row_of_x = [builder.add(x, builder.mul(I64(r), x_stride)) for r in range(num_rows)]
        places = [
            builder.add(builder.add(out, builder.mul(I64(r), out_stride)), I64(v * LANES * 4))
            for r in range(num_rows)
            for v in range(width)
        ]

        def step(builder: Any, k: Any, weights: Sums, sums: Sums) -> Sums:
            offset, results = builder.mul(k, I64(4)), []
            for r in range(num_rows):
                value = splat_value(builder, load_value(builder, builder.add(row_of_x[r], offset), F32))
                results += [
                    call_vector_intrinsic(builder, "fma", value, weights[v], sums[r * width + v]) for v in range(width)
                ]
            return results

        zero = ir.Constant(VECTOR, [0.0] * LANES)
        start = [load_value(builder, place, VECTOR) if start_from_out else zero for place in places]
        for place, value in zip(places, read(builder, w, w_stride, column, count, start, step), strict=True):
            store_value(builder, place, value)
        return ctx.get_dummy_value()

    return types.void(kind, rows, vectors, onto, *[types.int64] * 8), build


@intrinsic(prefer_literal=True)
def unpack_tile(
    context: Any, kind: Any, w: Any, w_stride: Any, column: Any, out: Any, out_stride: Any, count: Any
) -> Any:
    """out[:count, :COLUMNS] = the float32 values of w[:count, column : column + COLUMNS]."""
    read = _READERS[kind.literal_value](kind.literal_value, VECTORS)

    def build(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        _, w, w_stride, column, out, out_stride, count = args

        def step(builder: Any, k: Any, weights: Sums, sums: Sums) -> Sums:
            row = builder.add(out, builder.mul(k, out_stride))
            for v, weight in enumerate(weights):
                store_value(builder, builder.add(row, I64(v * LANES * 4)), weight)
            return sums

        read(builder, w, w_stride, column, count, [], step)
        return ctx.get_dummy_value()

    return types.void(kind, *[types.int64] * 6), build
