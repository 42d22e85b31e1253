"""What steps cost on this machine: measured on made-up requests."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from dspark_core.adjustments import RowSource
from dspark_core.draft.drafter import DraftBlock
from dspark_core.models.attention import FlatBatch, Segment
from dspark_core.sampler import Round
from dspark_core.sampling import SamplingParams
from dspark_core.step_cost import CostCurves, StepCost
from dspark_core.verify import greedy_choices
from server.engine import Engine

logger = logging.getLogger(__name__)

BUSY = 0.3  # spread of a step, in the median over all of them
SHORT, LONG = 64, 1024  # tokens before those of a measured step
# What takes little is measured more often: so many times as often at most, for so long in all.
MORE, ENOUGH_SECONDS = 4, 0.2
VERSION = 5  # raised whenever something else is measured, so that costs that were kept are measured anew
Key = tuple[str, int, int, int]  # verify or draft, context, requests, rows or slots of each


@dataclass(frozen=True)
class Profile:
    """What was measured.

    Attributes:
        cost: of steps, from medians.
        medians: seconds by what was measured.
        spread: (third - first quartile) / median of its times.
    """

    cost: StepCost
    medians: dict[Key, float]
    spread: dict[str, float]

    @property
    def busy(self) -> bool:
        """Whether something else ran on the machine, by how far times of one and the same step lie apart."""
        return statistics.median(self.spread.values()) > BUSY


def profile(
    engine: Engine,
    contexts: Sequence[int] = (LONG,),
    repeats: int = 3,
    progress: Callable[[int, int], object] = lambda *_: None,
) -> Profile:
    """Measure the parts of a step. Only while no request runs.

    Args:
        contexts: lengths to measure what context adds, beside the short one; those that do not fit are left out.
        repeats: samples of what takes long; of what takes little up to MORE times as many. They are taken in rounds,
            each of which goes over everything once: a while in which the machine is busy with something else spoils
            one sample of each, which a median leaves out, and not all samples of one.
        progress: told how many samples are taken, and of how many, as far as is known.
    """
    start = time.perf_counter()
    room = min(engine.max_model_len, engine.memory.capacity)
    block = min(engine.draft_len + 1, room)
    longest = min(2 * block, room)
    probe = Probe(engine, context=min(SHORT, room - longest), block=longest)
    counts = sorted({*(2**i for i in range(probe.most.bit_length()) if 2**i < probe.most), probe.most})
    # Kernels work on some rows at a time: one more than those may cost much, which a line between whole blocks hides.
    passes = {rows: (1, rows) for rows in range(1, longest + 1)} | {n * block: (n, block) for n in counts}
    sizes, slots = sorted(passes), min(engine.draft_len, block)
    runs: dict[Key, Callable[[], object]] = {
        ("verify", probe.context, *passes[b]): partial(probe.verify, *passes[b]) for b in sizes
    }
    runs |= {("verify", probe.context, n, 1): partial(probe.verify, n, 1) for n in counts}
    if engine.drafter:
        runs |= {("draft", probe.context, n, k): partial(probe.draft, n, k) for n in counts for k in (1, slots)}
    for context in contexts:
        if probe.context < context <= room - block:
            runs |= _with_context(Probe(engine, context=context, block=block), slots)
    seconds = _measure(runs, repeats, progress)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    curves = CostCurves(
        tokens=sizes,
        verify=[medians["verify", probe.context, *passes[size]] for size in sizes],
        requests=counts,
        first_slot=[medians.get(("draft", probe.context, n, 1), 0.0) for n in counts],
        all_slots=[medians.get(("draft", probe.context, n, slots), 0.0) for n in counts],
        draft_len=engine.draft_len,
    )
    logger.info("step costs measured in %.1f s", time.perf_counter() - start)
    spread = {" ".join(map(str, key)): _spread(values) for key, values in seconds.items()}
    alone = {n: medians["verify", probe.context, n, 1] for n in counts}
    cost = StepCost(curves, probe.context, block, _per_request(curves, alone, block), *_slopes(medians, probe.context))
    return Profile(cost, medians, spread)


def _with_context(probe: Probe, slots: int) -> dict[Key, Callable[[], object]]:
    """What tells how context adds to a step: one request is enough, for all read their own."""
    runs: dict[Key, Callable[[], object]] = {
        ("verify", probe.context, 1, rows): partial(probe.verify, 1, rows) for rows in {1, probe.block}
    }
    if probe.engine.drafter:
        runs["draft", probe.context, 1, slots] = partial(probe.draft, 1, slots)
    return runs


def _per_request(curves: CostCurves, alone: dict[int, float], block: int) -> float:
    """Seconds that a request more adds to a pass of as many rows, from passes of one row of each request."""
    more = [
        (n - max(n // block, 1), t - float(curves.verify_seconds(np.array([float(n)]))[0])) for n, t in alone.items()
    ]
    weights = sum(m * m for m, _ in more)
    return max(sum(m * t for m, t in more) / weights, 0.0) if weights else 0.0


def _slopes(medians: dict[Key, float], short: int) -> tuple[float, float, float]:
    """Seconds that a token of context adds to a pass for its request and for a row, and to drafting; not negative."""
    verify = [
        ((c - short) * np.array([1, rows]), t - medians[kind, short, n, rows])
        for (kind, c, n, rows), t in medians.items()
        if kind == "verify" and c > short
    ]
    draft = [
        (c - short, t - medians[kind, short, n, k])
        for (kind, c, n, k), t in medians.items()
        if kind == "draft" and c > short
    ]
    if not verify:
        return 0.0, 0.0, 0.0
    places, more = (np.array(column, float) for column in zip(*verify, strict=True))
    per_request, per_row = np.linalg.lstsq(places, more, rcond=None)[0]
    if min(per_request, per_row) < 0:  # one of them is lost in the noise: the other explains all
        by_row = float(places[:, 1] @ more / (places[:, 1] @ places[:, 1]))
        per_request, per_row = 0.0, max(by_row, 0.0)
    per_draft = max(sum(t for _, t in draft) / sum(c for c, _ in draft), 0.0) if draft else 0.0
    return float(per_request), float(per_row), per_draft


def _measure(
    runs: dict[Key, Callable[[], object]], repeats: int, progress: Callable[[int, int], object]
) -> dict[Key, list[float]]:
    """Seconds of each; the first round, which compiles and allocates, does not count."""
    seconds: dict[Key, list[float]] = {key: [] for key in runs}
    samples, done = dict.fromkeys(runs, repeats), 0
    for number in range(1 + MORE * repeats):
        for key, run in runs.items():
            if number > samples[key]:
                continue
            start = time.perf_counter()
            run()
            if number:
                seconds[key].append(time.perf_counter() - start)
                samples[key] = max(_samples(seconds[key], repeats), number)
            done += 1
            progress(done, len(runs) + sum(samples.values()))
    return seconds


def _samples(seconds: Sequence[float], repeats: int) -> int:
    """How many to take in all of what has taken so long so far: by the least, for what else ran only adds to it."""
    enough = ENOUGH_SECONDS / max(min(seconds), 1e-9)
    return min(max(repeats, int(enough)), MORE * repeats)


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / middle


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
        self.engine, self.context, self.block, size = engine, context, block, engine.pool.page_size
        self.pages = -(-(context + block) // size)
        self.most = min(engine.scheduler.max_num_seqs, engine.pool.num_pages // self.pages)
        engine.memory.soil(range(self.most * self.pages))

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
        greedy_choices(engine.target(batch, engine.pool, tap=engine.taps).logits).tolist()

    def draft(self, count: int, slots: int) -> None:
        """Drafting some slots for some requests, and writing the context of as many tokens as such blocks may give:
        one and half of them; until the host has the drafts."""
        drafter, size, device = self.engine.drafter, self.engine.pool.page_size, self.engine.target.device
        assert drafter is not None
        config, rows = drafter.model.config, 1 + slots // 2
        width = len(config.target_layer_ids) * config.decoder.hidden_size
        places = torch.arange(self.context, self.context + rows, device=device).repeat(count)
        first = torch.arange(count, device=device).repeat_interleave(rows) * (self.pages * size)
        drafter.absorb(
            torch.zeros(count * rows, width, dtype=drafter.model.dtype, device=device), places, first + places
        )
        blocks = [DraftBlock(1, self.context, slots, self.table(i)) for i in range(count)]
        choose = Round([RowSource(SamplingParams(temperature=0), 0, 0, 0)] * count, device)
        drafter.draft(blocks, choose).draft_ids.tolist()
