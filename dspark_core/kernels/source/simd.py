"""Vectors of 16 float32 values for Numba functions, and memory by address.

What is written with them is compiled to exactly those vector instructions on every CPU (LLVM splits 16 lanes into
registers of 8 or 4 where there are no longer ones). Nothing is re-ordered or fused behind our back, so a result is a
function of the inputs alone: not of the CPU, of the threads or of what else is computed in the same call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

LANES = 16
LINE = 64  # bytes of a cache line
F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(F32, LANES)
INTS = ir.VectorType(I32, LANES)


class _Floats(types.Type):
    def __init__(self) -> None:
        super().__init__("float32x16")


floats = _Floats()
register_model(_Floats)(lambda manager, kind: models.PrimitiveModel(manager, kind, VECTOR))


def call_vector_intrinsic(builder: Any, name: str, *args: Any) -> Any:
    """Call LLVM's intrinsic of this name on vectors of 16 floats."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * len(args))
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32")
    return builder.call(function, args)


def splat_value(builder: Any, value: Any) -> Any:
    """All lanes the same."""
    nothing = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(nothing, value, I32(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(INTS, [0] * LANES))


def load_value(builder: Any, address: Any, kind: Any) -> Any:
    """Read from an address (int64) that need not be aligned to the vector."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def store_value(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


@intrinsic
def load(context: Any, address: Any) -> Any:
    """The 16 floats at an address."""
    return floats(types.int64), lambda ctx, builder, sig, args: load_value(builder, args[0], VECTOR)


@intrinsic
def store(context: Any, address: Any, vector: Any) -> Any:
    """Write 16 floats to an address."""

    def build(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        store_value(builder, args[0], args[1])
        return ctx.get_dummy_value()

    return types.void(types.int64, floats), build


@intrinsic
def splat(context: Any, value: Any) -> Any:
    """A float32 in every lane."""
    return floats(types.float32), lambda ctx, builder, sig, args: splat_value(builder, args[0])


@intrinsic
def lane(context: Any, vector: Any, index: Any) -> Any:
    """One lane as a float32."""
    return types.float32(floats, types.int64), lambda ctx, builder, sig, args: builder.extract_element(*args)


@intrinsic
def fma(context: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    return floats(floats, floats, floats), lambda ctx, builder, sig, args: call_vector_intrinsic(builder, "fma", *args)


@intrinsic
def maximum(context: Any, x: Any, y: Any) -> Any:
    return floats(floats, floats), lambda ctx, builder, sig, args: call_vector_intrinsic(builder, "maxnum", *args)


@intrinsic
def rounded(context: Any, x: Any) -> Any:
    """The nearest whole numbers."""
    return floats(floats), lambda ctx, builder, sig, args: call_vector_intrinsic(builder, "rint", *args)


@intrinsic
def times_power_of_two(context: Any, x: Any, n: Any) -> Any:
    """x * 2^n for whole n from -126 to 127 (no NaN) and x near 1; a NaN in x stays one."""

    def build(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        shifted = builder.shl(builder.fptosi(args[1], INTS), ir.Constant(INTS, [23] * LANES))
        return builder.bitcast(builder.add(builder.bitcast(args[0], INTS), shifted), VECTOR)

    return floats(floats, floats), build


@intrinsic
def where_less(context: Any, x: Any, bound: Any, then: Any, otherwise: Any) -> Any:
    """Lane by lane: `then` if x < bound, else `otherwise` (also for NaN)."""

    def build(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return floats(floats, floats, floats, floats), build


def _operator(python: Any, instruction: str) -> None:
    @intrinsic
    def binary(context: Any, x: Any, y: Any) -> Any:
        return floats(floats, floats), lambda ctx, builder, sig, args: getattr(builder, instruction)(*args)

    @overload(python, strict=False)
    def typed(x: Any, y: Any) -> Callable[..., Any] | None:
        return (lambda x, y: binary(x, y)) if x is floats and y is floats else None


_operator(operator.add, "fadd")
_operator(operator.sub, "fsub")
_operator(operator.mul, "fmul")
_operator(operator.truediv, "fdiv")


@intrinsic
def pointer(context: Any, address: Any) -> Any:
    """An address as a pointer to float32, to be indexed."""
    return types.CPointer(types.float32)(types.int64), lambda ctx, builder, sig, args: builder.inttoptr(
        args[0], F32.as_pointer()
    )


@intrinsic
def doubles(context: Any, address: Any) -> Any:
    """An address as a pointer to float64, to be indexed."""
    return types.CPointer(types.float64)(types.int64), lambda ctx, builder, sig, args: builder.inttoptr(
        args[0], ir.DoubleType().as_pointer()
    )


@intrinsic
def integers(context: Any, address: Any) -> Any:
    """An address as a pointer to int64, to be indexed."""
    return types.CPointer(types.int64)(types.int64), lambda ctx, builder, sig, args: builder.inttoptr(
        args[0], I64.as_pointer()
    )


@intrinsic
def take(context: Any, counter: Any) -> Any:
    """Add one to the int64 that a pointer names, atomically; what it was before."""

    def build(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", args[0], I64(1), "monotonic")

    return types.int64(types.CPointer(types.int64)), build


@intrinsic
def allocate(context: Any, size: Any) -> Any:
    """Address of so many bytes of fresh memory, 0 if there is none. To be given to `release`."""

    def build(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I64, [I64]), "malloc")
        return builder.call(function, args)

    return types.int64(types.int64), build


@intrinsic
def release(context: Any, address: Any) -> Any:
    """Give back what `allocate` gave."""

    def build(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "free"), args)
        return ctx.get_dummy_value()

    return types.void(types.int64), build


@intrinsic
def call_kernel(context: Any, function: Any, numbers: Any) -> Any:
    """Call the kernel at an address with the address of its numbers."""

    def build(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64.as_pointer()])
        target = builder.inttoptr(args[0], kind.as_pointer())
        builder.call(target, [builder.inttoptr(args[1], I64.as_pointer())])
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), build


@intrinsic
def call_barrier(context: Any, function: Any) -> Any:
    """Call the function without arguments at an address."""

    def build(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.call(builder.inttoptr(args[0], ir.FunctionType(ir.VoidType(), []).as_pointer()), [])
        return ctx.get_dummy_value()

    return types.void(types.int64), build


@njit
def room(size):
    """Bytes of an array of `size` floats that `array` may put at any address: whole cache lines, and one to spare."""
    return (size * 4 + LINE - 1) // LINE * LINE + LINE


@njit
def array(address, shape):
    """Floats at the next cache line from an address on, as an array of this shape."""
    return carray(pointer(address + -address % LINE), shape)


@njit
def lane_sum(x):
    """Sum of the lanes, always added in this order."""
    total = lane(x, 0)
    for i in range(1, 16):
        total += lane(x, i)
    return total


@njit
def lane_max(x):
    largest = lane(x, 0)
    for i in range(1, 16):
        largest = max(largest, lane(x, i))
    return largest


@njit
def exp(x):
    """e^x to about one unit in the last place; 0 below -87, at most e^88.

    x = n ln 2 + r with |r| <= ln 2 / 2; e^r from its series to the seventh power (the rest is below 1e-8).
    """
    zero, low, high = splat(0.0), splat(-87.0), splat(88.0)
    inside = where_less(x, low, low, where_less(high, x, high, x))
    finite = where_less(splat(-88.0), inside, inside, zero)  # 0 for a NaN, which stays one in r
    n = rounded(finite * splat(1.4426950408889634))
    r = fma(n, splat(-0.693359375), inside)  # ln 2 in two parts, the first with few bits
    r = fma(n, splat(2.12194440e-4), r)
    p = splat(1.0 / 5040)
    p = fma(p, r, splat(1.0 / 720))
    p = fma(p, r, splat(1.0 / 120))
    p = fma(p, r, splat(1.0 / 24))
    p = fma(p, r, splat(1.0 / 6))
    p = fma(p, r, splat(0.5))
    p = fma(p, r, splat(1.0))
    p = fma(p, r, splat(1.0))
    return where_less(x, low, zero, times_power_of_two(p, n))
