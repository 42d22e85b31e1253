"""Grammars through the engine: the text of plain decoding whatever the draft, and its end where the grammar ends."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark_core.grammar import Grammar, GrammarCompiler, GrammarKind
from dspark_core.sampler import Round
from dspark_core.sampling import SamplingParams
from server import scheduler
from server.request import Request, RequestParams
from tests.server.drafts import FakeDrafter, LyingDrafter, ScriptedDrafter, TableDrafter
from tests.server.engines import (
    GREEDY,
    Result,
    make_engine,
    make_prompt,
    run,
    run_one,
    target_logits,
    tiny_draft,
    tiny_target,
)

EOS = 1
COUNT = 18
SEEDED = SamplingParams(temperature=1.0, seed=7)
ODD = SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=1.0, logit_bias=((40, 3.0), (70, -5.0)), seed=3)
SOURCES: list[tuple[GrammarKind, Any]] = [
    ("regex", "[a-f]{3,9}( [g-z]{2,7}){2}"),
    (
        "json",
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, "required": ["b"]},
    ),
    ("choice", ["yes, of course", "yes", "no"]),
    ("grammar", 'root ::= [A-Z] ([a-z]+ " ")+ "."'),
]


@cache
def compiler(vocab_size: int = 259) -> GrammarCompiler:
    target = tiny_target(vocab_size)
    return GrammarCompiler(target.tokenizer, [EOS], target.vocab_size)


def compiled(kind: GrammarKind, source: Any) -> Grammar:
    return compiler().compile(kind, source)


def encode(text: str) -> list[int]:
    return tiny_target().tokenizer.encode_plain(text)


@cache
def jobs() -> list[tuple[list[int], RequestParams]]:
    """Every grammar under every rule, and among them requests without any."""
    found = []
    for place, sampling in enumerate((GREEDY, SEEDED, ODD)):
        for number, source in enumerate(SOURCES):
            params = RequestParams(sampling, max_tokens=COUNT, grammar=compiled(*source))
            found.append((make_prompt(5 + 4 * number, seed=place), params))
        found.append((make_prompt(20, seed=place), RequestParams(sampling, max_tokens=COUNT)))
    return found


@cache
def plain() -> list[Result]:
    """Each of them alone, in an engine without a draft."""
    return [run_one(make_engine(eos=[EOS]), *job) for job in jobs()]


def continuation(request: Request) -> list[int]:
    return next(result.ids for result in plain() if result.request.params is request.params)


def assert_same(results: Sequence[Result]) -> None:
    for result, expected in zip(results, plain(), strict=True):
        assert (result.ids, result.text) == (expected.ids, expected.text)
        assert (result.last.finish_reason, result.last.error) == (expected.last.finish_reason, None)


def test_the_texts_conform_and_are_worth_comparing() -> None:
    rows = [plain()[place : place + 4] for place in (0, 5, 10)]
    for words, objects, choices, sentences in rows:
        assert re.fullmatch("[a-f]{3,9}( [g-z]{2,7}){2}", words.text) or words.last.finish_reason == "length"
        assert objects.last.finish_reason == "length" or set(json.loads(objects.text)) >= {"b"}
        assert choices.text in SOURCES[2][1]
        assert re.fullmatch(r"[A-Z]([a-z]+ ?)+\.?", sentences.text)
    assert len({result.text for result in plain()}) > 10
    reasons = [result.last.finish_reason for result in plain()]
    assert {"stop", "length"} == set(reasons)
    for result, free in ((plain()[place], plain()[4]) for place in range(4)):
        assert result.text != free.text


@pytest.mark.parametrize(
    ("kind", "draft_len"),
    [
        *((kind, draft_len) for kind in ("oracle", "scripted", "random") for draft_len in range(1, 8)),
        *((kind, draft_len) for kind in ("adversary", "lying", "vanilla") for draft_len in (1, 4, 7)),
    ],
)
def test_texts_are_those_of_plain_decoding(kind: str, draft_len: int) -> None:
    draft: Any = {
        "oracle": lambda: ScriptedDrafter(draft_len, continuation, [-1]),
        "adversary": lambda: ScriptedDrafter(draft_len, continuation, [0]),
        "scripted": lambda: ScriptedDrafter(draft_len, continuation, [0, 1, 3, 7, 2]),
        "random": lambda: TableDrafter(draft_len, tiny_target()),
        "lying": lambda: LyingDrafter(draft_len, tiny_target()),
        "vanilla": lambda: tiny_draft("vanilla", draft_len, agrees=True),
    }[kind]()
    arrivals = [place % 4 for place in range(len(jobs()))]
    results = run(make_engine(draft, eos=[EOS]), jobs(), arrivals=arrivals)
    assert_same(results)
    if kind == "oracle":
        accepted = sum(result.last.speculation.accepted for result in results)
        assert accepted == sum(len(ids) - rounds - 1 for ids, rounds in map(told, results))


def told(result: Result) -> tuple[list[int], int]:
    """Tokens, and how many came as the target's own in drafted or plain steps after the first."""
    delivered = len(result.ids) - 1 - result.last.speculation.accepted
    return result.ids, delivered


def test_preemption_chunks_and_shared_prefixes_do_not_change_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MIN_CHUNK", 1)
    grammar = compiled(*SOURCES[3])
    common = make_prompt(16, seed=9)
    work = [
        ([*common, *make_prompt(4 + i, seed=i)], RequestParams(SEEDED, max_tokens=COUNT, grammar=grammar))
        for i in range(6)
    ]
    alone = [run_one(make_engine(eos=[EOS]), *job).ids for job in work]
    preempted: list[int] = []
    preempt = scheduler.RequestScheduler._preempt

    def count(self: scheduler.RequestScheduler, request: Request) -> None:
        preempted.append(request.num_generated)
        preempt(self, request)

    monkeypatch.setattr(scheduler.RequestScheduler, "_preempt", count)
    limits = {"num_tokens": 112, "max_model_len": 64, "max_num_batched_tokens": 25, "max_num_seqs": 6}
    engine = make_engine(tiny_draft("rnn", 7), eos=[EOS], **limits)  # type: ignore[arg-type]
    results = run(engine, work, arrivals=[0, 0, 1, 2, 9, 9])
    assert any(preempted)
    assert engine.scheduler.prefix_hits
    assert [result.ids for result in results] == alone


class TwinDrafter(FakeDrafter):
    """The target itself, asked again for every slot."""

    def logits(self, requests: Sequence[Request], slot: int, draft_ids: Tensor) -> Tensor:
        texts = [[*request.tokens, *row] for request, row in zip(requests, draft_ids.tolist(), strict=True)]
        return torch.stack([target_logits(text)[-1] for text in texts])


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, SamplingParams()], ids=["greedy", "coupled", "ratio"])
@pytest.mark.parametrize("draft_masked", [True, False])
def test_a_draft_as_good_as_the_target_is_accepted(
    monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams, draft_masked: bool
) -> None:
    if not draft_masked:
        monkeypatch.setattr(Round, "_adjust_draft", lambda self, logits, draft_ids: logits)
    params = RequestParams(sampling, max_tokens=16, grammar=compiled("regex", "[a-z ]{30}"))
    spent = run_one(make_engine(TwinDrafter(4), eos=[EOS]), make_prompt(9), params).last.speculation
    if draft_masked:
        assert (spent.rounds, spent.accepted) == (3, 12)
    else:
        assert spent.accepted < 8


def test_choices_of_one_call_share_a_grammar_and_nothing_else() -> None:
    grammar = compiled(*SOURCES[3])
    params = RequestParams(SEEDED, max_tokens=COUNT, grammar=grammar)
    work = [(make_prompt(9), replace(params, choice_index=index)) for index in range(6)]
    engine = make_engine(tiny_draft("vanilla", 5, agrees=True), eos=[EOS])
    together = [result.ids for result in run(engine, work)]
    assert len({tuple(ids) for ids in together}) == 6
    assert together == [run_one(make_engine(eos=[EOS]), *job).ids for job in work]


def test_a_grammar_in_a_model_without_an_end_token_is_refused() -> None:
    with pytest.raises(Exception, match=r"structured_outputs.*end-of-text"):
        make_engine().grammars.compile("regex", "a", "structured_outputs")
