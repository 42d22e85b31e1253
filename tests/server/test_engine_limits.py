"""Bad requests, the context's end, aborts, scores that are not numbers: the engine and the neighbours live on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark_core.errors import RequestError
from dspark_core.models.decoder import TargetOutput
from dspark_core.sampling import SamplingParams
from server.engine import Engine
from server.request import Request, RequestParams
from tests.server.drafts import ScriptedDrafter, oracle
from tests.server.engines import (
    GREEDY,
    MAX_MODEL_LEN,
    Result,
    check_idle,
    make_engine,
    make_prompt,
    reference_greedy,
    run,
    run_one,
    tiny_draft,
    tiny_target,
)

COUNT = 20
PARAMS = RequestParams(GREEDY, max_tokens=COUNT)


def expected(prompt: list[int], count: int = COUNT) -> list[int]:
    return reference_greedy(tuple(prompt), count)


def continuation(request: Request) -> list[int]:
    return expected(request.prompt_ids)


@pytest.mark.parametrize(
    ("prompt", "fields", "field", "words"),
    [
        ([], {}, "prompt", ["empty"]),
        ([5, -1], {}, "prompt_ids", ["-1", "0 to 257"]),
        ([258], {}, "prompt_ids", ["258", "0 to 257"]),
        ([10**30], {}, "prompt_ids", ["vocabulary"]),
        ([5] * 64, {}, "prompt", ["64", "63"]),
        ([5] * 640, {"max_tokens": 1}, "prompt", ["640", "64"]),
        ([5] * 60, {"max_tokens": 5}, "max_tokens", ["60", "5", "65", "64"]),
        ([5], {"max_tokens": 10**9}, "max_tokens", ["1000000000", "64"]),
        ([5], {"stop_token_ids": frozenset([3, 258])}, "stop_token_ids", ["258", "0 to 257"]),
        ([5], {"sampling": SamplingParams(logit_bias=((258, 9.0),))}, "logit_bias", ["258", "0 to 257"]),
    ],
)
def test_a_bad_request_is_refused_by_name(
    prompt: list[int], fields: dict[str, Any], field: str, words: list[str]
) -> None:
    """Cases F7, I1, I3 and R2."""
    engine = make_engine(tiny_draft("vanilla", 4), max_model_len=64)
    with pytest.raises(RequestError) as raised:
        engine.make_request(prompt, replace(RequestParams(GREEDY), **fields))
    assert raised.value.field == field
    assert all(word in str(raised.value) for word in words)
    check_idle(engine)
    assert run_one(engine, [5], PARAMS).ids == expected([5])


@pytest.mark.parametrize("length", [40, 56, 60, 62, 63])
@pytest.mark.parametrize("page_size", [16, 64])
def test_the_context_ends_exactly(length: int, page_size: int) -> None:
    """Cases F6 and I6."""
    prompt, room = make_prompt(length, seed=4), 64 - length
    for draft in (oracle(7, lambda _: expected(prompt, 63)), tiny_draft("vanilla", 7, agrees=True), None):
        engine = make_engine(draft, max_model_len=64, page_size=page_size, num_tokens=64)
        for max_tokens in {None, room, max(room - 1, 1), max(room - 7, 1), 1}:
            result = run_one(engine, prompt, RequestParams(GREEDY, max_tokens=max_tokens))
            assert result.ids == expected(prompt, 63)[: room if max_tokens is None else max_tokens]
            assert result.last.finish_reason == "length"


def test_the_last_position_of_the_model_is_used() -> None:
    """Case I7."""
    prompt = make_prompt(MAX_MODEL_LEN - 9)
    for draft in (oracle(7, lambda _: expected(prompt, 9)), tiny_draft("vanilla", 7, agrees=True)):
        engine = make_engine(draft, num_tokens=MAX_MODEL_LEN)
        result = run_one(engine, prompt, RequestParams(GREEDY))
        assert result.ids == expected(prompt, 9)
        assert result.last.speculation.drafted >= 7


def test_memory_for_less_than_one_request_is_refused() -> None:
    with pytest.raises(ValueError, match="holds 240 tokens, expected 256"):
        make_engine(num_tokens=240)


@pytest.mark.parametrize("page_size", [16, 64])
def test_no_page_is_lost_over_many_requests(page_size: int) -> None:
    """Case P1."""
    engine = make_engine(
        ScriptedDrafter(5, continuation, [0, 2, 5, 1]), page_size=page_size, num_tokens=512, max_num_seqs=8
    )
    jobs = [(make_prompt(1 + i % 11, seed=i % 2), replace(PARAMS, max_tokens=1 + i % COUNT)) for i in range(80)]
    for result in run(engine, jobs):
        assert result.ids == continuation(result.request)[: result.request.max_tokens]


@pytest.mark.parametrize("seed", range(4))
def test_aborts_at_random_moments_free_everything(seed: int) -> None:
    """Cases H4 and H5."""
    dice = random.Random(seed)
    draft = tiny_draft("vanilla", 5, agrees=True) if seed % 2 else ScriptedDrafter(5, continuation, [0, 2, 5])
    engine = make_engine(draft, max_num_seqs=2, num_tokens=256, max_num_batched_tokens=32)
    jobs = [(make_prompt(dice.choice([1, 16, 90]), seed=i % 4), PARAMS) for i in range(20)]
    arrivals = [dice.randrange(30) for _ in jobs]
    aborts = {i: arrivals[i] + dice.choice([0, 1, 2, 5, 30]) for i in range(20) if i % 5}
    results = run(engine, jobs, arrivals=arrivals, aborts=aborts)
    reasons = [result.last.finish_reason for result in results]
    assert set(reasons) == {"abort", "length"}
    for result in results:
        assert result.ids == continuation(result.request)[: len(result.ids)]
        assert engine.abort(result.request) is None
    assert run_one(engine, [7, 8], PARAMS).ids == expected([7, 8])


class Tampered:
    """A target whose scores are overwritten wherever it reads one token."""

    def __init__(self, engine: Engine, token: int, value: float) -> None:
        self.real, self.token, self.value = engine.target, token, value
        self.device, self.config = engine.target.device, engine.target.config

    def __call__(self, batch: Any, pool: Any, *, logit_rows: torch.Tensor, tap: Any) -> TargetOutput:
        output: TargetOutput = self.real(batch, pool, logit_rows=logit_rows, tap=tap)
        output.logits[batch.token_ids[logit_rows] == self.token] = self.value
        return output


def poison_of(victim: list[int], neighbours: list[list[int]]) -> int:
    """A token that the victim emits after some others, and that no neighbour reads or emits."""
    others = {token for prompt in neighbours for token in [*prompt, *expected(prompt)]}
    return next(t for t in expected(victim)[3:] if t not in others and t not in victim)


VICTIM, NEIGHBOURS = make_prompt(9, seed=11), [make_prompt(30, seed=12), make_prompt(14, seed=13)]
SAMPLED = RequestParams(SamplingParams(seed=1), max_tokens=COUNT)


def check_only_the_victim_failed(results: list[Result], poison: int) -> None:
    victim, *neighbours = results
    assert victim.last.error is not None
    assert "finite" in victim.last.error
    assert victim.last.finish_reason is None
    right = expected(VICTIM)
    assert victim.ids == right[: len(victim.ids)]
    assert len(victim.ids) <= right.index(poison) + 1
    for result in neighbours:
        assert result.last.finish_reason == "length"
        if result.request.params.sampling.greedy:
            assert result.ids == expected(result.request.prompt_ids)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("speculative", [True, False])
def test_scores_that_are_not_finite_end_one_request_only(value: float, speculative: bool) -> None:
    """Case S3."""
    poison = poison_of(VICTIM, NEIGHBOURS)
    engine = make_engine(oracle(5, continuation))
    engine.target = Tampered(engine, poison, value)  # type: ignore[assignment]
    jobs = [(VICTIM, replace(PARAMS, speculative=speculative)), *((p, PARAMS) for p in NEIGHBOURS)]
    check_only_the_victim_failed(run(engine, jobs), poison)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(seed=3), SamplingParams(top_p=0.5)], ids=str)
def test_scores_that_are_not_finite_end_a_sampled_request(sampling: SamplingParams) -> None:
    engine = make_engine(tiny_draft("vanilla", 4, agrees=True))
    jobs = [(VICTIM, RequestParams(sampling, max_tokens=COUNT)), (NEIGHBOURS[0], PARAMS)]
    undisturbed = run(engine, jobs)
    engine.target = Tampered(engine, VICTIM[-1], float("nan"))  # type: ignore[assignment]
    victim, neighbour = run(engine, jobs)
    assert victim.last.error is not None
    assert victim.ids == []
    assert neighbour.ids == undisturbed[1].ids == expected(NEIGHBOURS[0])


@contextmanager
def nan_embedding(token: int) -> Iterator[None]:
    """The real thing: every key and value computed from this token is NaN."""
    weight = tiny_target().model.embed_tokens.weight.data
    saved = weight[token].clone()
    weight[token] = float("nan")
    try:
        yield
    finally:
        weight[token] = saved


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("kind", ["oracle", "vanilla", "plain"])
def test_nan_in_memory_does_not_reach_whoever_gets_the_pages_next(page_size: int, kind: str) -> None:
    drafts: dict[str, Any] = {"oracle": oracle(5, continuation), "vanilla": tiny_draft("vanilla", 5, agrees=True)}
    engine = make_engine(drafts.get(kind), page_size=page_size, num_tokens=256)
    poison = poison_of(VICTIM, NEIGHBOURS)
    # A real draft may propose the poison to a neighbour, whom the verification would then rightly end as well.
    own = replace(PARAMS, speculative=kind == "oracle")
    jobs = [(VICTIM, PARAMS), *((p, own) for p in NEIGHBOURS)]
    alone = [run_one(engine, prompt, params).last.speculation for prompt, params in jobs[1:]]
    with nan_embedding(poison):
        results = run(engine, jobs)
    check_only_the_victim_failed(results, poison)
    assert [result.last.speculation for result in results[1:]] == alone
    for prompt, params in jobs:
        assert run_one(engine, prompt, params).ids == expected(prompt)


@pytest.mark.parametrize("step", [1, 2])
def test_nan_of_an_aborted_prompt_does_not_reach_whoever_gets_the_pages_next(step: int) -> None:
    engine = make_engine(tiny_draft("vanilla", 4, agrees=True), num_tokens=256, max_num_batched_tokens=32)
    prompt, neighbour = [*make_prompt(10), 250, *make_prompt(100, seed=1)], make_prompt(20, seed=3)
    with nan_embedding(250):
        (result,) = run(engine, [(prompt, PARAMS)], aborts={0: step})
    assert result.ids == []
    assert run_one(engine, neighbour, PARAMS).ids == expected(neighbour)
