"""Step costs are measured on the real engine, inside its memory, and put into curves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from server.profile import ENOUGH_SECONDS, MORE, Key, Probe, _measure, _slopes, profile
from tests.server.engines import check_idle, make_engine, run, tiny_draft
from tests.server.test_policy import GREEDY, RequestParams, make_prompt


def test_what_is_measured() -> None:
    engine = make_engine(tiny_draft("vanilla", 4), num_tokens=1024, max_num_seqs=5)
    told: list[tuple[int, int]] = []
    found = profile(engine, contexts=(100, 200, 5000), repeats=2, progress=lambda *count: told.append(count))
    curves = found.cost.curves
    assert curves.tokens == [*range(1, 11), 20, 25], "two blocks by rows, then whole blocks of more requests"
    assert curves.requests == [1, 2, 4, 5]
    assert len(curves.verify) == 12
    assert len(curves.first_slot) == len(curves.all_slots) == 4
    assert min(*curves.verify, *curves.first_slot, *curves.all_slots) > 0
    assert {key[1] for key in found.medians} == {64, 100, 200}, "a context that does not fit is left out"
    assert told[-1][0] == told[-1][1] >= len(found.medians) * 3, "one round that does not count, and two"
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert len(found.spread) == len(found.medians)
    check_idle(engine)
    (result,) = run(engine, [(make_prompt(30), RequestParams(GREEDY, max_tokens=9))])
    assert len(result.ids) == 9, "and it serves as before"


def test_a_target_without_a_draft() -> None:
    cost = profile(make_engine(), repeats=1).cost
    assert cost.curves.tokens[0] == 1
    assert set(cost.curves.all_slots) == {0.0}


def test_what_takes_little_is_measured_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its first time, which compiles and does not count, takes long, as do two more beside something else."""
    now, order, slow = [0.0], list[str](), (0, 1, 2)
    monkeypatch.setattr("server.profile.time.perf_counter", lambda: now[0])

    def taking(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            now[0] += 1.0 if order.count(name) in slow else seconds
            order.append(name)

        return run

    runs: dict[Key, Callable[[], object]] = {
        ("verify", 64, 1, rows): taking(name, seconds)
        for rows, (name, seconds) in enumerate((("short", 0.01), ("middle", 0.03), ("long", 1.0)))
    }
    found = _measure(runs, 3, lambda *_: None)
    assert [len(values) for values in found.values()] == [3 * MORE, int(ENOUGH_SECONDS / 0.03), 3]
    assert order[:12] == ["short", "middle", "long"] * 4, "in rounds"


def test_a_running_engine_is_not_measured() -> None:
    engine = make_engine()
    engine.add(engine.make_request([1, 2], RequestParams(GREEDY, max_tokens=4)))
    with pytest.raises(AssertionError):
        Probe(engine, context=10, block=1)


def medians(per_request: float, per_row: float, per_draft: float, rows: int = 8) -> dict[Key, float]:
    """Steps that cost exactly so much more with every token of context."""
    found: dict[Key, float] = {}
    for context in (64, 300, 1000):
        more = context - 64
        for count in (1, rows):
            found["verify", context, 1, count] = 0.01 * count + more * (per_request + per_row * count)
        found["draft", context, 1, 7] = 0.004 + more * per_draft
    return found


def test_what_context_adds_is_told_apart_by_request_and_by_row() -> None:
    assert _slopes(medians(2e-6, 3e-7, 1e-7), 64) == pytest.approx((2e-6, 3e-7, 1e-7))


def test_noise_makes_no_cost_negative() -> None:
    assert _slopes(medians(-1e-6, 3e-7, -1e-7), 64) == pytest.approx((0.0, 3e-7 - 1e-6 / 8, 0.0), abs=2e-8)
    assert _slopes(medians(-1e-6, -1e-6, 0.0), 64) == (0.0, 0.0, 0.0)
    assert _slopes({key: t for key, t in medians(1e-6, 1e-6, 0.0).items() if key[1] == 64}, 64) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_draft_that_computes_no_numbers_costs_what_others_cost(broken: float) -> None:
    """Case S3: it is a bad draft, and no reason not to start."""
    draft = tiny_draft.__wrapped__("vanilla", 4)  # not the one that all tests share
    with torch.no_grad():
        draft.norm.weight.fill_(broken)
    assert profile(make_engine(draft, num_tokens=1024), repeats=1).cost.draft_len == 4
