"""`logit_bias` and `min_tokens` at every slot of a block, as in plain decoding. Cases B7 and B13."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from dspark_core.errors import RequestError
from dspark_core.sampler import Round
from dspark_core.sampling import SamplingParams
from server.request import RequestParams
from tests.server.drafts import LyingDrafter, ScriptedDrafter, TableDrafter
from tests.server.engines import (
    GREEDY,
    Result,
    make_engine,
    make_prompt,
    reference_greedy,
    run,
    run_one,
    target_logits,
    tiny_draft,
    tiny_target,
)
from tests.server.test_engine_distribution import BATCH, P_VALUE, V, distribution, p_value
from tests.server.test_engine_distribution import prompt as short_prompt

COUNT = 14
PROMPT = make_prompt(21, seed=3)
EOS = 1
BIASES: dict[str, tuple[tuple[int, float], ...]] = {
    "ban": tuple((token, -100.0) for token in range(2, 258, 3)),
    "favour": ((40, 6.0), (41, 6.0), (90, -3.0), (200, 5.5)),
}


def slow(sampling: SamplingParams, count: int = COUNT, banned: Sequence[int] = (), least: int = 0) -> list[int]:
    """Greedy decoding, one token at a time, with penalties first, then biases and bans."""
    output: list[int] = []
    for _ in range(count):
        row = target_logits([*PROMPT, *output])[-1].tolist()
        for token in set(output):
            row[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
        for token, bias in sampling.logit_bias:
            row[token] += bias
        if len(output) < least:
            row = [-1e9 if token in banned else value for token, value in enumerate(row)]
        output.append(max(range(len(row)), key=row.__getitem__))
        if output[-1] in banned:
            break
    return output


def drafters(draft_len: int, text: Sequence[int]) -> list[Any]:
    scripts: list[Any] = [ScriptedDrafter(draft_len, lambda _: text, pattern) for pattern in ([-1], [0], [0, 1, 3, 7])]
    return [*scripts, TableDrafter(draft_len, tiny_target()), LyingDrafter(draft_len, tiny_target())]


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_a_bias_acts_at_every_slot_and_on_nobody_else(name: str, penalty: float) -> None:
    sampling = replace(GREEDY, logit_bias=BIASES[name], presence_penalty=penalty)
    expected, free = slow(sampling), reference_greedy(tuple(PROMPT), COUNT)
    assert expected != free
    jobs = [(PROMPT, RequestParams(sampling, max_tokens=COUNT)), (PROMPT, RequestParams(GREEDY, max_tokens=COUNT))]
    for draft_len in range(1, 8):
        for draft in [
            *drafters(draft_len, expected)[draft_len % 2 :: 2],
            tiny_draft("vanilla", draft_len, agrees=True),
        ]:
            biased, plain = run(make_engine(draft), jobs)
            assert (biased.ids, plain.ids) == (expected, free)


@pytest.mark.parametrize("draft_len", [1, 4, 7])
def test_a_seeded_text_with_a_bias_does_not_depend_on_the_draft(draft_len: int) -> None:
    for bias in BIASES.values():
        sampling = SamplingParams(seed=5, temperature=1.2, top_k=50, logit_bias=bias, frequency_penalty=0.7)
        params = RequestParams(sampling, max_tokens=COUNT, min_tokens=6)
        expected = run_one(make_engine(eos=[EOS, 40]), PROMPT, params).ids
        for draft in drafters(draft_len, expected):
            assert run_one(make_engine(draft, eos=[EOS, 40]), PROMPT, params).ids == expected


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(), SamplingParams(seed=1)], ids=["greedy", "ratio", "seed"]
)
def test_a_banned_token_that_is_drafted_at_every_slot_never_comes(sampling: SamplingParams) -> None:
    favourite = reference_greedy(tuple(PROMPT), 1)[0]
    params = RequestParams(replace(sampling, logit_bias=((favourite, -100.0),)), max_tokens=30)
    for draft_len in (1, 4, 7):
        result = run_one(make_engine(ScriptedDrafter(draft_len, lambda _: [favourite] * 40, [-1])), PROMPT, params)
        assert favourite not in result.ids
        forced = replace(params, sampling=replace(sampling, logit_bias=((77, 100.0),)))
        assert run_one(make_engine(TableDrafter(draft_len, tiny_target())), PROMPT, forced).ids == [77] * 30


@pytest.mark.parametrize("draft_len", range(8))
def test_an_end_token_that_is_always_wanted_comes_right_after_min_tokens(draft_len: int) -> None:
    """All rules, ends and minima side by side in one batch."""
    jobs = []
    for sampling, ends, least in product(
        (GREEDY, SamplingParams(), SamplingParams(seed=1)), ([EOS], [50], [EOS, 50]), (0, 1, 5, 6, COUNT)
    ):
        own = replace(sampling, logit_bias=tuple((token, 100.0) for token in ends))
        stop_ids = frozenset(ends) - {EOS}
        jobs.append((PROMPT, RequestParams(own, max_tokens=COUNT, min_tokens=least, stop_token_ids=stop_ids)))
    for draft in drafters(draft_len, [EOS, 50] * COUNT)[:: 2 if draft_len > 1 else 1] if draft_len else [None]:
        for result in run(make_engine(draft, eos=[EOS]), jobs):
            params = result.request.params
            least, ends = params.min_tokens, [token for token, _ in params.sampling.logit_bias]
            assert len(result.ids) == min(least + 1, COUNT)
            assert not set(result.ids[:least]) & set(ends)
            assert result.last.finish_reason == ("stop" if least < COUNT else "length")


def test_greedy_text_with_min_tokens_is_the_slow_references() -> None:
    sampling = replace(GREEDY, logit_bias=BIASES["favour"])
    for least in range(0, 12, 3):
        expected = slow(sampling, banned=[40], least=least)
        params = RequestParams(sampling, max_tokens=COUNT, min_tokens=least)
        for draft in drafters(5, expected):
            assert run_one(make_engine(draft, eos=[40]), PROMPT, params).ids == expected


@cache
def printable() -> Result:
    """A text of printable characters, hardly one of them twice."""
    engine = make_engine(target=tiny_target(97))
    texts = (run_one(engine, make_prompt(12, seed=s), RequestParams(GREEDY, max_tokens=19)) for s in range(100))
    return next(r for r in texts if len(r.text) == 19 and len(set(r.ids)) >= 16)


@pytest.mark.parametrize("pattern", [[-1], [0], [0, 1, 3]])
@pytest.mark.parametrize("size", [1, 3])
def test_a_stop_string_does_not_end_a_text_before_min_tokens(pattern: list[int], size: int) -> None:
    """It ends one as soon as it is complete behind them, wherever it began: no part of it is sent."""
    text, ids = printable().text, printable().ids
    jobs, expected = [], []
    for place in range(3, 12):
        stop = text[place : place + size]
        complete = text.index(stop) + size
        for least in (0, complete - 1, complete, complete + 1, 18):
            params = RequestParams(GREEDY, max_tokens=19, min_tokens=least, stop=("never", stop))
            jobs.append((printable().request.prompt_ids, params))
            ends = [i for i in range(complete, 20) if text[:i].endswith(stop) and i > least]
            expected.append((ids[: ends[0]], text[: ends[0] - size], "stop") if ends else (ids, text, "length"))
    drafter = ScriptedDrafter(5, lambda _: ids, pattern, tiny_target(97))
    results = run(make_engine(drafter, target=tiny_target(97)), jobs)
    assert [(result.ids, result.text, result.last.finish_reason) for result in results] == expected
    assert 10 < sum(reason == "stop" for _, _, reason in expected) < len(expected)


def test_sampled_text_follows_the_biased_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """By chi-square, for the ratio rule; and it does not, once the target's rows are left as they are."""
    bias = ((3, 1.5), (4, -100.0), (7, -1.0))
    sampling = SamplingParams(temperature=1.3, frequency_penalty=0.4, logit_bias=bias)

    def p(count: int) -> float:
        engine = make_engine(
            TableDrafter(2, tiny_target(V)),
            target=tiny_target(V),
            eos=[EOS],
            max_num_seqs=BATCH,
            max_num_batched_tokens=BATCH * 8,
        )
        params = RequestParams(sampling, max_tokens=4, min_tokens=3)
        results = run(engine, [(short_prompt(), params)] * count)
        texts = np.array([[*result.ids, EOS][:2] for result in results])
        observed, joint = np.zeros((V, V), dtype=np.int64), np.zeros((V, V))
        np.add.at(observed, tuple(texts.T), 1)
        for a in range(V):
            joint[a] = biased([])[a] * biased([a])
        if observed[joint == 0].any():
            return 0.0
        return p_value(observed, joint)

    def biased(output: list[int]) -> Any:
        flat = replace(sampling, temperature=1.0)
        scores = np.log(distribution(output, flat))
        for token, value in bias:
            scores[token] += value
        scores[EOS] = -np.inf
        weights = np.exp((scores - scores.max()) / sampling.temperature)
        weights[weights < 1e-20] = 0
        return weights / weights.sum()

    assert p(1000) > P_VALUE
    monkeypatch.setattr(Round, "_adjust_target", lambda self, logits, draft_ids, verify_lens: logits)
    assert p(200) < 1e-6


def test_an_end_token_outside_the_vocabulary_is_no_matter() -> None:
    params = RequestParams(GREEDY, max_tokens=6, min_tokens=3)
    assert run_one(make_engine(eos=[EOS, 9999]), PROMPT, params).ids == reference_greedy(tuple(PROMPT), 6)


def test_a_request_that_bans_every_token_still_gets_some() -> None:
    params = RequestParams(SamplingParams(), max_tokens=6, min_tokens=3, stop_token_ids=frozenset(range(258)))
    assert len(run_one(make_engine(TableDrafter(3, tiny_target())), PROMPT, params).ids) == 1


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"sampling": replace(GREEDY, logit_bias=((258, 1.0),))}, "logit_bias"),
        ({"sampling": replace(GREEDY, logit_bias=((-1, 1.0),))}, "logit_bias"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"min_tokens": 250, "max_tokens": None}, "min_tokens"),
        ({"stop_token_ids": frozenset([258])}, "stop_token_ids"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        make_engine().make_request(PROMPT, RequestParams(**fields))
    assert caught.value.field == name
