"""Every reading of /metrics agrees with itself, whatever the engine is doing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

from tests.server.engines import make_prompt
from tests.server.scrape import LENGTHS, Scrape, scrape
from tests.server.test_async_engine import PARAMS, read, running, tiny


def check_agreement(told: Scrape) -> None:
    """What holds at every moment."""
    accepted = told("spec_decode_num_accepted_tokens_total")
    assert accepted == sum(told("spec_decode_num_accepted_tokens_per_pos_total", str(k)) for k in range(4))
    assert accepted <= told("spec_decode_num_verified_tokens_total") <= told("spec_decode_num_draft_tokens_total")
    rounds = told("spec_decode_num_drafts_total") + told("spec_decode_num_plain_rounds_total")
    assert told("generation_tokens_total") <= accepted + rounds
    ended = sum(told.finished.values())
    assert ended == told.observed("request_queue_time")[0]
    complete = told.finished["stop"] + told.finished["length"]
    assert complete == told.observed("e2e_request_latency")[0] <= told.observed("time_to_first_token")[0]
    assert told("prefix_cache_hits_total") <= told("prefix_cache_queries_total")
    for name in (*LENGTHS, "e2e_request_latency"):
        buckets = [value for (key, *_), value in told.samples.items() if key == f"dspark:{name}_seconds_bucket"]
        assert buckets == sorted(buckets)
        assert buckets[-1] == told(f"{name}_seconds_count")


def growing(scrapes: Iterator[Scrape]) -> int:
    """How many different readings there were; no counter may ever fall."""
    before: dict[Any, float] = {}
    different = 0
    for told in scrapes:
        counters = {
            key: v for key, v in told.samples.items() if key[0].endswith(("_total", "_count", "_sum", "_bucket"))
        }
        assert all(counters[key] >= value for key, value in before.items())
        different += counters != before
        before = counters
    return different


async def test_readings_while_the_engine_runs_agree_with_themselves() -> None:
    async with running(tiny(max_num_seqs=4)) as served:
        ended, scrapes = threading.Event(), []

        def keep_reading() -> None:
            while not ended.wait(0.005):  # the engine shares the interpreter with this thread
                scrapes.append(scrape(served))

        reader = threading.Thread(target=keep_reading)
        reader.start()
        try:
            streams = [served.submit(make_prompt(1 + i % 40), PARAMS) for i in range(30)]
            for stream in streams[::7]:
                stream.abort()
            await asyncio.gather(*(read(stream) for stream in streams))
        finally:
            ended.set()
            await asyncio.to_thread(reader.join)
    for told in scrapes:
        check_agreement(told)
    assert growing(iter(scrapes)) > 3
