"""Which requests draft in a step, and how far: what earlier rounds accepted, against what steps cost here."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from dspark_core.draft.drafter import DraftBlock
from dspark_core.models.attention import Segment
from dspark_core.models.decoder import FlatBatch
from dspark_core.sampling import argmax
from dspark_core.schedule import Acceptance, StepCost, choose_draft_lens
from server.engine import Engine
from server.request import Request

logger = logging.getLogger(__name__)

START = 0.6  # acceptance that a draft is trusted with before anything is known
ALL_MEMORY, OWN_MEMORY = 100.0, 30.0  # rounds
OWN_PRIOR = 6.0  # rounds that the estimate over all requests counts for in a request's own
CONTEXT = 64  # tokens before those of a measured step
# After so many steps in which somebody did not draft, one of those does for some rounds, with few slots: or nobody
# would ever learn that drafts got better.
EXPLORE_EVERY, EXPLORE_ROUNDS, EXPLORE_SLOTS = 192, 4, 2


class DraftPolicy:
    """Chooses draft lengths. Only earlier rounds enter: no text's distribution depends on it, and no text
    at all of a request with a seed. (Which of the texts an unseeded one gets does: times differ from run to run.)

    Args:
        cost: of steps, as `profile` measures it.
    """

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self._all = Acceptance(cost.draft_len, ALL_MEMORY)
        self._observed = self._idle_steps = 0
        self._answered: tuple[object, list[int]] | None = None
        self._own: WeakKeyDictionary[Request, _Record] = WeakKeyDictionary()

    def choose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[int]:
        """Draft slots of requests that decode in this step, at most `limits` (0: does not speculate)."""
        records = [self._record(request) for request in requests]
        drafting = [i for i, limit in enumerate(limits) if limit]
        lens = [0] * len(limits)
        if not drafting:
            return lens
        question = (self._observed, tuple(records), tuple(limits))
        if self._answered is None or self._answered[0] != question:  # while nobody drafts, nothing new is learnt
            self._answered = question, self._search(records, drafting, limits)
        for i, length in zip(drafting, self._answered[1], strict=True):
            lens[i] = length
        self._explore([(records[i], i) for i in drafting if not lens[i]], lens, limits)
        return lens

    def _explore(self, idle: Sequence[tuple[_Record, int]], lens: list[int], limits: Sequence[int]) -> None:
        """Let one of those that would not draft do so, now and then."""
        if not idle:
            return
        self._idle_steps += 1
        if self._idle_steps >= EXPLORE_EVERY:
            self._idle_steps = 0
            min((record for record, _ in idle), key=lambda record: record.explored_at).explore(self._observed)
        for record, i in idle:
            if record.to_explore:
                record.to_explore -= 1
                lens[i] = min(EXPLORE_SLOTS, limits[i])

    def _search(self, records: Sequence[_Record], drafting: Sequence[int], limits: Sequence[int]) -> list[int]:
        base = self._all.rates(START, 1.0)
        survival = np.stack([records[i].acceptance.rates(base, OWN_PRIOR) for i in drafting]).cumprod(-1)
        own_limits, others = [limits[i] for i in drafting], len(limits) - len(drafting)
        return choose_draft_lens(survival, own_limits, self.cost, other_tokens=others)

    def _record(self, request: Request) -> _Record:
        """The request's record, with the rounds since it was last looked at."""
        record = self._own.setdefault(request, _Record(self.cost.draft_len))
        for decided, accepted in request.decided_and_accepted[record.seen :]:
            record.acceptance.observe(decided, accepted)
            self._all.observe(decided, accepted)
            self._observed += 1
        record.seen = len(request.decided_and_accepted)
        return record


class _Record:
    """What is known of one request.

    Attributes:
        seen: rounds of its that were taken in.
        to_explore: rounds in which it is to draft although that seems not to pay.
        explored_at: observations there were when it last began to.
    """

    def __init__(self, draft_len: int) -> None:
        self.acceptance, self.seen = Acceptance(draft_len, OWN_MEMORY), 0
        self.to_explore, self.explored_at = 0, -1

    def explore(self, observed: int) -> None:
        self.to_explore, self.explored_at = EXPLORE_ROUNDS, observed


def profile(engine: Engine, repeats: int = 3) -> StepCost:
    """Measure steps on made-up tokens, each the best of some. Overwrites KV memory: only before the first request."""
    assert engine.drafter is not None
    assert not engine.has_work
    start = time.perf_counter()
    room = min(engine.max_model_len, engine.memory.capacity)
    block = min(engine.draft_len + 1, room)
    tables = _Tables(engine, context=min(CONTEXT, room - block), block=block)
    counts = sorted({*(2**i for i in range(tables.most.bit_length()) if 2**i < tables.most), tables.most})
    passes = {**{rows: (1, rows) for rows in range(1, block + 1)}, **{n * block: (n, block) for n in counts}}
    sizes = sorted(passes)
    verify = [_best(partial(tables.verify, *passes[size]), repeats) for size in sizes]
    first, whole = (
        [_best(partial(tables.draft, count, slots), repeats) for count in counts]
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


class _Tables:
    """Page tables of made-up requests that have `context` tokens and room for `block` more."""

    def __init__(self, engine: Engine, *, context: int, block: int) -> None:
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
        self.engine.drafter.draft(blocks, _most_likely).draft_ids.tolist()


def _most_likely(slot: int, logits: Tensor, draft_ids: Tensor) -> Tensor:  # noqa: ARG001
    return argmax(logits)
