"""Sampled text: the coupled rule depends on the seed alone, the ratio rule is fresh and reproducible by server seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark_core.sampling import SamplingParams
from server import scheduler
from server.request import Request, RequestParams
from tests.server.drafts import ScriptedDrafter
from tests.server.engines import (
    GREEDY,
    make_engine,
    make_prompt,
    reference_greedy,
    run,
    run_one,
    target_logits,
    tiny_draft,
)

COUNT = 16
PROMPT = make_prompt(21, seed=3)
SEEDED = SamplingParams(temperature=1.0, seed=7)
FILTERED = SamplingParams(
    temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, frequency_penalty=0.5, repetition_penalty=1.2, seed=7
)
RULES = pytest.mark.parametrize("sampling", [SEEDED, FILTERED], ids=["pure", "filtered"])


def params(sampling: SamplingParams, **fields: Any) -> RequestParams:
    return replace(RequestParams(sampling, max_tokens=COUNT), **fields)


def plain_text(sampling: SamplingParams, prompt: Sequence[int] = PROMPT) -> list[int]:
    return run_one(make_engine(), prompt, params(sampling)).ids


@RULES
def test_a_seed_gives_one_text_whatever_the_draft(sampling: SamplingParams) -> None:
    """Case C1."""
    expected = plain_text(sampling)
    assert len(set(expected)) > 4
    for draft_len in range(1, 8):
        for pattern in ([-1], [0], [0, 1, 3, 7]):
            engine = make_engine(ScriptedDrafter(draft_len, lambda _: expected, pattern))
            assert run_one(engine, PROMPT, params(sampling)).ids == expected
        engine = make_engine(tiny_draft(("vanilla", "gated", "rnn", "none")[draft_len % 4], draft_len))
        assert run_one(engine, PROMPT, params(sampling)).ids == expected
        assert run_one(engine, PROMPT, params(sampling, speculative=False)).ids == expected


@RULES
@pytest.mark.parametrize("server_seed", [1, None])
def test_a_seed_gives_one_text_among_eight_others(sampling: SamplingParams, server_seed: int | None) -> None:
    """Cases B11, C2 and C4."""
    expected = plain_text(sampling)
    others = [GREEDY, SamplingParams(temperature=0.1), SamplingParams(seed=8), SamplingParams(top_k=3, seed=7)]
    jobs = [(make_prompt(5 + 9 * i, seed=i), params(others[i % 4])) for i in range(8)]
    engine = make_engine(tiny_draft("vanilla", 5, agrees=True), seed=server_seed, page_size=64)
    for place in (0, 4, 8):
        mixed = [*jobs[:place], (PROMPT, params(sampling)), *jobs[place:]]
        results = run(engine, mixed, arrivals=[i % 5 for i in range(9)])
        assert results[place].ids == expected
        for (prompt, own), result in zip(mixed, results, strict=True):
            if own.sampling.greedy:
                assert result.ids == reference_greedy(tuple(prompt), COUNT)


@RULES
def test_a_seed_gives_one_text_after_preemption_and_in_other_chunks(
    monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams
) -> None:
    monkeypatch.setattr(scheduler, "MIN_CHUNK", 1)
    preempted: list[Request] = []
    preempt = scheduler.RequestScheduler._preempt

    def count(self: scheduler.RequestScheduler, request: Request) -> None:
        preempted.append(request)
        preempt(self, request)

    monkeypatch.setattr(scheduler.RequestScheduler, "_preempt", count)
    prompts = [make_prompt(14 + i, seed=i) for i in range(6)]
    alone = [plain_text(sampling, prompt) for prompt in prompts]
    engine = make_engine(
        tiny_draft("rnn", 7), num_tokens=80, max_model_len=64, max_num_batched_tokens=25, max_num_seqs=6
    )
    results = run(engine, [(prompt, params(sampling)) for prompt in prompts])
    assert any(request.num_generated for request in preempted)
    assert [result.ids for result in results] == alone


def test_coupling_lets_a_draft_guess_sampled_tokens() -> None:
    """Noise shared by draft and target is what makes a draft that knows something right; other noise would not."""
    engine = make_engine(tiny_draft("vanilla", 3, agrees=True))
    accepted = drafted = 0
    for seed in range(12):
        result = run_one(engine, PROMPT, params(SamplingParams(temperature=0.5, seed=seed)))
        accepted += result.last.speculation.accepted
        drafted += result.last.speculation.rounds
    assert accepted > 0.2 * drafted


@pytest.mark.parametrize("seed", [None, 5])
def test_choices_differ_and_a_seeded_set_reproduces(seed: int | None) -> None:
    """Case C6."""
    sampling = SamplingParams(temperature=1.2, seed=seed)
    jobs = [(PROMPT, params(sampling, choice_index=index)) for index in range(8)]
    engine = make_engine(tiny_draft("vanilla", 3, agrees=True))
    first = [result.ids for result in run(engine, jobs)]
    assert len({tuple(ids) for ids in first}) == len(jobs)
    again = [result.ids for result in run(engine, list(reversed(jobs)))][::-1]
    assert (again == first) == (seed is not None)


def test_unseeded_requests_differ_and_the_server_seed_reproduces_them() -> None:
    """Case C5."""

    def texts(server_seed: int | None) -> list[list[int]]:
        engine = make_engine(tiny_draft("vanilla", 3, agrees=True), seed=server_seed)
        return [run_one(engine, PROMPT, params(SamplingParams())).ids for _ in range(8)]

    first = texts(3)
    assert len({tuple(ids) for ids in first}) == len(first)
    assert texts(3) == first
    assert texts(4) != first
    assert texts(None) != texts(None)


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e-8},
        {"temperature": 1e-4},
        {"top_k": 1},
        {"top_p": 0.0},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"temperature": 0.0, "top_k": 10**6, "top_p": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [None, 7])
def test_extreme_filters_leave_the_most_likely_token(extreme: dict[str, float], seed: int | None) -> None:
    """Case B10."""
    sampling = SamplingParams(**extreme, seed=seed)  # type: ignore[arg-type]
    expected = reference_greedy(tuple(PROMPT), COUNT)
    for draft in (None, tiny_draft("vanilla", 4, agrees=True), ScriptedDrafter(4, lambda _: expected, [1, 0, 4])):
        assert run_one(make_engine(draft), PROMPT, params(sampling)).ids == expected


@pytest.mark.parametrize("top_k", [-1, 0, 258, 10**6])
def test_a_top_k_that_keeps_everything_changes_nothing(top_k: int) -> None:
    assert plain_text(replace(SEEDED, top_k=top_k)) == plain_text(SEEDED)


@pytest.mark.parametrize(
    "penalty",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 2.0},
        {"presence_penalty": -2.0, "frequency_penalty": -2.0},
        {"presence_penalty": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_penalties_act_at_every_slot_as_in_plain_decoding(penalty: dict[str, float]) -> None:
    """Case B8."""
    sampling = SamplingParams(temperature=0, **penalty)  # type: ignore[arg-type]
    # A prompt whose text repeats itself, so that the penalty changes it.
    pairs = ((p, slow_penalised(p, sampling)) for p in (make_prompt(21, seed=seed) for seed in range(20)))
    prompt, expected = next((p, text) for p, text in pairs if text != reference_greedy(tuple(p), COUNT))
    assert plain_text(sampling, prompt) == expected
    for pattern in ([-1], [0], [0, 1, 3, 7]):
        engine = make_engine(ScriptedDrafter(5, lambda _: expected, pattern))
        result, neighbour = run(engine, [(prompt, params(sampling)), (prompt, params(sampling, speculative=False))])
        assert result.ids == neighbour.ids == expected
        if pattern == [-1]:
            assert result.last.speculation.accepted == result.last.speculation.drafted


def slow_penalised(prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    """Greedy decoding with the penalties of the OpenAI API and of CTRL, written out for one token at a time."""
    output: list[int] = []
    for _ in range(COUNT):
        row = target_logits([*prompt, *output])[-1].tolist()
        for token in set(prompt) | set(output):
            factor = sampling.repetition_penalty
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        for token in set(output):
            row[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
        output.append(max(range(len(row)), key=row.__getitem__))
    return output


@pytest.mark.parametrize("draft_len", range(1, 8))
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, SamplingParams(temperature=0.7)], ids=["greedy", "seed", "free"])
def test_logprobs_are_the_targets_own(draft_len: int, sampling: SamplingParams) -> None:
    """Cases J1 and J2."""
    own = params(sampling, logprobs=3)
    drafted = run_one(make_engine(tiny_draft("vanilla", draft_len, agrees=True)), PROMPT, own)
    assert [entry.token_id for entry in drafted.logprobs] == drafted.ids
    rows = torch.log_softmax(target_logits([*PROMPT, *drafted.ids])[len(PROMPT) - 1 : -1], -1)
    for entry, row in zip(drafted.logprobs, rows, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        values, ids = row.topk(3)
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
    plain = run_one(make_engine(), PROMPT, own)
    if sampling.seed is not None or sampling.greedy:
        assert [e.logprob for e in plain.logprobs] == pytest.approx([e.logprob for e in drafted.logprobs], abs=1e-4)


def test_logprobs_end_with_the_text() -> None:
    expected = reference_greedy(tuple(PROMPT), COUNT)
    engine = make_engine(ScriptedDrafter(5, lambda _: expected, [-1]), eos=[expected[3]])
    for own in (params(GREEDY, logprobs=0), params(GREEDY, logprobs=0, ignore_eos=True, max_tokens=9)):
        result = run_one(engine, PROMPT, own)
        assert [entry.token_id for entry in result.logprobs] == result.ids
        assert all(entry.top == () for entry in result.logprobs)
    assert run_one(engine, PROMPT, params(GREEDY)).last.logprobs is None
