"""The prefix cache through the engine: nothing but the work changes, the draft's context comes back with it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark_core.draft.backbone import DraftModel
from dspark_core.sampling import SamplingParams
from server.engine import Engine
from server.request import Request, RequestParams
from server.scheduler import Work
from tests.server.drafts import ScriptedDrafter, oracle
from tests.server.engines import (
    GREEDY,
    AnyDrafter,
    Result,
    make_engine,
    make_prompt,
    reference_greedy,
    run,
    run_one,
    tiny_draft,
)
from tests.server.policies import Lengths

COUNT = 20
PAGE = 16
PARAMS = RequestParams(GREEDY, max_tokens=COUNT)
PLAIN = RequestParams(GREEDY, max_tokens=COUNT, speculative=False)
SEEDED = RequestParams(SamplingParams(temperature=1.0, seed=3), max_tokens=COUNT)
LONG = make_prompt(100)


def expected(prompt: Sequence[int]) -> list[int]:
    return reference_greedy(tuple(prompt), COUNT)


def continuation(request: Request) -> list[int]:
    return expected(request.prompt_ids)


def make_draft(kind: str) -> AnyDrafter | DraftModel:
    """The scripted one checks that its context is that of the committed tokens, whoever computed them."""
    return ScriptedDrafter(5, continuation, [0, 2, 5]) if kind == "scripted" else tiny_draft(kind, 5, agrees=True)


def computed_prompts(engine: Engine) -> list[int]:
    """Sizes of the parts of prompts that the engine computes from here on."""
    seen: list[int] = []
    schedule = engine.scheduler.schedule

    def note() -> list[Work]:
        work = schedule()
        seen.extend(item.num_tokens for item in work if item.request.num_generated == 0)
        return work

    engine.scheduler.schedule = note  # type: ignore[method-assign]
    return seen


def same(first: Result, second: Result) -> bool:
    """Text, and what was drafted and accepted in every round."""
    rounds = [result.request.decided_and_accepted for result in (first, second)]
    return first.ids == second.ids and rounds[0] == rounds[1] and first.last.speculation == second.last.speculation


@pytest.mark.parametrize("kind", ["scripted", "vanilla", "rnn"])
@pytest.mark.parametrize("params", [PARAMS, SEEDED], ids=["greedy", "seeded"])
def test_acceptance_with_a_warm_cache_is_that_of_a_cold_one(kind: str, params: RequestParams) -> None:
    """Case P4."""
    cold = run_one(make_engine(make_draft(kind), prefix_cache=False), LONG, params)
    engine = make_engine(make_draft(kind))
    first = run_one(engine, LONG, params)
    assert engine.memory.shared_tokens == 0
    parts = computed_prompts(engine)
    warm = run_one(engine, LONG, params)
    assert engine.memory.shared_tokens == len(LONG) // PAGE * PAGE
    assert parts == [len(LONG) % PAGE]
    assert same(cold, first)
    assert same(cold, warm)
    assert kind != "vanilla" or cold.last.speculation.accepted > 0


@pytest.mark.parametrize("kind", ["scripted", "vanilla"])
def test_pages_of_a_plain_request_have_no_context_for_a_draft(kind: str) -> None:
    cold = run_one(make_engine(make_draft(kind), prefix_cache=False), LONG, PARAMS)
    engine = make_engine(make_draft(kind))
    run_one(engine, LONG, PLAIN)
    assert same(run_one(engine, LONG, PARAMS), cold)
    assert engine.memory.shared_tokens == 0
    assert run_one(engine, LONG, PLAIN).ids == expected(LONG)
    assert engine.memory.shared_tokens > 0


def test_an_answer_is_cached_for_the_next_turn() -> None:
    """Case P6."""
    engine = make_engine(make_draft("vanilla"))
    first = run_one(engine, LONG, PARAMS)
    conversation = [*LONG, *first.ids, *make_prompt(30, seed=9)]
    assert run_one(engine, conversation, PARAMS).ids == expected(conversation)
    # The last token emitted was not run through the target.
    assert engine.memory.shared_tokens == (len(LONG) + COUNT - 1) // PAGE * PAGE


@pytest.mark.parametrize("kind", ["scripted", "vanilla"])
def test_the_token_that_ended_an_answer_is_part_of_the_next_turn(kind: str) -> None:
    """Case D9."""
    engine = make_engine(make_draft(kind), eos=[expected(LONG)[12]])
    first = run_one(engine, LONG, PARAMS)
    assert (first.last.finish_reason, first.ids) == ("stop", expected(LONG)[: len(first.ids)])
    conversation = [*LONG, *first.ids, *make_prompt(30, seed=9)]
    cold = run_one(make_engine(make_draft(kind), prefix_cache=False), conversation, PARAMS)
    assert same(run_one(engine, conversation, replace(PARAMS, ignore_eos=True)), cold)
    assert engine.memory.shared_tokens == (len(LONG) + len(first.ids) - 1) // PAGE * PAGE


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 6 * PAGE, 6 * PAGE + 1])
def test_a_known_prompt_still_decides_its_first_token(length: int) -> None:
    engine = make_engine(make_draft("vanilla"))
    for _ in range(2):
        assert run_one(engine, make_prompt(length), PARAMS).ids == expected(make_prompt(length))
    assert engine.memory.shared_tokens == (length - 1) // PAGE * PAGE


def test_one_token_answers_leave_their_prompt() -> None:
    engine = make_engine(make_draft("vanilla"))
    for _ in range(2):
        run_one(engine, LONG, RequestParams(GREEDY, max_tokens=1))
    assert engine.memory.shared_tokens == len(LONG) // PAGE * PAGE


@pytest.mark.parametrize("budget", [512, 40])
def test_requests_that_arrive_together_compute_their_common_beginning_once(budget: int) -> None:
    engine = make_engine(make_draft("vanilla"), max_num_batched_tokens=budget)
    prompts = [[*LONG[:96], *make_prompt(4, seed=seed)] for seed in range(1, 7)]
    parts = computed_prompts(engine)
    for result in run(engine, [(prompt, PARAMS) for prompt in prompts]):
        assert result.ids == expected(result.request.prompt_ids)
    assert sum(parts) == 96 + 4 * len(prompts)


def test_who_waits_for_a_page_goes_on_when_its_maker_leaves() -> None:
    engine = make_engine(make_draft("vanilla"), max_num_batched_tokens=32)
    results = run(engine, [(LONG, PARAMS), (LONG, PARAMS)], aborts={0: 2})
    assert results[0].last.finish_reason == "abort"
    assert results[1].ids == expected(LONG)


def test_a_conversation_that_differs_early_shares_nothing_after() -> None:
    engine = make_engine(make_draft("scripted"))
    other = [*LONG[:20], LONG[20] + 1, *LONG[21:]]
    for prompt in (LONG, other, LONG):
        assert run_one(engine, prompt, PARAMS).ids == expected(prompt)
    assert engine.memory.shared_tokens == PAGE + len(LONG) // PAGE * PAGE


@pytest.mark.parametrize("kind", ["scripted", "vanilla", "rnn"])
@pytest.mark.parametrize("seed", range(4))
def test_many_requests_in_little_memory_keep_their_texts(kind: str, seed: int) -> None:
    """Cases P2 and P3: all kinds of requests share, evict and preempt; the harness checks memory at every step."""
    draw = random.Random(seed)
    budget = draw.choice((33, 40, 64, 128))
    memory = {"num_tokens": 256, "max_model_len": 128, "max_num_seqs": 5}
    engine = make_engine(make_draft(kind), max_num_batched_tokens=budget, **memory)
    if seed % 2:  # else whole blocks
        engine.policy = Lengths(
            lambda _, limits: [draw.randint(0, limit) for limit in limits],
            lambda slots, _: [draw.randint(0, count) for count in slots],
        )
    stems = [make_prompt(length, seed=stem) for stem, length in enumerate((10, 33, 64, 80))]
    jobs = []
    for _ in range(32):
        stem = draw.choice(stems)
        prompt = [*stem[: draw.randint(1, len(stem))], *make_prompt(draw.randint(0, 20), seed=draw.randint(5, 6))]
        jobs.append((prompt, draw.choice((PARAMS, PARAMS, PLAIN))))
    arrivals = [draw.randint(0, 60) for _ in jobs]
    aborted = draw.sample(range(len(jobs)), 4)
    aborts = {index: arrivals[index] + draw.randint(0, 12) for index in aborted}
    for result in run(engine, jobs, arrivals=arrivals, aborts=aborts):
        text = expected(result.request.prompt_ids)
        assert result.ids == (text[: len(result.ids)] if result.last.finish_reason == "abort" else text)
    assert engine.memory.shared_tokens > 0
    assert engine.scheduler.num_preemptions > 0


def test_a_step_that_failed_leaves_nothing_to_be_found() -> None:
    engine = make_engine(oracle(4, continuation), max_num_batched_tokens=64)
    engine.add(engine.make_request(LONG, PARAMS))
    engine.step()
    engine.fail_running("it broke")
    assert engine.memory.cache is not None
    assert engine.memory.cache.num_idle == 0
    assert run_one(engine, LONG, PARAMS).ids == expected(LONG)


def test_a_self_test_does_not_spoil_cached_pages() -> None:
    engine = make_engine(make_draft("vanilla"))
    run_one(engine, LONG, PARAMS)
    engine.self_test()
    assert run_one(engine, LONG, PARAMS).ids == expected(LONG)


@pytest.mark.parametrize("budget", [512, 32])
def test_scores_that_are_not_finite_are_not_kept(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    """Keys broken in the first step spoil the request, all parts of its prompt, and nobody after it."""
    engine = make_engine(make_draft("vanilla"), max_num_batched_tokens=budget)
    forward = engine.target.forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits.fill_(torch.nan)
        engine.pool.values.fill_(torch.nan)
        monkeypatch.undo()
        return output

    monkeypatch.setattr(engine.target, "forward", broken)
    assert run_one(engine, LONG, PARAMS).last.error
    assert run_one(engine, LONG, PARAMS).ids == expected(LONG)
    assert engine.memory.shared_tokens == 0
