"""What an answer says is the same on every endpoint, streamed or whole, however a block of drafts ends it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import pytest

from server.app import create_app
from server.async_engine import AsyncEngine
from server.config import ServerConfig
from server.engine import Engine
from server.request import RequestParams
from tests.server.drafts import oracle
from tests.server.endpoints import WAYS, Prompt, Said, ask
from tests.server.engines import GREEDY, TinyTarget, make_engine, run_one, tiny_draft, tiny_target
from tests.server.http_util import DEADLINE_S, server_of
from tests.tiny import EOS_ID

K = 5
COUNT = 19  # the prompt's own token, then three full blocks with their bonus: 1 + 3 * 6
# Ends of the text after so many tokens: at the first one, in the middle and at the end of a block, at its bonus.
PLACES = [1, 3, K + 1, K + 2, K + 5]


def narrow() -> TinyTarget:
    """All its tokens but two special ones are a printable character: n tokens are n characters."""
    return tiny_target(97)


def prompt_of(target: TinyTarget, words: str) -> Prompt:
    messages = [{"role": "user", "content": words}]
    return Prompt(messages, target.tokenizer.encode_chat(messages))


@cache
def plain() -> tuple[Prompt, list[int], str]:
    """A prompt whose plain greedy answer has no special token and hardly a character twice; that answer."""
    engine = make_engine(target=narrow())
    for seed in range(100):
        prompt = prompt_of(narrow(), f"Hello {seed}")
        answer = run_one(engine, prompt.ids, RequestParams(GREEDY, max_tokens=COUNT))
        if len(answer.text) == COUNT and len(set(answer.ids)) >= COUNT - 3:
            return prompt, answer.ids, answer.text
    raise AssertionError("no prompt has such an answer")


def serving(engine: Engine) -> Iterator[httpx.Client]:
    engine.info["target"] = "tiny"
    with (
        server_of(create_app(AsyncEngine(engine), ServerConfig())) as url,
        httpx.Client(base_url=url, timeout=DEADLINE_S) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine(oracle(K, lambda _: plain()[1]), target=narrow())


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[httpx.Client]:
    """Of a server whose draft is always right, so that every block stands as far as it goes."""
    yield from serving(engine)


@pytest.fixture(scope="module")
def bytes_client() -> Iterator[httpx.Client]:
    """Of a server whose tokens are single bytes."""
    yield from serving(make_engine(tiny_draft("vanilla", K, agrees=True), eos=[EOS_ID]))


def all_ways(client: httpx.Client, prompt: Prompt, **fields: Any) -> list[Said]:
    """The six answers."""
    return [ask(client, path, prompt, stream=stream, **fields) for path, stream in WAYS]


def first_end(place: int) -> int:
    """Up to and with the first token that equals the one at `place`."""
    ids = plain()[1]
    return ids.index(ids[place - 1]) + 1


@pytest.mark.parametrize("count", [*range(1, K + 3), COUNT])
def test_max_tokens(client: httpx.Client, count: int) -> None:
    """Cases F1, F2, F5 and F8: cut inside a block, exactly so many tokens are delivered, counted and joined."""
    prompt, _, text = plain()
    for said in all_ways(client, prompt, temperature=0, max_tokens=count):
        assert said.ending == (text[:count], "length", count)


@pytest.mark.parametrize("place", PLACES)
def test_end_of_text(client: httpx.Client, engine: Engine, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases E1, E5 and F5: nothing of the block after it, one end of the stream; also where max_tokens ends, too."""
    prompt, ids, text = plain()
    end = first_end(place)
    monkeypatch.setattr(engine, "eos_token_ids", frozenset([ids[place - 1]]))
    for max_tokens in (COUNT, end):
        for said in all_ways(client, prompt, temperature=0, max_tokens=max_tokens):
            assert said.ending == (text[: end - 1], "stop", end)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [1, 4])
def test_stop_strings(client: httpx.Client, place: int, size: int) -> None:
    """Cases D1, D4, D5 and F2."""
    prompt, _, text = plain()
    stop = text[place - 1 : place - 1 + size]
    start = text.index(stop)
    for said in all_ways(client, prompt, temperature=0, max_tokens=COUNT, stop=[stop, "never"]):
        assert said.ending == (text[:start], "stop", start + size)


def test_the_earlier_of_stop_and_limit_ends_the_text(client: httpx.Client) -> None:
    """Case D2."""
    prompt, _, text = plain()
    for said in all_ways(client, prompt, temperature=0, max_tokens=5, stop=text[2:4]):
        assert said.ending == (text[:2], "stop", 4)
    for said in all_ways(client, prompt, temperature=0, max_tokens=3, stop=text[2:4]):
        assert said.ending == (text[:3], "length", 3)


def test_text_held_back_for_a_stop_that_never_comes_keeps_its_order(client: httpx.Client) -> None:
    """Case D7."""
    prompt, _, text = plain()
    almost = [text[place : place + 3] + "\x00" for place in range(0, COUNT, 2)]
    for said in all_ways(client, prompt, temperature=0, max_tokens=COUNT, stop=almost):
        assert said.ending == (text, "length", COUNT)


@pytest.mark.parametrize("stop", [None, []])
def test_no_stop_is_no_stop(client: httpx.Client, stop: Any) -> None:
    """Case D8."""
    prompt, _, text = plain()
    for said in all_ways(client, prompt, temperature=0, max_tokens=4, stop=stop):
        assert said.ending == (text[:4], "length", 4)


HELLO = prompt_of(tiny_target(), "Hello")
WORDS = "hi\U0001fae0\u9f9c\U0001f600é\ufffd!"  # with characters that are no single token anywhere


@pytest.mark.parametrize("speculative", [True, False])
def test_characters_come_whole(bytes_client: httpx.Client, speculative: bool) -> None:
    """Cases G1, G2, G3, G5 and G6: bytes are held until a character is whole, no longer, and none is lost."""
    fields: dict[str, Any] = {"structured_outputs": {"choice": [WORDS]}, "speculative": speculative, "max_tokens": 40}
    for said in all_ways(bytes_client, HELLO, logprobs=True, **fields):
        assert said.ending == (WORDS, "stop", len(WORDS.encode()))
        assert said.token_bytes.decode() == WORDS
        if not speculative and len(said.parts) > 1:
            assert said.parts == tuple(WORDS)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_character_that_is_cut_is_flushed_once(bytes_client: httpx.Client, size: int) -> None:
    """Case G2."""
    fields: dict[str, Any] = {"structured_outputs": {"choice": [WORDS]}, "max_tokens": 2 + size}
    for said in all_ways(bytes_client, HELLO, logprobs=True, **fields):
        assert said.ending == ("hi\ufffd", "length", 2 + size)
        assert said.token_bytes == WORDS.encode()[: 2 + size]
