"""Who runs in a step, and with how many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest

from server.kv import KVMemory
from server.request import Request, RequestParams
from server.scheduler import MIN_CHUNK, RequestScheduler, Work
from tests.server.test_request import Letters

K = 4
unlike = count(5)  # prompts of different letters share nothing


def make_scheduler(
    num_pages: int = 64, *, draft_len: int = K, max_num_seqs: int = 8, budget: int = 64, prefix_cache: bool = True
) -> RequestScheduler:
    memory = KVMemory(num_pages, 16, prefix_cache=prefix_cache)
    return RequestScheduler(memory, draft_len=draft_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)


def add(
    scheduler: RequestScheduler,
    length: int,
    *,
    max_tokens: int = 100,
    speculative: bool = True,
    prompt: Sequence[int] = (),
) -> Request:
    request = Request(
        prompt_ids=[*prompt] or [next(unlike)] * length,
        params=RequestParams(speculative=speculative),
        max_tokens=max_tokens,
        stop_ids=frozenset(),
        key=0,
        detokenizer=Letters(),
    )
    scheduler.add(request)
    return request


def step(scheduler: RequestScheduler, accepted: int = 0) -> list[Work]:
    """Schedule, and pretend that the engine ran it and that `accepted` drafts of every block stood."""
    work = scheduler.schedule()
    for item in work:
        stand = min(accepted, item.num_slots)
        if item.decides:
            item.request.append([5] * (stand + 1))
        keeps = scheduler.keeps_context(item.request)
        scheduler.memory.commit(item.request.table, item.num_tokens + stand)
        scheduler.memory.publish(item.request.table, item.request.tokens, draft_context=keeps)
        scheduler.memory.rollback(item.request.table, len(item.request.tokens))
    scheduler.memory.check_integrity([r.table for r in [*scheduler.running, *scheduler.waiting]])
    return work


def shapes(work: list[Work]) -> list[tuple[int, int, bool]]:
    return [(item.num_tokens, item.num_slots, item.decides) for item in work]


def test_a_prompt_runs_in_chunks_and_decides_with_its_last() -> None:
    scheduler = make_scheduler(budget=40)
    add(scheduler, 100)
    assert [shapes(step(scheduler)) for _ in range(4)] == [
        [(40, 0, False)],
        [(40, 0, False)],
        [(20, 0, True)],
        [(1, K, True)],
    ]


def test_requests_run_in_the_order_of_their_arrival() -> None:
    scheduler = make_scheduler(budget=40, max_num_seqs=3)
    requests = [add(scheduler, 30) for _ in range(5)]
    assert [item.request for item in step(scheduler)] == requests[:2]
    assert [item.request for item in step(scheduler)][:2] == requests[:2]
    assert scheduler.running == requests[:3]
    assert list(scheduler.waiting) == requests[3:]
    scheduler.remove(requests[0])
    step(scheduler)
    assert scheduler.running == requests[1:4]


@pytest.mark.parametrize(
    ("max_tokens", "slots"), [(1, []), (2, [0]), (3, [1, 0]), (6, [4, 3, 2, 1, 0]), (9, [4, 4, 4, 4, 3, 2, 1, 0])]
)
def test_nothing_is_drafted_that_max_tokens_would_cut_off(max_tokens: int, slots: list[int]) -> None:
    scheduler = make_scheduler()
    request = add(scheduler, 10, max_tokens=max_tokens)
    step(scheduler)
    seen = []
    while not request.finished:
        seen.append(step(scheduler)[0].num_slots)
    assert seen == slots


def test_plain_requests_get_no_slots() -> None:
    scheduler = make_scheduler()
    add(scheduler, 5, speculative=False)
    step(scheduler)
    assert shapes(step(scheduler)) == [(1, 0, True)]


def test_decoders_run_in_every_step_of_a_long_prefill() -> None:
    """Case U1."""
    scheduler = make_scheduler(num_pages=256, budget=64)
    decoders = [add(scheduler, 5) for _ in range(3)]
    step(scheduler)
    long = add(scheduler, 2000)
    while long.pending > 1:
        work = step(scheduler)
        assert [item.request for item in work[:3]] == decoders
        chunk = sum(item.num_tokens for item in work if item.request is long)
        assert MIN_CHUNK <= chunk <= 64
        assert sum(item.num_tokens + item.num_slots for item in work) <= 64
    assert all(decoder.num_generated > 30 for decoder in decoders)


def test_many_decoders_do_not_starve_a_prompt() -> None:
    scheduler = make_scheduler(budget=8, max_num_seqs=16)
    for _ in range(10):
        add(scheduler, 2)
    while any(request.num_generated == 0 for request in scheduler.running) or scheduler.waiting:
        step(scheduler)
    late = add(scheduler, MIN_CHUNK)
    step(scheduler)
    assert late.num_generated == 1


@pytest.mark.parametrize("parts", [[120], [96, 24]])
def test_a_short_request_does_not_wait_for_long_prompts(parts: list[int]) -> None:
    """Case U1: nor does it keep them from going on."""
    scheduler = make_scheduler(num_pages=1024, budget=128)
    longs, short = [add(scheduler, 50 * 128) for _ in parts], add(scheduler, 8)
    assert shapes(step(scheduler)) == [*((part, 0, False) for part in parts), (8, 0, True)]
    assert short.num_generated == 1
    assert sum(item.num_tokens + item.num_slots for item in step(scheduler)) == 128, "no room is lost"
    assert not any(long.num_generated for long in longs)


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_pages=6)
    old, young = add(scheduler, 30), add(scheduler, 30)
    third = add(scheduler, 30)
    step(scheduler)
    assert scheduler.running == [old, young]
    generated = young.num_generated
    while young in scheduler.running:
        step(scheduler, accepted=K)
        generated = max(generated, young.num_generated)
    assert list(scheduler.waiting) == [young, third]
    assert (young.table.pages, young.table.kv_len) == ([], 0)
    assert young.num_generated == generated
    scheduler.remove(old)
    work = step(scheduler)
    assert work[0].request is young
    assert work[0].num_tokens == 30 + generated - 2 * 16, "the old one needed one of its three full pages"
    assert work[0].decides


def test_nobody_is_admitted_in_the_step_that_preempted() -> None:
    scheduler = make_scheduler(num_pages=6)
    old, young = add(scheduler, 30), add(scheduler, 30)
    step(scheduler)
    add(scheduler, 1)
    while young in scheduler.running:
        work = step(scheduler, accepted=K)
    assert [item.request for item in work] == [old]


def test_reservations_cover_the_whole_block() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, 16)
    step(scheduler)
    for _ in range(6):
        (item,) = scheduler.schedule()
        assert len(request.table.pages) * 16 >= request.table.kv_len + 1 + item.num_slots
        request.append([5] * (1 + item.num_slots))
        scheduler.memory.commit(request.table, 1 + item.num_slots)
        scheduler.memory.publish(request.table, request.tokens, draft_context=True)


def test_removing_works_wherever_a_request_stands() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting, unknown = add(scheduler, 20), add(scheduler, 20), add(make_scheduler(), 20)
    step(scheduler)
    for request in (waiting, running, unknown, running):
        scheduler.remove(request)
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.memory.num_free == 64


def test_a_lone_request_that_fills_memory_finishes() -> None:
    scheduler = make_scheduler(num_pages=2, draft_len=7)
    request = add(scheduler, 20, max_tokens=12)
    while not request.finished:
        step(scheduler, accepted=2)
    assert request.num_generated == 12


def first_steps(prompt: list[int], count: int, *, prefix_cache: bool = True) -> list[int]:
    """In which step each of `count` equal prompts gets its first token."""
    scheduler = make_scheduler(budget=512, prefix_cache=prefix_cache)
    requests = [add(scheduler, 0, prompt=prompt) for _ in range(count)]
    first: dict[int, int] = {}
    for number in range(1, 2 * count):
        step(scheduler)
        for index, request in enumerate(requests):
            if request.num_generated:
                first.setdefault(index, number)
    return list(first.values())


@pytest.mark.parametrize("length", [40, 48, 49, 10])
def test_equal_prompts_wait_for_the_first_of_them_once(length: int) -> None:
    assert first_steps([3] * length, 4) == ([1, 2, 2, 2] if length > 16 else [1, 1, 1, 1])
    assert first_steps([3] * length, 4, prefix_cache=False) == [1, 1, 1, 1]


def test_who_waits_for_a_page_does_not_stop_those_behind() -> None:
    scheduler = make_scheduler(budget=512)
    maker, waiter, other = add(scheduler, 0, prompt=[3] * 40), add(scheduler, 0, prompt=[3] * 40), add(scheduler, 40)
    assert [item.request for item in scheduler.schedule()] == [maker, other]
    assert waiter in scheduler.running


def test_only_what_was_used_counts_as_shared() -> None:
    scheduler = make_scheduler(num_pages=6, budget=512)
    done = add(scheduler, 0, prompt=[3] * 40)
    step(scheduler)
    scheduler.remove(done)
    add(scheduler, 50)
    for _ in range(5):
        step(scheduler)
        late = add(scheduler, 0, prompt=[3] * 40) if not scheduler.waiting else scheduler.waiting[0]
    assert late in scheduler.waiting
    assert scheduler.memory.shared_tokens == 0
