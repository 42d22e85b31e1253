"""A request on the host: where it stops, what its client is told, and the search for stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.request import Request, RequestParams, Speculation, StopStrings, TokenLogprob

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)
MANY = settings(max_examples=1000)
EOS = 0


class Letters:
    """A token is a letter; capital ones come in pairs and show only when the second is there."""

    def __init__(self) -> None:
        self.held = ""

    def step(self, token_id: int) -> str:
        letter = chr(token_id) if token_id != EOS else ""
        if letter.isupper() and not self.held:
            self.held = letter
            return ""
        text, self.held = self.held + letter, ""
        return text

    def flush(self) -> str:
        text, self.held = self.held and "?", ""
        return text


def make_request(**fields: object) -> Request:
    params = RequestParams(**fields)  # type: ignore[arg-type]
    return Request(
        prompt_ids=[1, 2, 3],
        params=params,
        max_tokens=params.max_tokens or 100,
        stop_ids=params.stop_token_ids | {EOS},
        key=0,
        detokenizer=Letters(),
    )


def ids(text: str) -> list[int]:
    return [ord(letter) if letter != "." else EOS for letter in text]


def first_match(text: str, stops: list[str]) -> int | None:
    """Where the text is cut: before the stop that is complete first, the longest of those complete together."""
    for end in range(len(text) + 1):
        ending = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end - max(ending)
    return None


def pieces(text: str, sizes: list[int]) -> list[str]:
    cut, out = 0, []
    for size in sizes:
        out.append(text[cut : cut + size])
        cut += size
    return [*out, text[cut:]]


@MANY
@given(LETTERS, STOPS, st.lists(st.integers(0, 4), max_size=6))
def test_stops_cut_at_the_first_match_however_the_text_comes(text: str, stops: list[str], sizes: list[int]) -> None:
    search = StopStrings(stops)
    sent = ""
    for piece in pieces(text, sizes):
        sent += search.feed(piece)
        assert len(sent) + len(search.held) <= len(text)
    sent += search.rest()
    end = first_match(text, stops)
    assert sent == text[:end]
    assert search.found == (end is not None)


@MANY
@given(LETTERS, STOPS, st.lists(st.integers(0, 4), max_size=6))
def test_stops_hold_back_only_what_could_become_one(text: str, stops: list[str], sizes: list[int]) -> None:
    search = StopStrings(stops)
    for piece in pieces(text, sizes):
        search.feed(piece)
        assert search.held == "" or any(stop.startswith(search.held) and stop != search.held for stop in stops)


def test_nothing_comes_after_a_stop() -> None:
    search = StopStrings(["b"])
    assert search.feed("abab") == "a"
    assert search.found
    assert search.feed("aaa") == ""
    assert search.rest() == ""


def test_without_stops_text_passes_at_once() -> None:
    search = StopStrings([])
    assert [search.feed("a"), search.feed(""), search.feed("bc"), search.rest()] == ["a", "", "bc", ""]
    assert not search.found


@pytest.mark.parametrize(
    ("fields", "tokens", "taken", "text", "reason"),
    [
        ({}, "abc", 3, "abc", None),
        ({}, "ab.cd", 3, "ab", "stop"),
        ({}, ".", 1, "", "stop"),
        ({"max_tokens": 2}, "abcd", 2, "ab", "length"),
        ({"max_tokens": 3}, "ab.d", 3, "ab", "stop"),
        ({"max_tokens": 2}, "ab.d", 2, "ab", "length"),
        ({"stop": ("bc",)}, "abcd", 3, "a", "stop"),
        ({"stop": ("bc",), "max_tokens": 3}, "abcd", 3, "a", "stop"),
        ({"stop": ("bc",), "max_tokens": 2}, "abcd", 2, "ab", "length"),
        ({"stop": ("bc",)}, "ab.", 3, "ab", "stop"),
        ({"stop_token_ids": frozenset([ord("c")])}, "abcd", 3, "ab", "stop"),
        ({"max_tokens": 2}, "aBC", 2, "a?", "length"),
        ({}, "aB.", 3, "a?", "stop"),
        ({"stop": ("?",), "max_tokens": 2}, "aB", 2, "a", "stop"),
        ({"stop": ("a?",)}, "aB.", 3, "", "stop"),
        ({"stop": ("BC",)}, "aBCd", 3, "a", "stop"),
        ({"stop": ("B",)}, "aBCd", 3, "a", "stop"),
    ],
)
def test_the_earliest_event_ends_a_round(
    fields: dict[str, object], tokens: str, taken: int, text: str, reason: str | None
) -> None:
    whole = make_request(**fields)
    assert whole.append(ids(tokens)) == taken
    singly = make_request(**fields)
    for token in ids(tokens):
        if not singly.finished:
            assert singly.append([token]) == 1
    for request in (whole, singly):
        assert request.finish_reason == reason
        assert request.num_generated == taken
        assert list(request.output_ids) == ids(tokens)[:taken]
    delta = whole.take_delta()
    assert delta is not None
    assert (delta.text, delta.token_ids, delta.completion_tokens) == (text, ids(tokens)[:taken], taken)
    assert (delta.finish_reason, delta.last) == (reason, reason is not None)


def test_ids_wait_for_their_text_and_are_told_once() -> None:
    request = make_request()
    request.append(ids("B"))
    assert request.take_delta() is None
    request.append(ids("Ca"))
    delta = request.take_delta()
    assert delta is not None
    assert (delta.text, delta.token_ids) == ("BCa", ids("BCa"))
    request.append(ids("."))
    last = request.take_delta()
    assert last is not None
    assert (last.text, last.token_ids, last.finish_reason, last.completion_tokens) == ("", [EOS], "stop", 4)


def test_logprobs_travel_with_their_ids() -> None:
    entries = [TokenLogprob(token, -1.0, ()) for token in ids("aB.cd")]
    request = make_request(logprobs=0)
    request.append(ids("aB.cd"), entries)
    delta = request.take_delta()
    assert delta is not None
    assert delta.logprobs == entries[:3]
    assert make_request().abort().logprobs is None


def test_an_abort_tells_what_was_not_yet_told() -> None:
    request = make_request(stop=("bc",))
    request.append(ids("ab"))
    delta = request.abort()
    assert (delta.text, delta.token_ids, delta.finish_reason, delta.error) == ("a", ids("ab"), "abort", None)
    assert request.finished


def test_a_failure_has_an_error_and_no_finish_reason() -> None:
    request = make_request()
    request.append(ids("a"))
    delta = request.fail("broken")
    assert (delta.text, delta.finish_reason, delta.error, delta.last) == ("a", None, "broken", True)
    assert request.finished


def test_rounds_add_up() -> None:
    request = make_request()
    request.count_round(drafted=4, verified=4, accepted=1, decided=2)
    request.count_round(drafted=4, verified=2, accepted=2, decided=2)
    assert request.speculation == Speculation(rounds=2, drafted=8, verified=6, accepted=3)
    assert request.speculation.acceptance_length == 2.5
    assert Speculation().acceptance_length == 1.0


def test_requests_are_told_apart_even_when_they_ask_the_same() -> None:
    shared = Letters()
    first, second = (
        Request(prompt_ids=[1], params=RequestParams(), max_tokens=5, stop_ids=frozenset(), key=0, detokenizer=shared)
        for _ in range(2)
    )
    queue = [first, second]
    queue.remove(second)
    assert queue[0] is first
