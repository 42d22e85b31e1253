"""Greedy text equals plain greedy decoding token for token: whatever the draft, the batch, the chunks, the memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from dspark_core.draft.backbone import DraftModel
from server import scheduler
from server.engine import Engine
from server.request import Request, RequestParams
from tests.server.drafts import ScriptedDrafter, adversary, oracle
from tests.server.engines import (
    GREEDY,
    AnyDrafter,
    make_engine,
    make_prompt,
    reference_greedy,
    run,
    run_one,
    tiny_draft,
)

COUNT = 24
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 200)
PARAMS = RequestParams(GREEDY, max_tokens=COUNT)
PLAIN = RequestParams(GREEDY, max_tokens=COUNT, speculative=False)
KINDS = ("oracle", "adversary", "scripted", "vanilla", "gated", "rnn", "none")


def continuation(request: Request) -> list[int]:
    return expected(request.prompt_ids)


def expected(prompt: Sequence[int]) -> list[int]:
    return reference_greedy(tuple(prompt), COUNT)


def make_draft(kind: str, draft_len: int) -> AnyDrafter | DraftModel:
    if kind == "oracle":
        return oracle(draft_len, continuation)
    if kind == "adversary":
        return adversary(draft_len, continuation)
    if kind == "scripted":
        return ScriptedDrafter(draft_len, continuation, [0, 1, 3, 7, 2])
    return tiny_draft(kind, draft_len, agrees=kind == "vanilla")


def test_the_reference_is_a_text_worth_comparing() -> None:
    texts = [expected(make_prompt(length)) for length in LENGTHS]
    assert len({tuple(text) for text in texts}) == len(LENGTHS)
    assert sum(len(set(text)) > COUNT / 3 for text in texts) >= len(LENGTHS) - 2


@pytest.mark.parametrize("length", LENGTHS)
def test_plain_decoding_is_the_slow_reference(length: int) -> None:
    for engine in (make_engine(), make_engine(tiny_draft("vanilla", 3, agrees=True))):
        result = run_one(engine, make_prompt(length), PLAIN)
        assert result.ids == expected(make_prompt(length))
        assert result.last.finish_reason == "length"
        assert result.last.speculation.rounds == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft_len", range(1, 8))
def test_alone(kind: str, draft_len: int) -> None:
    """Cases A1 and A4."""
    engine = make_engine(make_draft(kind, draft_len))
    for length in (1, 17, 64, 200) if draft_len in (1, 7) else (1 + 5 * draft_len,):
        result = run_one(engine, make_prompt(length), PARAMS)
        assert result.ids == expected(make_prompt(length))
        assert result.last.speculation.rounds > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("draft_len", "page_size", "seed"), [(7, 16, 0), (3, 64, 1)])
def test_eight_at_once_with_random_arrivals(kind: str, draft_len: int, page_size: int, seed: int) -> None:
    """Case A1."""
    engine = make_engine(make_draft(kind, draft_len), page_size=page_size, max_num_seqs=6)
    arrivals = [random.Random(seed).randrange(12) for _ in LENGTHS]
    params = [PLAIN if index % 4 == 3 else PARAMS for index in range(len(LENGTHS))]
    jobs = [(make_prompt(length), own) for length, own in zip(LENGTHS, params, strict=True)]
    for result in run(engine, jobs, arrivals=arrivals):
        assert result.ids == expected(result.request.prompt_ids)


@pytest.mark.parametrize("kind", ["scripted", "vanilla", "rnn"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_chunks_do_not_change_the_text(monkeypatch: pytest.MonkeyPatch, kind: str, chunk: int) -> None:
    """Cases A5, I9 and U3."""
    monkeypatch.setattr(scheduler, "MIN_CHUNK", 1)
    engine = make_engine(make_draft(kind, 5), max_num_batched_tokens=chunk, max_num_seqs=16, prefix_cache=False)
    for group in ([1, 2, 6, 7, 8, 14], [33]) if chunk == 1 else ([1, 6, 7, 8, 14, 63, 65], [64], [128]):
        in_memory: list[int] = []
        jobs = [(make_prompt(length), PARAMS) for length in group]
        results = run(engine, jobs, on_step=partial(note, in_memory))
        assert in_memory[0] == min(chunk, sum(group))
        for result in results:
            assert result.ids == expected(result.request.prompt_ids)


def note(in_memory: list[int], engine: Engine) -> None:
    in_memory.append(sum(request.table.kv_len for request in engine.scheduler.running))


@pytest.mark.parametrize("kind", ["oracle", "scripted", "adversary", "vanilla", "rnn"])
@pytest.mark.parametrize("page_size", [16, 32])
def test_preemption_does_not_change_the_text(monkeypatch: pytest.MonkeyPatch, kind: str, page_size: int) -> None:
    """Case F6."""
    preempted: list[Request] = []
    preempt = scheduler.RequestScheduler._preempt

    def count(self: scheduler.RequestScheduler, request: Request) -> None:
        preempted.append(request)
        preempt(self, request)

    monkeypatch.setattr(scheduler.RequestScheduler, "_preempt", count)
    engine = make_engine(make_draft(kind, 7), page_size=page_size, num_tokens=112, max_model_len=96)
    jobs = [(make_prompt(length), PARAMS) for length in (15, 16, 40, 17, 31, 2, 9, 63)]
    results = run(engine, jobs, arrivals=[0, 0, 0, 1, 1, 3, 5, 8])
    assert any(request.num_generated for request in preempted)
    for result in results:
        assert result.ids == expected(result.request.prompt_ids)


def test_short_and_long_prompts_together_keep_their_positions() -> None:
    """Case Q1."""
    engine = make_engine(tiny_draft("vanilla", 4, agrees=True))
    together = run(engine, [(make_prompt(length, seed=5), PARAMS) for length in (3, 90)])
    alone = [run_one(engine, make_prompt(length, seed=5), PARAMS) for length in (3, 90)]
    assert [result.ids for result in together] == [result.ids for result in alone]
    assert [result.last.speculation for result in together] == [result.last.speculation for result in alone]


@pytest.mark.parametrize("draft_len", [4, 7])
def test_rows_that_accept_different_counts_stay_aligned(draft_len: int) -> None:
    """Cases Q3 and Q4: scripted acceptance 0, 1, 3 and 7, beside a row that does not draft and one near its limit."""
    scripts = {10: 0, 20: 1, 30: 3, 40: 7}

    class PerRequest(ScriptedDrafter):
        def logits(self, requests: Sequence[Request], slot: int, draft_ids: Tensor) -> Tensor:
            rows = []
            for index, request in enumerate(requests):
                self.pattern = [scripts.get(len(request.prompt_ids), -1)]
                rows.append(super().logits([request], slot, draft_ids[index : index + 1])[0])
            return torch.stack(rows)

    engine = make_engine(PerRequest(draft_len, continuation, [0]))
    jobs = [(make_prompt(length), PARAMS) for length in scripts]
    jobs += [(make_prompt(50), PLAIN), (make_prompt(60), RequestParams(GREEDY, max_tokens=3))]
    results = run(engine, jobs)
    for result in results:
        assert result.ids == expected(result.request.prompt_ids)[: result.request.max_tokens]
    for result, accepts in zip(results[:4], scripts.values(), strict=True):
        spent = result.last.speculation
        assert (spent.rounds, spent.accepted) == rounds_and_accepted(accepts, draft_len)


def rounds_and_accepted(accepts: int, draft_len: int) -> tuple[int, int]:
    """Of COUNT tokens: the first comes with the prompt, and a last single one needs no draft."""
    generated, rounds, accepted = 1, 0, 0
    while (slots := min(draft_len, COUNT - generated - 1)) > 0:
        rounds, accepted = rounds + 1, accepted + min(accepts, slots)
        generated += 1 + min(accepts, slots)
    return rounds, accepted
