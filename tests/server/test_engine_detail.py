"""Details tell what became of every round, to the client who asked, and cost nobody else anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from dspark_core.checkpoint.calibration import Calibration, Scaling
from dspark_core.sampling import SamplingParams
from server.app import create_app
from server.async_engine import AsyncEngine
from server.config import ServerConfig
from server.detail import RoundDetail
from server.policy import Rounds, Threshold
from server.request import Request, RequestParams
from tests.server.drafts import ConfidentDrafter, ScriptedDrafter, TableDrafter
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
    tiny_target,
)
from tests.server.http_util import client_of, sse_data
from tests.server.policies import Lengths

COUNT = 24
PROMPT = make_prompt(11)
TOLD = RequestParams(GREEDY, max_tokens=COUNT, detail=True)


def continuation(request: Request) -> list[int]:
    return reference_greedy(tuple(request.prompt_ids), COUNT)


def rounds(result: Result) -> list[RoundDetail]:
    return [detail for delta in result.deltas for detail in delta.rounds or ()]


def check(result: Result) -> list[RoundDetail]:
    """Rounds add up to what was delivered and counted."""
    found = rounds(result)
    tokens = [token for detail in found for token in detail.tokens]
    assert [token.token_id for token in tokens] == result.ids
    text = "".join(token.text for token in tokens)
    assert text.startswith(result.text) if result.request.params.stop else text == result.text
    spent, drafted = result.last.speculation, [detail for detail in found if detail.draft_ids]
    assert len(drafted) == spent.rounds
    assert sum(len(detail.draft_ids) for detail in drafted) == spent.drafted
    assert sum(detail.verified for detail in drafted) == spent.verified
    assert sum(detail.accepted for detail in drafted) == spent.accepted
    for detail in found:
        assert len(detail.sources) == len(detail.tokens)
        assert [t.token_id for t in detail.tokens[: detail.accepted]] == list(detail.draft_ids)[: detail.accepted]
        assert detail.confidence is None or len(detail.confidence) == len(detail.draft_ids)
    return found


@pytest.mark.parametrize("accepts", [0, 1, 3, 7])
def test_scripted_rounds_are_told_as_they_were(accepts: int) -> None:
    found = check(run_one(make_engine(ScriptedDrafter(7, continuation, [accepts])), PROMPT, TOLD))
    assert found[0] == RoundDetail([], None, 0, 0, found[0].tokens)
    assert found[0].sources == ["plain"]
    whole = [detail for detail in found if len(detail.draft_ids) == 7]
    assert len(whole) >= 2
    for detail in whole:
        assert detail.sources == ["accepted"] * accepts + ["bonus" if accepts == 7 else "corrected"]
        assert (detail.verified, detail.accepted, detail.confidence) == (7, accepts, None)


@pytest.mark.parametrize("verified", [0, 2])
def test_what_was_not_verified_is_told_as_drafted(verified: int) -> None:
    engine = make_engine(ScriptedDrafter(5, continuation, [-1]))
    engine.policy = Lengths(admit=lambda slots, logits: [min(verified, slot) for slot in slots])
    found = check(run_one(engine, PROMPT, TOLD))
    after = "bonus" if verified else "plain"
    assert found[1].sources == ["accepted"] * verified + [after]
    assert len(found[1].draft_ids) == 5


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(), SamplingParams(seed=2, temperature=0.6)])
def test_random_rounds_add_up_and_details_change_no_text(sampling: SamplingParams) -> None:
    drafts: tuple[Any, ...] = (None, TableDrafter(4, tiny_target()), tiny_draft("vanilla", 5, agrees=True))
    for draft in drafts:
        texts = []
        for detail in (True, False):
            engine = make_engine(draft, seed=1)
            jobs = [
                (make_prompt(length), RequestParams(sampling, max_tokens=COUNT, detail=detail and bool(length % 2)))
                for length in (3, 16, 31, 40)
            ]
            results = run(engine, jobs)
            texts.append([result.ids for result in results])
            for result in results:
                if result.request.params.detail:
                    check(result)
                else:
                    assert all(delta.rounds is None for delta in result.deltas)
        assert texts[0] == texts[1]


def test_half_characters_are_told_with_the_token_that_ends_the_text() -> None:
    for size in range(1, COUNT):
        draft = ScriptedDrafter(5, continuation, [-1])
        result = run_one(make_engine(draft), make_prompt(12, seed=3), replace(TOLD, max_tokens=size))
        check(result)
        assert result.text == tiny_target().tokenizer.decode(result.ids)


@pytest.mark.parametrize("place", range(1, 9))
def test_an_end_amid_a_block_cuts_its_round(place: int) -> None:
    text = reference_greedy(tuple(PROMPT), COUNT)
    token = text[place]
    end = text.index(token) + 1
    draft = ScriptedDrafter(7, continuation, [-1])
    found = check(run_one(make_engine(draft, eos=[token]), PROMPT, TOLD))
    assert sum(len(detail.tokens) for detail in found) == end
    if 1 < end < 9:
        assert found[-1].sources == ["accepted"] * (end - 1)
    stop = tiny_target().tokenizer.decode(text)[place]
    check(run_one(make_engine(ScriptedDrafter(7, continuation, [-1])), PROMPT, replace(TOLD, stop=(stop,))))


def confident(logit: float) -> ConfidentDrafter:
    return ConfidentDrafter(3, tiny_target(), lambda token: logit)


def test_confidence_is_the_calibrated_probability_of_each_slot() -> None:
    for logit, calibration, expected in (
        (0.5, None, 1 / (1 + np.exp(-0.5))),
        (0.5, Calibration({"ratio": Scaling((2.0,) * 3, (0.1,) * 3)}), 1 / (1 + np.exp(-1.1))),
    ):
        engine = make_engine(confident(logit))
        if calibration:
            engine.policy = Threshold(0.0, calibration)
        found = check(run_one(engine, PROMPT, TOLD))
        values = [value for detail in found for value in detail.confidence or ()]
        assert len(values) == sum(len(detail.draft_ids) for detail in found) > 0
        assert values == pytest.approx([expected] * len(values))
    head = check(run_one(make_engine(tiny_draft("vanilla", 4)), PROMPT, TOLD))
    values = [value for detail in head for value in detail.confidence or ()]
    assert len(set(values)) > 3
    assert all(value is not None and 0 < value < 1 for value in values)


def test_a_confidence_that_is_no_number_is_told_as_none() -> None:
    found = check(run_one(make_engine(confident(float("nan"))), PROMPT, TOLD))
    assert {value for detail in found for value in detail.confidence or ()} == {None}


def test_confidence_is_read_only_for_those_who_ask() -> None:
    seen: list[bool] = []

    def note(told: Rounds) -> None:
        seen.append(told.logits is not None)

    for params, expected in ((TOLD, {True}), (replace(TOLD, detail=False), {False})):
        seen.clear()
        engine = make_engine(confident(1.0))
        engine.observers.append(note)
        run_one(engine, PROMPT, params)
        assert set(seen) == expected


async def ask(draft: AnyDrafter | None, body: dict[str, Any], eos: Sequence[int] = ()) -> httpx.Response:
    """One request to the real application, around a real engine in its thread."""
    served = AsyncEngine(make_engine(draft, eos=eos))
    async with client_of(create_app(served, ServerConfig(served_model_name="tiny"))) as client:
        return await client.post("/generate", json=body)


BODY = {"prompt_ids": PROMPT, "temperature": 0, "max_tokens": COUNT, "detail": True}


async def test_generate_tells_rounds_whole_and_streamed() -> None:
    draft = ScriptedDrafter(4, continuation, [0, 2, 4])
    whole = (await ask(draft, {**BODY, "n": 2})).json()
    streamed = await ask(ScriptedDrafter(4, continuation, [0, 2, 4]), {**BODY, "n": 2, "stream": True})
    assert sse_data(streamed.text)[-1] == "[DONE]"
    events = [json.loads(data) for data in sse_data(streamed.text)[:-1]]
    for index, choice in enumerate(whole["choices"]):
        assert choice["rounds"] == [r for e in events if e["index"] == index for r in e["rounds"]]
        tokens = [token for r in choice["rounds"] for token in r["tokens"]]
        assert [token["token_id"] for token in tokens] == choice["token_ids"]
        assert "".join(token["text"] for token in tokens) == choice["text"]
        for name in ("drafted", "verified", "accepted"):
            assert sum(r[name] for r in choice["rounds"]) == choice["speculation"][name]
        assert [t["source"] for t in choice["rounds"][2]["tokens"]] == ["accepted", "accepted", "corrected"]
        assert {d["confidence"] for r in choice["rounds"] for d in r["draft"]} == {None}


async def test_generate_tells_nothing_without_being_asked() -> None:
    reply = await ask(TableDrafter(3, tiny_target()), {**BODY, "detail": False})
    assert reply.status_code == 200
    assert "rounds" not in reply.json()
    odd = await ask(confident(float("nan")), BODY)
    assert {d["confidence"] for r in odd.json()["rounds"] for d in r["draft"]} == {None}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= missing"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "nonsense"}}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "structured_outputs"),
        ({"logit_bias": {"258": 1}}, "logit_bias"),
        ({"min_tokens": 25}, "min_tokens"),
    ],
)
async def test_generate_refuses_what_cannot_be_by_name(fields: dict[str, Any], name: str) -> None:
    reply = await ask(None, {**BODY, **fields}, eos=[1])
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
    assert name in reply.json()["error"]["message"]


async def test_generate_with_a_grammar_and_several_choices() -> None:
    body = {**BODY, "temperature": 1.0, "n": 4, "structured_outputs": {"choice": ["yes", "no"]}}
    reply = (await ask(TableDrafter(3, tiny_target()), body, eos=[1])).json()
    for choice in reply["choices"]:
        assert (choice["text"] in ("yes", "no"), choice["finish_reason"]) == (True, "stop")
