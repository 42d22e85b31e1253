"""Choosing tokens from rows of logits, a row or a request a task.

Nothing of a row is written: its probabilities are made where they are read, and most are never needed. A row is what
`sampling.normalised` returns; its weights are bit for bit what `sampling.softmax` writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from dspark_core.kernels import NO_CHOICE
from dspark_core.kernels.source.names import named
from dspark_core.kernels.source.sampling import (
    BLOCK,
    block_count,
    inverse_of,
    mix,
    normalised,
    row_memory,
    row_room,
    tail,
    weighed,
)
from dspark_core.kernels.source.simd import (
    LANES,
    allocate,
    doubles,
    integers,
    lane,
    lane_max,
    lane_sum,
    load,
    maximum,
    pointer,
    release,
    splat,
    store,
    take,
    where_less,
)

NO_ROW = (np.int64(0), np.float32(0), np.float32(0), np.float32(0))


@njit(error_model="numpy")
def _full_excess(row, other, i):
    """16 weights of a row, less those of another one (address 0: none) where they are more, and 0 where not."""
    own = weighed(load(row[0] + i * 4), row)
    if other[0] == 0:
        return own
    return maximum(own - weighed(load(other[0] + i * 4), other), splat(np.float32(0)))


@njit(error_model="numpy")
def _excess(row, other, i, size, spare):
    """The same where the row may end within the 16."""
    if i + LANES <= size:
        return _full_excess(row, other, i)
    own = weighed(tail(row[0], i, size, spare), row)
    if other[0] == 0:
        return own
    return maximum(own - weighed(tail(other[0], i, size, spare), other), splat(np.float32(0)))


@njit(error_model="numpy")
def _sum_excess(row, other, size, sums, spare):
    """Sums of the blocks of the excess as if made in float64, and of all of them.

    What each addition rounds away is added up beside it: the walk through a block must find as much as this.
    """
    total = 0.0
    for block in range(block_count(size)):
        end, sums_of_lanes, rounded = min(size, (block + 1) * BLOCK), splat(np.float32(0)), splat(np.float32(0))
        full = end - end % LANES
        for i in range(block * BLOCK, full, LANES):
            sums_of_lanes, lost = _two_sum(sums_of_lanes, _full_excess(row, other, i))
            rounded = rounded + lost
        if full < end:
            sums_of_lanes, lost = _two_sum(sums_of_lanes, _excess(row, other, full, size, spare))
            rounded = rounded + lost
        sums[block] = 0.0
        for i in range(LANES):
            sums[block] += np.float64(lane(sums_of_lanes, i)) + np.float64(lane(rounded, i))
        total += sums[block]
    return total


@njit
def _two_sum(x, y):
    """x + y, and what rounding took off it, exactly (Knuth)."""
    total = x + y
    of_y = total - x
    return total, (x - (total - of_y)) + (y - of_y)


@njit(error_model="numpy")
def _draw_excess(row, other, u, size, sums, spare):
    """The place at which the cumulative excess passes `u` times the whole."""
    total, before, found = _sum_excess(row, other, size, sums, spare), 0.0, -1
    if not total > 0:
        return NO_CHOICE
    point = u * total
    for block in range(block_count(size)):
        if sums[block] > 0:
            found = block  # the last one with any weight serves a point that rounding left beyond it
            if before + sums[block] > point:
                break
            before += sums[block]
    choice, start = NO_CHOICE, found * BLOCK
    for i in range(start, min(size, start + BLOCK), LANES):
        store(spare.ctypes.data, _excess(row, other, i, size, spare))
        for j in range(LANES):
            if spare[j] > 0:
                choice = i + j
                before += spare[j]
                if before > point:
                    return choice
    return choice


@njit(error_model="numpy")
def _draw(a, number, sums, spare, _):
    x, size, numbers, out = a[2], a[3], doubles(a[5]), integers(a[6])
    row = normalised(x + number * size * 4, size, inverse_of(a[4], number), spare)
    out[number] = _draw_excess(row, NO_ROW, numbers[number], size, sums, spare)


@njit
def _weight(row, i):
    """One weight, with the bits that it has beside others."""
    return lane(weighed(splat(pointer(row[0])[i]), row), 0)


@njit(error_model="numpy")
def _verify(a, request, sums, spare, _):
    """Speculative rejection sampling of one request: rows after its first rejection are not looked at."""
    x, size, starts, lens, slots, ids = a[2], a[3], integers(a[5]), integers(a[6]), a[7], integers(a[8])
    drafts, accept, residual = integers(a[9]), doubles(a[11]), doubles(a[12])
    accepted, chosen = integers(a[13]), integers(a[14])
    slot, stands = 0, True
    while True:
        number = starts[request] + slot
        row, other = normalised(x + number * size * 4, size, inverse_of(a[4], number), spare), NO_ROW
        if slot == lens[request]:
            break
        other = normalised(drafts[slot] + request * size * 4, size, inverse_of(a[10], request), spare)
        token = ids[request * slots + slot]
        stands = accept[request * slots + slot] * _weight(other, token) < _weight(row, token)
        if not stands:
            break
        slot += 1
    accepted[request] = slot
    choice = _draw_excess(row, other, residual[request], size, sums, spare)
    if choice == NO_CHOICE and not stands:  # rounding left no mass: the target's own
        choice = _draw_excess(row, NO_ROW, residual[request], size, sums, spare)
    chosen[request] = choice


@njit(error_model="numpy")
def _couple_row(row, size, state, weight, spare):
    """Arg-max of log-probability plus Gumbel noise -log(-log(u)), u from the random bits of (`state`, token).

    Only few tokens can still win: -log(u) >= 1 - u, so one can only where 1 - u < probability / e^best. That spares
    the logarithms of all others.
    """
    choice, best, bound, full = NO_CHOICE, -np.inf, np.inf, size - size % LANES
    for start in range(0, size, LANES):
        found = load(row[0] + start * 4) if start < full else tail(row[0], start, size, spare)
        store(weight.ctypes.data, weighed(found, row))
        for j in range(LANES):
            if weight[j] > 0:
                rest = 1 - (((mix(state, start + j) >> 12) & 0xFFFFFFFFFFFFF) + 0.5) * 2.0**-52
                if not rest > weight[j] * bound:
                    value = math.log(np.float64(weight[j])) - math.log(-math.log(1 - rest))
                    if value > best:
                        choice, best, bound = start + j, value, math.exp(-value) * (1 + 1e-9)
    return choice


@njit(error_model="numpy")
def _couple(a, number, _, spare, weight):
    x, size, keys, positions, purpose, out = a[2], a[3], integers(a[5]), integers(a[6]), a[7], integers(a[8])
    row = normalised(x + number * size * 4, size, inverse_of(a[4], number), spare)
    state = mix(mix(mix(keys[number], 0), purpose), positions[number])
    out[number] = _couple_row(row, size, state, weight, spare)


@njit(error_model="numpy")
def _pick_row(x, size, peaks, spare):
    """The first place of the largest value."""
    infinite, zero = splat(np.float32(np.inf)), splat(np.float32(0))
    wrong, top = zero, np.float32(-np.inf)
    for block in range(block_count(size)):
        end, largest = min(size, (block + 1) * BLOCK), splat(np.float32(-np.inf))
        full = end - end % LANES
        for i in range(block * BLOCK, full, LANES):
            found = load(x + i * 4)
            largest = maximum(largest, found)
            wrong = wrong + where_less(found, infinite, zero, found - found)  # NaN, and infinity less itself
        if full < end:
            found = tail(x, full, size, spare)
            largest = maximum(largest, found)
            wrong = wrong + where_less(found, infinite, zero, found - found)
        peaks[block] = lane_max(largest)
        top = max(top, peaks[block])
    if not (lane_sum(wrong) == 0 and top > -np.inf):
        return NO_CHOICE
    block, row = 0, pointer(x)
    while peaks[block] < top:
        block += 1
    choice = block * BLOCK
    while row[choice] < top:
        choice += 1
    return choice


@njit(error_model="numpy")
def _pick(a, number, peaks, spare, _):
    integers(a[4])[number] = _pick_row(a[2] + number * a[3] * 4, a[3], peaks, spare)


def _kernel(work: Any) -> Callable[[Any], None]:
    """A kernel that does `work` in every task, with memory to go through rows of a[3] values."""

    def over_rows(a):
        memory = allocate(row_room(a[3]))
        if memory == 0:
            return
        sums, first, second = row_memory(memory, a[3])
        task = take(a)
        while task < a[1]:
            work(a, task, sums, first, second)
            task = take(a)
        release(memory)

    return named(over_rows, f"rows{work.__name__}")


KERNELS = {"draw": _kernel(_draw), "verify": _kernel(_verify), "couple": _kernel(_couple), "pick": _kernel(_pick)}
