"""Many requests through one engine in little memory: all are answered, and nothing is left of them.

Ten thousand: `python -m tests.server.test_endurance --requests 10000`.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from resource import getpagesize

import torch

from dspark_core.sampling import SamplingParams
from server.engine import Engine
from server.request import Request, RequestParams
from tests.server.engines import (
    GREEDY,
    Result,
    check_deltas,
    check_idle,
    check_invariants,
    make_engine,
    make_prompt,
    tiny_draft,
)

MAX_LIVE = 12
# Lengths around a page's 16 tokens and around the budget of a step.
LENGTHS = (1, 15, 16, 17, 40, 63, 64, 65, 90)
SEEDED = SamplingParams(temperature=1.0, seed=3)
SAMPLED = SamplingParams(temperature=1.0)
REPORT_EVERY, WARM_UP = 1000, 2000
MAX_GROWTH_MB = 10.0


def small_engine() -> Engine:
    """One that drafts well, and whose memory holds two of the longest requests."""
    return make_engine(
        tiny_draft("vanilla", 5, agrees=True),
        num_tokens=256,
        max_model_len=128,
        max_num_seqs=6,
        max_num_batched_tokens=64,
    )


class Load:
    """Random requests that come and go, through an engine whose memory holds two of the longest.

    Attributes:
        seen: every request that still exists.
        ended: finish reasons.
        accepted: drafts that stood.
        preempted: steps after which a request waited that had begun its answer.
    """

    def __init__(self, seed: int = 0) -> None:
        self.engine = small_engine()
        self.draw = random.Random(seed)
        self.live: dict[Request, Result] = {}
        self.seen = weakref.WeakSet[Request]()
        self.ended: Counter[str] = Counter()
        self.accepted = self.preempted = 0
        self._answers: dict[tuple[int, int, bool], list[int]] = {}
        self._prompts: dict[Request, tuple[int, int]] = {}

    def run(self, count: int, on_end: Callable[[int], None] | None = None) -> None:
        """Let `count` requests arrive at random, and all of them end; `on_end` is told how many have."""
        left = count
        while left or self.live:
            while left and len(self.live) < MAX_LIVE and self.draw.random() < 0.5:
                self._add()
                left -= 1
            if self.live and self.draw.random() < 0.03:
                request = self.draw.choice(list(self.live))
                delta = self.engine.abort(request)
                assert delta is not None
                self.live[request].deltas.append(delta)
            for request, delta in self.engine.step():
                self.live[request].deltas.append(delta)
            check_invariants(self.engine)
            self.preempted += any(request.num_generated for request in self.engine.scheduler.waiting)
            for result in [result for result in self.live.values() if result.request.finished]:
                self._end(result)
                if on_end:
                    on_end(self.ended.total())

    def _add(self) -> None:
        draw = self.draw
        prompt = draw.choice(LENGTHS), draw.randrange(6)
        params = RequestParams(
            draw.choice([GREEDY, SEEDED, SAMPLED]), max_tokens=draw.randint(1, 38), speculative=draw.random() < 0.75
        )
        request = self.engine.make_request(make_prompt(*prompt), params)
        self.live[request], self._prompts[request] = Result(request), prompt
        self.seen.add(request)
        self.engine.add(request)

    def _end(self, result: Result) -> None:
        """Check what the client was told, by itself and against the answers to the same prompt before."""
        request, sampling = result.request, result.request.params.sampling
        del self.live[request]
        prompt = self._prompts.pop(request)
        check_deltas(result)
        reason = result.last.finish_reason
        assert reason == "abort" or (reason == "length" and len(result.ids) == request.max_tokens), result.last
        self.ended[reason] += 1
        self.accepted += result.last.speculation.accepted
        if sampling is SAMPLED:
            return
        known = self._answers.setdefault((*prompt, sampling is SEEDED), [])
        size = min(len(known), len(result.ids))
        assert result.ids[:size] == known[:size], "the same prompt got another answer"
        known += result.ids[size:]


def count_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize() / 2**20


def test_nothing_is_left_of_hundreds_of_requests() -> None:
    """Cases P1 and H4."""
    load = Load()
    load.run(250)
    before = count_objects()
    load.run(150)
    growth = count_objects() - before
    check_idle(load.engine)
    assert load.ended.total() == 400
    assert list(load.seen) == []
    assert growth < 150, "something is kept of every request"
    rare = load.ended["abort"], load.accepted, load.preempted, load.engine.memory.shared_tokens
    assert min(rare) > 10, rare


def measure_growth(run: Callable[[int, Callable[[int], None]], str], doc: str | None) -> int:
    """A program that runs as many requests as its arguments say; 1 if memory grew.

    Args:
        run: is given their number and whom to tell how many have ended; returns what became of them.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--requests", type=int, default=10_000, help=f"{WARM_UP + REPORT_EVERY} or more")
    count = parser.parse_args().requests
    if count < WARM_UP + REPORT_EVERY:
        parser.error(f"--requests is {count}, expected {WARM_UP + REPORT_EVERY} or more")
    torch.set_num_threads(1)
    resident: dict[int, float] = {}

    def report(ended: int) -> None:
        if ended % REPORT_EVERY == 0:
            gc.collect()
            resident[ended] = resident_mb()
            print(f"{ended} requests, RSS {resident[ended]:.1f} MB", flush=True)

    told = run(count, report)
    growth = list(resident.values())[-1] - resident[WARM_UP]
    print(f"{told}; no page lost, RSS grew by {growth:.1f} MB after the first {WARM_UP}")
    return int(growth > MAX_GROWTH_MB)


def endure(count: int, on_end: Callable[[int], None]) -> str:
    """Run so many requests through an engine; nothing must be left of them."""
    load = Load()
    load.run(count, on_end)
    check_idle(load.engine)
    gc.collect()
    assert list(load.seen) == []
    return f"{dict(load.ended)}, {load.accepted} drafts accepted, {load.preempted} steps with preempted ones waiting"


if __name__ == "__main__":
    sys.exit(measure_growth(endure, __doc__))
