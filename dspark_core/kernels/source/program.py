"""Kernels one after the other, without Python between them."""

from __future__ import annotations

from dspark_core.kernels import ADDRESS, COUNTER, WIDTH
from dspark_core.kernels.source.simd import call_barrier, call_kernel, integers


def _run_program(a):
    """Arguments: address of the instructions, their number, address of the barrier (0: one thread)."""
    instructions, barrier = a[2], a[4]
    for number in range(a[3]):
        instruction = instructions + number * WIDTH * 8
        call_kernel(integers(instruction)[ADDRESS], instruction + COUNTER * 8)
        if barrier != 0:
            call_barrier(barrier)


KERNELS = {"run_program": _run_program}
