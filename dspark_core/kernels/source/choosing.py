"""Choosing tokens from rows of logits, a row or a request a task.

Nothing of a row is written: its probabilities are made where they are read, and most are never needed. A row is what
`sampling.normalised` returns; its weights are bit for bit what `sampling.softmax` writes.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from dspark_core.kernels import NO_CHOICE
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
    weights,
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
def _excess(row, other, i, size, spare):
    """16 weights of a row, less those of another one (address 0: none) where they are more, and 0 where not."""
    own = weights(row, i, size, spare)
    if other[0] == 0:
        return own
    return maximum(own - weights(other, i, size, spare), splat(np.float32(0)))


@njit(error_model="numpy")
def _sum_excess(row, other, size, sums, spare):
    """Sums of the blocks of the excess; whether there is any."""
    found, zero = False, splat(np.float32(0))
    for block in range(block_count(size)):
        lanes, end = zero, min(size, (block + 1) * BLOCK)
        full = end - end % LANES
        for i in range(block * BLOCK, full, LANES):
            excess = weighed(load(row[0] + i * 4), row) - weighed(load(other[0] + i * 4), other)
            lanes = lanes + maximum(excess, zero)
        if full < end:
            lanes = lanes + _excess(row, other, full, size, spare)
        sums[block] = lane_sum(lanes)
        found |= sums[block] > 0
    return found


@njit(error_model="numpy")
def _invert(row, other, u, size, sums, spare):
    """The place at which the cumulative excess passes `u` times the whole, by the sums of its blocks."""
    total, before, found = 0.0, 0.0, -1
    for block in range(block_count(size)):
        total += sums[block]
    if not total > 0:
        return NO_CHOICE
    point = u * total
    for block in range(block_count(size)):
        if sums[block] > 0:
            found = block  # the last one with any weight serves a point that rounding left beyond it
            if before + sums[block] > point:
                break
            before += sums[block]
    choice, start = 0, found * BLOCK
    for i in range(start, min(size, start + BLOCK), LANES):
        store(spare.ctypes.data, _excess(row, other, i, size, spare))
        for j in range(min(LANES, size - i)):
            if spare[j] > 0:
                choice = i + j
                before += spare[j]
                if before > point:
                    return choice
    return choice


@njit(error_model="numpy")
def _draw_row(row, u, size, sums, spare):
    """Draw from a row by the sums that `normalised` made, which are without its share."""
    return _invert((row[0], row[1], row[2], np.float32(1)), NO_ROW, u, size, sums, spare)


def _draw(a):
    x, size, numbers, out, scalings = a[2], a[3], doubles(a[5]), integers(a[6]), pointer(a[7])
    memory = allocate(row_room(size))
    if memory == 0:
        return
    sums, spare, _ = row_memory(memory, size)
    number = take(a)
    while number < a[1]:
        row = normalised(x + number * size * 4, size, inverse_of(a[4], number), sums, spare)
        scalings[number * 3], scalings[number * 3 + 1], scalings[number * 3 + 2] = row[1], row[2], row[3]
        out[number] = _draw_row(row, numbers[number], size, sums, spare)
        number = take(a)
    release(memory)


@njit
def _weight(row, i):
    """One weight, with the bits that it has beside others."""
    return lane(weighed(splat(pointer(row[0])[i]), row), 0)


def _verify(a):
    """Speculative rejection sampling of one request a task: rows after its first rejection are not looked at."""
    x, size, starts, lens, slots, ids = a[2], a[3], integers(a[5]), integers(a[6]), a[7], integers(a[8])
    drafts, scalings, accept, residual = integers(a[9]), integers(a[10]), doubles(a[11]), doubles(a[12])
    accepted, chosen = integers(a[13]), integers(a[14])
    memory = allocate(row_room(size))
    if memory == 0:
        return
    sums, spare, _ = row_memory(memory, size)
    request = take(a)
    while request < a[1]:
        slot, other = 0, NO_ROW
        while True:
            number = starts[request] + slot
            row = normalised(x + number * size * 4, size, inverse_of(a[4], number), sums, spare)
            if slot == lens[request]:
                break
            scaling, token = pointer(scalings[slot] + request * 12), ids[request * slots + slot]
            other = drafts[slot] + request * size * 4, scaling[0], scaling[1], scaling[2]
            if not accept[request * slots + slot] * _weight(other, token) < _weight(row, token):
                break
            slot, other = slot + 1, NO_ROW
        accepted[request] = slot
        if other[0] != 0 and _sum_excess(row, other, size, sums, spare):
            chosen[request] = _invert(row, other, residual[request], size, sums, spare)
        else:
            if other[0] != 0:  # rounding left no mass: the target's own, whose sums are gone
                row = normalised(row[0], size, row[2], sums, spare)
            chosen[request] = _draw_row(row, residual[request], size, sums, spare)
        request = take(a)
    release(memory)


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


def _couple(a):
    x, size, keys, positions, purpose, out = a[2], a[3], integers(a[5]), integers(a[6]), a[7], integers(a[8])
    memory = allocate(row_room(size))
    if memory == 0:
        return
    sums, spare, weight = row_memory(memory, size)
    number = take(a)
    while number < a[1]:
        row = normalised(x + number * size * 4, size, inverse_of(a[4], number), sums, spare)
        state = mix(mix(mix(keys[number], 0), purpose), positions[number])
        out[number] = _couple_row(row, size, state, weight, spare)
        number = take(a)
    release(memory)


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


def _pick(a):
    x, size, out = a[2], a[3], integers(a[4])
    memory = allocate(row_room(size))
    if memory == 0:
        return
    peaks, spare, _ = row_memory(memory, size)
    number = take(a)
    while number < a[1]:
        out[number] = _pick_row(x + number * size * 4, size, peaks, spare)
        number = take(a)
    release(memory)


KERNELS = {"draw": _draw, "verify": _verify, "couple": _couple, "pick": _pick}
