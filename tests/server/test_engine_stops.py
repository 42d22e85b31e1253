"""Ends inside an accepted block: text, ids, usage and statistics are cut at the same token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from server.engine import Engine
from server.request import RequestParams, Speculation
from tests.server.drafts import ScriptedDrafter, oracle
from tests.server.engines import (
    GREEDY,
    Result,
    make_engine,
    make_prompt,
    run,
    run_one,
    tiny_target,
)

VOCAB_SIZE = 97  # every token but two special ones is a printable character: n tokens are n characters
K = 5
COUNT = 19  # the prompt's own token, then three full blocks with their bonus: 1 + 3 * 6
PARAMS = RequestParams(GREEDY, max_tokens=COUNT)
# Places in the output where a drafted round ends differently: after the prompt, at each slot of the first block, at
# its bonus, and the same in the second block.
PLACES = range(13)


@cache
def plain() -> Result:
    """The first text without special tokens and with hardly a character twice: one worth cutting."""
    engine = make_engine(target=tiny_target(VOCAB_SIZE))
    texts = (run_one(engine, make_prompt(12, seed=seed), PARAMS) for seed in range(100))
    return next(r for r in texts if len(r.text) == COUNT and len(set(r.ids)) >= COUNT - 3)


def prompt() -> list[int]:
    return plain().request.prompt_ids


def ids() -> list[int]:
    return plain().ids


def text() -> str:
    return plain().text


def engine_with(pattern: list[int], eos: Sequence[int] = ()) -> Engine:
    target = tiny_target(VOCAB_SIZE)
    return make_engine(ScriptedDrafter(K, lambda _: ids(), pattern, target), target=target, eos=eos)


def first_place(token: int) -> int:
    return ids().index(token)


def spent(emitted: int, drafted_for: int = COUNT) -> Speculation:
    """What an oracle's rounds add up to when the text ends after `emitted` tokens."""
    rounds = drafted = accepted = 0
    done = 1
    while done < emitted:
        slots = min(K, drafted_for - done - 1)
        if slots:
            rounds, drafted = rounds + 1, drafted + slots
            accepted += min(slots, emitted - done)
        done += slots + 1
    return Speculation(rounds, drafted, drafted, accepted)


@pytest.mark.parametrize("pattern", [[-1], [0], [0, 1, 3, 2]], ids=["oracle", "adversary", "scripted"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", ["eos", "stop_token_ids"])
def test_an_end_token_at_every_slot(pattern: list[int], place: int, how: str) -> None:
    """Cases E1 and F2."""
    token = ids()[place]
    end = first_place(token) + 1
    if how == "eos":
        result = run_one(engine_with(pattern, eos=[token]), prompt(), PARAMS)
    else:
        params = replace(PARAMS, stop_token_ids=frozenset([token]))
        result = run_one(engine_with(pattern), prompt(), params)
    assert result.ids == ids()[:end]
    assert result.text == text()[: end - 1]
    assert result.last.finish_reason == "stop"
    assert result.last.completion_tokens == end
    if pattern == [-1]:
        assert result.last.speculation == spent(end)


@pytest.mark.parametrize("pattern", [[-1], [0], [0, 1, 3, 2]], ids=["oracle", "adversary", "scripted"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [1, 3])
def test_a_stop_string_at_every_slot(pattern: list[int], place: int, size: int) -> None:
    """Cases D1 and F2."""
    stop = text()[place : place + size]
    start = text().index(stop)
    result = run_one(engine_with(pattern), prompt(), replace(PARAMS, stop=("never", stop)))
    assert result.text == text()[:start]
    assert result.ids == ids()[: start + size]
    assert result.last.finish_reason == "stop"
    assert result.last.completion_tokens == start + size
    if pattern == [-1]:
        assert result.last.speculation == spent(start + size)


@pytest.mark.parametrize("pattern", [[-1], [0], [2]], ids=["oracle", "adversary", "scripted"])
@pytest.mark.parametrize("max_tokens", range(1, K + 4))
def test_max_tokens_is_exact(pattern: list[int], max_tokens: int) -> None:
    """Cases F1 and F2."""
    result = run_one(engine_with(pattern), prompt(), replace(PARAMS, max_tokens=max_tokens))
    assert result.ids == ids()[:max_tokens]
    assert result.text == text()[:max_tokens]
    assert result.last.finish_reason == "length"
    if pattern == [-1]:
        assert result.last.speculation == spent(max_tokens, max_tokens)


def test_the_earliest_event_wins() -> None:
    """Case D2."""
    stop = text()[2:4]  # complete with token 4
    early = run_one(engine_with([-1]), prompt(), replace(PARAMS, stop=(stop,), max_tokens=6))
    assert (len(early.ids), early.text, early.last.finish_reason) == (4, text()[:2], "stop")
    capped = run_one(engine_with([-1]), prompt(), replace(PARAMS, stop=(stop,), max_tokens=3))
    assert (len(capped.ids), capped.text, capped.last.finish_reason) == (3, text()[:3], "length")
    eos = run_one(engine_with([-1], eos=[ids()[2]]), prompt(), replace(PARAMS, stop=(text()[1:4],)))
    assert (len(eos.ids), eos.text, eos.last.finish_reason) == (3, text()[:2], "stop")


@pytest.mark.parametrize("place", [2, K, K + 1])
def test_an_end_token_on_the_last_allowed_place_is_a_stop(place: int) -> None:
    """Case F5."""
    params = replace(PARAMS, max_tokens=first_place(ids()[place]) + 1)
    result = run_one(engine_with([-1], eos=[ids()[place]]), prompt(), params)
    assert (len(result.ids), result.last.finish_reason) == (params.max_tokens, "stop")
    string = run_one(engine_with([-1]), prompt(), replace(params, stop=(text()[place],)))
    assert (len(string.ids), string.last.finish_reason) == (params.max_tokens, "stop")


def test_ignore_eos_goes_on_past_eos_but_not_past_stop_tokens() -> None:
    """Case E4."""
    eos, stop = ids()[2], ids()[8]
    assert first_place(stop) > 2
    params = replace(PARAMS, ignore_eos=True)
    result = run_one(engine_with([-1], eos=[eos]), prompt(), params)
    assert (result.ids, result.text, result.last.finish_reason) == (ids(), text(), "length")
    stopped = run_one(engine_with([-1], eos=[eos]), prompt(), replace(params, stop_token_ids=frozenset([stop])))
    assert (len(stopped.ids), stopped.last.finish_reason) == (first_place(stop) + 1, "stop")


def texts_sent(result: Result) -> list[str]:
    return ["".join(delta.text for delta in result.deltas[: i + 1]) for i in range(len(result.deltas))]


@pytest.mark.parametrize("place", [0, 3, 7])
def test_no_character_of_a_stop_string_is_ever_sent(place: int) -> None:
    """Case D4."""
    stop = text()[place : place + 5]
    for pattern in ([-1], [0], [1, 2]):
        result = run_one(engine_with(pattern), prompt(), replace(PARAMS, stop=(stop,)))
        assert all(text()[:place].startswith(sent) for sent in texts_sent(result))
        assert result.text == text()[:place]


def test_text_held_back_for_a_stop_that_never_comes_is_sent_in_order() -> None:
    """Case D7."""
    almost = tuple(text()[place : place + 3] + "\x00" for place in range(0, COUNT, 2))
    for pattern in ([-1], [0], [1, 2]):
        result = run_one(engine_with(pattern), prompt(), replace(PARAMS, stop=almost))
        assert result.text == text()
        assert all(text().startswith(sent) for sent in texts_sent(result))
        assert max(len(delta.text) for delta in result.deltas[:-1]) <= K + 1 + 3


def test_text_is_sent_as_soon_as_it_is_certain() -> None:
    result = run_one(engine_with([-1]), prompt(), replace(PARAMS, stop=("\x00",)))
    assert [len(delta.text) for delta in result.deltas] == [1, 6, 6, 6]
    assert [delta.completion_tokens for delta in result.deltas] == [1, 7, 13, 19]


def test_ends_of_neighbours_do_not_touch_each_other() -> None:
    """One batch in which every row ends in another way and at another place."""
    stops = [
        replace(PARAMS, stop=(text()[4:6],)),
        replace(PARAMS, max_tokens=8),
        replace(PARAMS, stop_token_ids=frozenset([ids()[2]])),
        replace(PARAMS, speculative=False, stop=(text()[4:6],)),
        PARAMS,
    ]
    together = run(engine_with([-1]), [(prompt(), params) for params in stops])
    alone = [run_one(engine_with([0, 3]), prompt(), params) for params in stops]
    for a, b in zip(together, alone, strict=True):
        assert (a.ids, a.text, a.last.finish_reason) == (b.ids, b.text, b.last.finish_reason)


def test_a_character_cut_by_max_tokens_is_flushed_once() -> None:
    """Cases G1 and G2: tokens are single bytes; half a character at the end becomes a replacement character."""
    wide = tiny_target()
    full = run_one(make_engine(), prompt(), RequestParams(GREEDY, max_tokens=40))
    assert "\ufffd" in full.text
    for max_tokens in range(1, 40):
        drafter = oracle(K, lambda _: full.ids)
        result = run_one(make_engine(drafter), prompt(), RequestParams(GREEDY, max_tokens=max_tokens))
        assert result.text == wide.tokenizer.decode(full.ids[:max_tokens])
        assert result.ids == full.ids[:max_tokens]
