"""What steps cost on this machine: measured at start on made-up requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dspark_core.draft.drafter import DraftBlock
from dspark_core.models.attention import FlatBatch, Segment
from dspark_core.sampling import argmax
from dspark_core.schedule import StepCost
from server.engine import Engine

logger = logging.getLogger(__name__)

CONTEXT = 64  # tokens before those of a measured step


def profile(engine: Engine, repeats: int = 3) -> StepCost:
    """Measure steps on made-up tokens, each the best of some. Only while no request runs."""
    start = time.perf_counter()
    room = min(engine.max_model_len, engine.memory.capacity)
    block = min(engine.draft_len + 1, room)
    probe = Probe(engine, context=min(CONTEXT, room - block), block=block)
    counts = sorted({*(2**i for i in range(probe.most.bit_length()) if 2**i < probe.most), probe.most})
    passes = {**{rows: (1, rows) for rows in range(1, block + 1)}, **{n * block: (n, block) for n in counts}}
    sizes = sorted(passes)
    verify = [_best(partial(probe.verify, *passes[size]), repeats) for size in sizes]
    first, whole = (
        [_best(partial(probe.draft, count, slots), repeats) for count in counts]
        for slots in (1, min(engine.draft_len, block))
    )
    logger.info("step costs measured in %.1f s", time.perf_counter() - start)
    return StepCost(sizes, verify, counts, first, whole, engine.draft_len)


def _best(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some calls; the first, which compiles and allocates, does not count."""
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


class Probe:
    """Runs parts of a step on made-up requests. Overwrites KV memory, so only while no real one runs.

    Args:
        context: tokens that each request has.
        block: room for so many more.

    Attributes:
        most: how many requests fit, at most `max_num_seqs`.
    """

    def __init__(self, engine: Engine, *, context: int, block: int) -> None:
        assert not engine.has_work
        engine.memory.clear_cache()
        self.engine, self.context, size = engine, context, engine.pool.page_size
        self.pages = -(-(context + block) // size)
        self.most = min(engine.scheduler.max_num_seqs, engine.pool.num_pages // self.pages)

    def table(self, number: int) -> range:
        return range(number * self.pages, (number + 1) * self.pages)

    @torch.inference_mode()
    def verify(self, count: int, rows: int) -> None:
        """The target's pass over some rows of each of some requests, until the host has a result."""
        engine, size = self.engine, self.engine.pool.page_size
        segments = [Segment(i * rows, rows, self.context, self.table(i)) for i in range(count)]
        places = torch.arange(self.context, self.context + rows, device=engine.target.device).repeat(count)
        first = torch.arange(count, device=engine.target.device).repeat_interleave(rows) * (self.pages * size)
        batch = FlatBatch(torch.ones_like(places), places, first + places, segments)
        engine.target(batch, engine.pool, tap=engine.taps).logits.amax(-1).tolist()

    def draft(self, count: int, slots: int) -> None:
        """Drafting some slots for some requests, until the host has the tokens."""
        assert self.engine.drafter is not None
        blocks = [DraftBlock(1, self.context, slots, self.table(i)) for i in range(count)]
        self.engine.drafter.draft(blocks, most_likely).draft_ids.tolist()


def most_likely(slot: int, logits: Tensor, draft_ids: Tensor) -> Tensor:  # noqa: ARG001
    return argmax(logits)
