"""The demo model, exactly: speculation changes no token, a seed gives one text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from dspark_core.sampling import SamplingParams
from server.config import ServerConfig
from server.engine import Engine
from server.loader import load_engine
from server.request import RequestParams
from tests.server.engines import GREEDY, Result, run, run_one

pytestmark = pytest.mark.demo

COUNT = 64
CHATS = (
    "What is the capital of Iceland, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 180 km in 2.5 hours. What is its average speed? Show the steps.",
    "Übersetze ins Englische: Der Zug hat zwanzig Minuten Verspätung.",
    "Give me a recipe for a simple vegetable soup as a numbered list.",
    "Write a short poem about the first snow in a small town.",
    "Explain to a ten-year-old why the sky is blue.",
    "Write a polite e-mail that asks a colleague to move a meeting from Monday to Thursday.",
)
RAW = (
    "def is_prime(n):\n    if n < 2:\n        return False\n",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "SELECT name, COUNT(*) FROM orders",
    "Once upon a time, in a village at the foot of a mountain, there lived",
)
PLAIN = RequestParams(GREEDY, max_tokens=COUNT, speculative=False)
DRAFTED = RequestParams(GREEDY, max_tokens=COUNT)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(
        ServerConfig(max_model_len=512, max_num_seqs=8, dtype="float32", device="cpu", seed=0, verify="full")
    )


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    chats = [engine.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in CHATS]
    return [*chats, *map(engine.tokenizer.encode, RAW)]


@pytest.fixture(scope="module")
def plain(engine: Engine, prompts: list[list[int]]) -> list[Result]:
    """Plain greedy decoding of every prompt."""
    return run(engine, [(prompt, PLAIN) for prompt in prompts])


def test_plain_decoding_of_a_batch_is_that_of_each_alone(
    engine: Engine, prompts: list[list[int]], plain: list[Result]
) -> None:
    for index in (1, 8):
        assert run_one(engine, prompts[index], PLAIN).ids == plain[index].ids


def test_the_texts_are_worth_comparing(plain: list[Result]) -> None:
    assert len({result.text for result in plain}) == len(plain) == 12
    assert sum(len(result.ids) == COUNT for result in plain) >= 8
    assert "Iceland" in plain[0].text
    assert all(result.last.speculation.rounds == 0 for result in plain)


def test_greedy_text_of_each_alone_is_that_of_plain_decoding(
    engine: Engine, prompts: list[list[int]], plain: list[Result]
) -> None:
    results = [run_one(engine, prompt, DRAFTED) for prompt in prompts]
    for drafted, own in zip(results, plain, strict=True):
        assert (drafted.ids, drafted.text) == (own.ids, own.text)
        assert drafted.last.finish_reason == own.last.finish_reason
    accepted = sum(result.last.speculation.accepted for result in results)
    rounds = sum(result.last.speculation.rounds for result in results)
    # 1.41 when this was written, with the reference draft; one that does not see its context stays near 1.
    assert 1 + accepted / rounds > 1.3


def test_greedy_text_of_eight_at_once_is_that_of_plain_decoding(
    engine: Engine, prompts: list[list[int]], plain: list[Result]
) -> None:
    most = 0

    def count(engine: Engine) -> None:
        nonlocal most
        most = max(most, len(engine.scheduler.running))

    jobs = [(prompt, DRAFTED) for prompt in prompts]
    results = run(engine, jobs, arrivals=[0, 0, 0, 1, 1, 2, 3, 5, 5, 6, 8, 8], on_step=count)
    assert most == 8
    for drafted, own in zip(results, plain, strict=True):
        assert (drafted.ids, drafted.text) == (own.ids, own.text)


def test_a_seed_gives_one_text(engine: Engine, prompts: list[list[int]]) -> None:
    params = partial(RequestParams, SamplingParams(temperature=0.8, top_p=0.95, seed=11), max_tokens=24)
    first, second = prompts[5], prompts[11]
    alone = [run_one(engine, prompt, params()).ids for prompt in (first, second)]
    own = [run_one(engine, prompt, params(speculative=False)).ids for prompt in (first, second)]
    others = [(prompt, RequestParams(SamplingParams(), max_tokens=16)) for prompt in prompts[:4]]
    among = run(engine, [(first, params()), *others, (second, params())])
    assert alone == own == [among[0].ids, among[-1].ids]
    other_choice = run_one(engine, first, params(choice_index=1)).ids
    assert other_choice != alone[0]


@pytest.fixture(autouse=True)
def _memory_is_whole(engine: Engine) -> Iterator[None]:
    yield
    engine.memory.check_integrity([])
    assert engine.memory.num_free == engine.memory.num_pages
