"""Scores of prompt tokens equal those of one plain pass, however the prompt is computed, and change nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from dspark_core.sampling import SamplingParams
from server import scheduler
from server.request import Request, RequestParams, TokenLogprob
from tests.server.engines import (
    GREEDY,
    make_engine,
    make_prompt,
    reference_greedy,
    run,
    run_one,
    target_logits,
    tiny_draft,
    tiny_target,
)

COUNT = 8
PARAMS = RequestParams(GREEDY, max_tokens=COUNT)
SCORED = replace(PARAMS, prompt_logprobs=3)


def check(found: Sequence[TokenLogprob], prompt: Sequence[int], top: int = 3) -> None:
    """Every token but the first, by the definition."""
    assert [entry.token_id for entry in found] == list(prompt[1:])
    for entry, row in zip(found, torch.log_softmax(target_logits(prompt), -1), strict=False):
        values, ids = row.topk(top)
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
@pytest.mark.parametrize("most", [5, 256])
def test_scores_do_not_depend_on_chunks_or_neighbours(monkeypatch: pytest.MonkeyPatch, chunk: int, most: int) -> None:
    monkeypatch.setattr(scheduler, "MIN_CHUNK", 1)
    monkeypatch.setattr(scheduler, "MAX_SCORED", most)
    lengths = (1, 2, 7, 8, 33) if chunk == 1 else (1, 2, 15, 16, 17, 65, 150)
    engine = make_engine(tiny_draft("vanilla", 5, agrees=True), max_num_batched_tokens=chunk)
    jobs = [
        (make_prompt(length, seed=length), replace(SCORED, prompt_logprobs=i % 4)) for i, length in enumerate(lengths)
    ]
    jobs += [(make_prompt(length, seed=length), PARAMS) for length in lengths]
    results = run(engine, jobs, arrivals=[i % 5 for i in range(len(jobs))])
    for result in results:
        prompt, top = result.request.prompt_ids, result.request.params.prompt_logprobs
        assert result.ids == reference_greedy(tuple(prompt), COUNT)
        if top is None:
            assert result.request.prompt_logprobs == []
        else:
            check(result.request.prompt_logprobs, prompt, top)


def test_the_prefix_cache_neither_cuts_scores_short_nor_is_spoilt() -> None:
    engine = make_engine(tiny_draft("vanilla", 3, agrees=True))
    prompt = make_prompt(70)
    run_one(engine, prompt, PARAMS)
    assert run_one(engine, prompt, PARAMS).ids == reference_greedy(tuple(prompt), COUNT)
    hits = engine.scheduler.prefix_hits
    assert hits >= 64
    for _ in range(2):
        scored = run_one(engine, prompt, SCORED)
        check(scored.request.prompt_logprobs, prompt)
        assert scored.ids == reference_greedy(tuple(prompt), COUNT)
    assert engine.scheduler.prefix_hits == hits, "every token of it was computed"
    other = make_prompt(70, seed=1)
    check(run_one(engine, other, SCORED).request.prompt_logprobs, other)
    assert run_one(engine, other, PARAMS).ids == reference_greedy(tuple(other), COUNT)
    assert engine.scheduler.prefix_hits >= hits + 64, "what it computed serves others"
    together = run(engine, [(prompt, SCORED), (prompt, PARAMS), (prompt, SCORED)])
    for result in (together[0], together[2]):
        check(result.request.prompt_logprobs, prompt)


def test_preemption_loses_and_repeats_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    preempted: list[tuple[int, int]] = []
    preempt = scheduler.RequestScheduler._preempt

    def note(self: scheduler.RequestScheduler, request: Request) -> None:
        if request.params.prompt_logprobs is not None:
            preempted.append((request.num_generated, len(request.prompt_logprobs)))
        preempt(self, request)

    monkeypatch.setattr(scheduler.RequestScheduler, "_preempt", note)
    monkeypatch.setattr(scheduler, "MIN_CHUNK", 1)
    engine = make_engine(
        tiny_draft("rnn", 7), num_tokens=112, max_model_len=96, max_num_batched_tokens=9, max_num_seqs=6
    )
    results = []
    for lengths, arrivals in (((15, 16, 12, 17, 31, 50, 9, 40), (0, 0, 0, 1, 1, 3, 5, 8)), ((15, 70), (0, 6))):
        jobs = [(make_prompt(length, seed=length), replace(SCORED, max_tokens=24)) for length in lengths]
        results += run(engine, jobs, arrivals=arrivals)
    assert any(generated for generated, _ in preempted)
    assert any(scored and not generated for generated, scored in preempted), "one of them amid its prompt"
    for result in results:
        check(result.request.prompt_logprobs, result.request.prompt_ids)
        assert result.ids == reference_greedy(tuple(result.request.prompt_ids), 24)


def test_they_are_whole_with_the_first_token_that_is_told() -> None:
    engine = make_engine(max_num_batched_tokens=32)
    request = engine.make_request(make_prompt(100), SCORED)
    engine.add(request)
    steps = 0
    while not (outcomes := engine.step()):
        steps += 1
    assert steps > 1
    assert outcomes[0][1].token_ids
    check(request.prompt_logprobs, make_prompt(100))
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("sampling", [SamplingParams(seed=3), SamplingParams(seed=3, logit_bias=((40, 100.0),))])
def test_scores_are_the_models_own_and_the_text_is_the_same(sampling: SamplingParams) -> None:
    prompt = make_prompt(20)
    params = replace(SCORED, sampling=sampling, logprobs=2)
    found = [
        run_one(make_engine(tiny_draft("vanilla", 4, agrees=True)), prompt, p)
        for p in (params, replace(params, prompt_logprobs=None))
    ]
    assert found[0].ids == found[1].ids
    check(found[0].request.prompt_logprobs, prompt)
    assert [entry.token_id for entry in found[0].logprobs] == found[0].ids


def test_more_alternatives_than_tokens_are_all_of_them() -> None:
    result = run_one(make_engine(target=tiny_target(10)), [2, 3, 4], replace(SCORED, prompt_logprobs=20, logprobs=20))
    assert [len(entry.top) for entry in result.request.prompt_logprobs] == [10, 10]
    assert {len(entry.top) for entry in result.logprobs} == {10}
