"""What /metrics says, against what was done."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from dspark_core import __version__
from dspark_core.checkpoint.calibration import Calibration
from server.app import create_app
from server.async_engine import AsyncEngine, QueueFullError
from server.config import ServerConfig
from server.request import RequestParams
from server.series import SECONDS, SERIES
from tests.server.drafts import ConfidentDrafter
from tests.server.engines import GREEDY, make_engine, make_prompt, run, tiny_target
from tests.server.http_util import client_of
from tests.server.policies import Eager, cost_of, one_round
from tests.server.scrape import LENGTHS, Scrape, scrape
from tests.server.test_async_engine import (
    COUNT,
    ENDLESS,
    PARAMS,
    PROMPT,
    eventually,
    expected,
    ids,
    read,
    running,
    tiny,
)
from tests.server.test_engine_faults import break_steps
from tests.server.test_policy import some_request

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def confident() -> AsyncEngine:
    engine = make_engine(ConfidentDrafter(2, tiny_target(), lambda token: 1.0 if token % 2 else -1.0))
    engine.policy = Eager(cost_of(0.05, start=10.0), Calibration.raw(2))
    return AsyncEngine(engine)


def documented() -> dict[str, tuple[str, str, str]]:
    """The table of docs/metrics.md: name -> type, unit, meaning."""
    rows = re.findall(r"^\| `(dspark:\w+)` \| (\w+) \| ([^|]+) \| (.+) \|$", DOCS.read_text("utf-8"), re.M)
    return {name: (kind, unit, meaning) for name, kind, unit, meaning in rows}


def test_the_documentation_tells_name_type_unit_and_meaning_of_every_series() -> None:
    told = {}
    for series in SERIES:
        labels = f" Label{'s' * (len(series.labels) > 1)}: {', '.join(f'`{label}`' for label in series.labels)}."
        told[series.full_name] = series.kind, series.unit, series.text + labels * bool(series.labels)
    assert documented() == told


def test_what_is_exported_is_what_is_documented() -> None:
    engine = confident()
    engine.watch.observe(one_round(some_request(), [1.0, 1.0], drafted=2, verified=2, accepted=1))
    exported = {}
    for family in scrape(engine).families.values():
        name = family.name + "_total" * (family.type == "counter")
        exported[name] = family.type, family.documentation
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels == {label for series in SERIES if series.full_name == name for label in series.labels}
    assert exported == {series.full_name: (series.kind, series.text) for series in SERIES}


def test_units_are_those_of_the_names() -> None:
    for series in SERIES:
        assert ("seconds" in series.name) == (series.unit == "seconds")
        assert series.kind != "histogram" or series.unit == "seconds"


def test_buckets_are_near_each_other() -> None:
    assert all(lower < upper <= 2 * lower for lower, upper in itertools.pairwise(SECONDS))


async def test_what_is_told_is_what_was_done() -> None:
    """Case F2."""
    stop = RequestParams(GREEDY, max_tokens=COUNT, stop_token_ids=frozenset(expected(PROMPT)[3:4]))
    async with running(tiny(max_num_seqs=2), max_queue=1) as served:
        idle = scrape(served)
        assert idle("kv_cache_usage_perc") == 0
        got = [await ids(served.submit(PROMPT, params)) for params in (PARAMS, stop)]
        assert scrape(served).finished == {"stop": 1, "length": 1, "abort": 0, "error": 0}
        streams = [served.submit(PROMPT, ENDLESS) for _ in range(3)]
        await eventually(lambda: served.num_running == 2)
        with pytest.raises(QueueFullError):
            served.check_queue()
        busy = scrape(served)
        assert (busy("num_requests_running"), busy("num_requests_waiting")) == (2, 1)
        assert 0 < busy("kv_cache_usage_perc") < 1
        for stream in reversed(streams):
            stream.abort()
        cut = [[token for delta in await read(stream) for token in delta.token_ids] for stream in streams]
        done = scrape(served)
    assert done.finished == {"stop": 1, "length": 1, "abort": 3, "error": 0}
    assert done("requests_rejected_total") == 1
    assert done("generation_tokens_total") == sum(map(len, [*got, *cut]))
    began = 2 + sum(1 for tokens in cut if tokens)
    assert done("prompt_tokens_total") == began * len(PROMPT)
    assert done.observed("time_to_first_token")[0] == began
    assert done.observed("e2e_request_latency")[0] == done.observed("time_per_output_token")[0] == 2
    assert done.observed("request_queue_time")[0] == 5
    for name in (*LENGTHS, "e2e_request_latency"):
        assert done.observed(name)[1] > 0


async def test_a_step_that_fails_is_told_too() -> None:
    engine = tiny(max_num_seqs=2)
    break_steps(engine, lambda: bool(engine.scheduler.running) and engine.scheduler.running[0].num_generated > 3)
    async with running(engine) as served:
        (*_, last) = await read(served.submit(PROMPT, PARAMS))
        assert last.error
        assert scrape(served).finished == {"stop": 0, "length": 0, "abort": 0, "error": 1}
    assert scrape(served).finished["error"] == 1, "and by a server that has stopped"


async def test_a_server_that_stops_ends_requests_with_errors() -> None:
    async with running(tiny(max_num_seqs=1)) as served:
        streams = [served.submit(PROMPT, ENDLESS) for _ in range(3)]
        await anext(streams[0])
    assert scrape(served).finished["error"] == 3


async def test_tokens_found_in_the_prefix_cache_are_told() -> None:
    prompt = make_prompt(40)
    async with running(tiny()) as served:
        for _ in range(3):
            await ids(served.submit(prompt, PARAMS))
        told = scrape(served)
    assert told("prefix_cache_queries_total") == 3 * 40
    assert told("prefix_cache_hits_total") == 2 * 32, "whole pages of 16 before the last token"
    assert told("prompt_tokens_total") == 3 * 40


@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_what_is_not_looked_for_in_the_prefix_cache_is_no_query(prefix_cache: bool) -> None:
    params = RequestParams(GREEDY, max_tokens=COUNT, prompt_logprobs=1 if prefix_cache else None)
    async with running(tiny(prefix_cache=prefix_cache)) as served:
        for _ in range(2):
            await ids(served.submit(make_prompt(40), params))
        told = scrape(served)
    assert (told("prefix_cache_queries_total"), told("prefix_cache_hits_total")) == (0, 0)


def test_counters_never_fall_where_memory_is_short() -> None:
    """Who is not admitted for want of memory looks in the prefix cache in vain, step after step."""
    engine = tiny(max_num_seqs=8, num_tokens=256)
    memory, reserve = engine.memory, engine.memory.reserve
    seen: list[tuple[int, int]] = []

    def note(*args: Any) -> bool:
        seen.append((engine.scheduler.prefix_hits, memory.shared_tokens))
        return reserve(*args)

    memory.reserve = note  # type: ignore[method-assign]
    jobs = [
        ([*make_prompt(64), *make_prompt(20, seed=seed)], RequestParams(GREEDY, max_tokens=60)) for seed in range(6)
    ]
    run(engine, jobs)
    hits, shared = zip(*seen, strict=True)
    assert list(hits) == sorted(hits)
    assert list(shared) != sorted(shared), "what the memory itself counts does fall: the test would see it"
    assert engine.scheduler.prefix_hits == memory.shared_tokens > 0
    told = scrape(AsyncEngine(engine))
    assert told("num_preemptions_total") > 0
    assert told("prefix_cache_hits_total") < told("prefix_cache_queries_total")


async def test_what_serves_is_told() -> None:
    engine = confident()
    engine.info.update(target="tiny (llama, 2 layers)", draft="/home/me/d (3 layers)", verification="as far as pays")
    async with client_of(create_app(engine, ServerConfig())) as client:
        response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    told = Scrape(response.content)
    (info,) = told.families["dspark:info"].samples
    assert info.value == 1
    assert info.labels == {
        "version": __version__,
        "model_name": "tiny",
        "target": "tiny (llama, 2 layers)",
        "draft": "d (3 layers)",
        "verification": "as far as pays",
        "calibration": "",
        "dtype": "",
        "device": "",
    }
    assert told("spec_decode_num_drafts_total") == 0


async def test_arrivals_that_the_engine_thread_has_not_seen_wait() -> None:
    async with running(tiny()) as served:
        with served._wake:
            streams = [served.submit(PROMPT, PARAMS) for _ in range(3)]
            assert scrape(served)("num_requests_waiting") == 3
        for stream in streams:
            await read(stream)
        assert scrape(served)("num_requests_waiting") == 0
