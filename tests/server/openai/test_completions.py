"""`/v1/completions` through the official client, against a running server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
import torch

from server.engine import Engine
from tests.server.endpoints import spelled
from tests.server.engines import reference_greedy, target_logits
from tests.server.openai.conftest import MODEL

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


def ids_of(engine: Engine, text: str) -> list[int]:
    return engine.tokenizer.encode(text)


def greedy_text(engine: Engine, prompt: str, count: int) -> str:
    return engine.tokenizer.decode(reference_greedy(tuple(ids_of(engine, prompt)), count))


def test_text_and_usage(client: openai.OpenAI, engine: Engine) -> None:
    answer = client.completions.create(prompt="Once upon", max_tokens=12, **GREEDY)
    assert answer.choices[0].text == greedy_text(engine, "Once upon", 12)
    assert (answer.object, answer.model, answer.choices[0].finish_reason) == ("text_completion", MODEL, "length")
    assert answer.usage is not None
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 9,
        "completion_tokens": 12,
        "total_tokens": 21,
    }


def test_sixteen_tokens_unless_told_otherwise(client: openai.OpenAI) -> None:
    usage = client.completions.create(prompt="Once", **GREEDY).usage
    assert usage is not None
    assert usage.completion_tokens == 16


@pytest.mark.parametrize("stream_options", [None, {"include_usage": True}])
def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, stream_options: Any) -> None:
    """Cases K1, K4, L1 and L2."""
    body = {"prompt": ["Once upon", "a"], "max_tokens": 9, "n": 2, "logprobs": 1, "seed": 5, "model": MODEL}
    whole = client.completions.create(**body)
    options = {"stream_options": stream_options} if stream_options else {}
    chunks = list(client.completions.create(**body, stream=True, **options))
    if stream_options:
        assert chunks[-1].choices == []
        assert chunks[-1].usage == whole.usage
        assert all("usage" in c.model_fields_set and c.usage is None for c in chunks[:-1])
        chunks = chunks[:-1]
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)
    assert len({(chunk.id, chunk.created, chunk.object) for chunk in chunks}) == 1
    for index, choice in enumerate(whole.choices):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(part.text for part in own) == choice.text
        assert [part.finish_reason for part in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        assert choice.logprobs is not None
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [value for part in own for value in getattr(part.logprobs, name)]
            assert parts == getattr(choice.logprobs, name)


def test_every_form_of_prompt(client: openai.OpenAI, engine: Engine) -> None:
    """Cases K1, K3 and K4."""
    texts = ["Once upon a time", "a", "Hello"]
    expected = [greedy_text(engine, text, 6) for text in texts]
    ids = [ids_of(engine, text) for text in texts]
    for prompt, wanted in ((texts[0], expected[:1]), (texts, expected), (ids[0], expected[:1]), (ids, expected)):
        answer = client.completions.create(prompt=prompt, max_tokens=6, **GREEDY)
        assert [choice.text for choice in answer.choices] == wanted
        assert [choice.index for choice in answer.choices] == list(range(len(wanted)))
    answer = client.completions.create(prompt=texts, n=2, max_tokens=6, **GREEDY)
    assert [choice.text for choice in answer.choices] == [text for text in expected for _ in range(2)]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (sum(map(len, ids)), 36)


def test_a_seed_gives_every_choice_its_own_text_and_all_of_them_again(client: openai.OpenAI) -> None:
    """Case C6."""

    def texts() -> list[str]:
        body = {"prompt": ["ab", "ab"], "n": 3, "max_tokens": 12, "seed": 7, "model": MODEL}
        return [choice.text for choice in client.completions.create(**body).choices]

    first = texts()
    assert len(set(first)) == 6
    assert texts() == first


def test_logprobs_are_the_targets_own(client: openai.OpenAI, engine: Engine) -> None:
    """Cases J1 and J2: before temperature and filters, one entry a token."""
    body = {
        "prompt": "Once",
        "max_tokens": 10,
        "logprobs": 3,
        "temperature": 0.7,
        "top_p": 0.5,
        "seed": 1,
        "model": MODEL,
    }
    found = client.completions.create(**body).choices[0].logprobs
    assert found is not None
    assert found.tokens
    assert found.token_logprobs
    assert found.top_logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 10
    ids = {engine.tokenizer.token_bytes(token_id): token_id for token_id in range(engine.tokenizer.vocab_size)}
    generated = [ids[spelled(token)] for token in found.tokens]
    scores = target_logits([*ids_of(engine, "Once"), *generated]).log_softmax(-1)[3:-1]
    expected = scores.gather(-1, torch.tensor(generated).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(torch.tensor(found.token_logprobs), expected, atol=1e-4, rtol=0)
    for token, own, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == own
        assert 3 <= len(top) <= 4


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_the_prompt(url: str, engine: Engine, max_tokens: int, stream: bool) -> None:
    prompt = "It was the best of times"
    ids = ids_of(engine, prompt)
    body = {"prompt": ids, "max_tokens": max_tokens, "echo": True, "logprobs": 2, **GREEDY, "stream": stream}
    for _ in range(2):  # the second time its pages are cached
        response = httpx.post(f"{url}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        if stream:
            events = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
            choices = [event["choices"][0] for event in events]
            text = "".join(choice["text"] for choice in choices)
            values = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
            offsets = [value for choice in choices for value in choice["logprobs"]["text_offset"]]
        else:
            text = response.json()["choices"][0]["text"]
            found = response.json()["choices"][0]["logprobs"]
            values, offsets = found["token_logprobs"], found["text_offset"]
            assert found["top_logprobs"][0] is None
            assert all(max(top.values()) >= own for top, own in zip(found["top_logprobs"][1:], values[1:], strict=True))
            assert response.json()["usage"]["completion_tokens"] == max_tokens
        answer = reference_greedy(tuple(ids), max_tokens)
        assert text == prompt + engine.tokenizer.decode(answer)
        scores = target_logits([*ids, *answer]).log_softmax(-1)[:-1]
        expected = scores.gather(-1, torch.tensor([*ids, *answer][1:]).unsqueeze(-1)).squeeze(-1)
        assert values[0] is None
        torch.testing.assert_close(torch.tensor(values[1:]), expected, atol=1e-4, rtol=0)
        assert offsets[: len(ids)] == list(range(len(ids)))


def test_what_is_switched_off_is_absent(client: openai.OpenAI) -> None:
    off: dict[str, Any] = {"logprobs": False, "seed": -1}
    answers = [client.completions.create(prompt="Once", max_tokens=12, model=MODEL, extra_body=off) for _ in range(2)]
    assert answers[0].choices[0].logprobs is None
    assert len({answer.choices[0].text for answer in answers}) == 2


def test_places_in_the_text_leave_control_tokens_out(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt=[0, 35, 36], max_tokens=1, echo=True, logprobs=0, model=MODEL)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 0, 1, 2]


def test_sampling_fields_reach_the_engine(client: openai.OpenAI, engine: Engine) -> None:
    forbidden = reference_greedy(tuple(ids_of(engine, "Once")), 1)[0]
    answer = client.completions.create(prompt="Once", max_tokens=4, logit_bias={str(forbidden): -100}, **GREEDY)
    assert answer.choices[0].text != greedy_text(engine, "Once", 4)
    wanted = engine.tokenizer.encode_plain("q")[0]
    answer = client.completions.create(prompt="Once", max_tokens=4, logit_bias={str(wanted): 100}, **GREEDY)
    assert answer.choices[0].text == "qqqq"
    extra = {"min_tokens": 4, "stop_token_ids": [wanted], "top_k": 1, "repetition_penalty": 1.0}
    answer = client.completions.create(
        prompt="Once", max_tokens=9, logit_bias={str(wanted): 50}, extra_body=extra, model=MODEL
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_never_sent(client: openai.OpenAI, engine: Engine, stream: bool) -> None:
    """Cases D4 and D5."""
    whole = greedy_text(engine, "Once upon", 40)
    stop = whole[10:14]
    place = whole.find(stop)
    answer: Any = client.completions.create(prompt="Once upon", max_tokens=40, stop=stop, stream=stream, **GREEDY)
    parts = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(part.text for part in parts) == whole[:place]
    assert parts[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("rules", "matches"),
    [
        ({"regex": "[ab]{3}c"}, lambda text: len(text) == 4 and set(text[:3]) <= set("ab") and text[3] == "c"),
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        (
            {"json": {"type": "array", "items": {"enum": [1, 22]}, "maxItems": 2}},
            lambda text: len(json.loads(text)) <= 2,
        ),
        ({"grammar": 'start: "x" ("y" | "z") "!"'}, lambda text: text in ("xy!", "xz!")),
        ({"grammar": 'root ::= "x" [yz] "!"'}, lambda text: text in ("xy!", "xz!")),
    ],
)
def test_structured_outputs(client: openai.OpenAI, rules: dict[str, Any], matches: Any) -> None:
    body = {"structured_outputs": rules}
    answer = client.completions.create(prompt="Once", max_tokens=80, model=MODEL, n=3, extra_body=body)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert matches(choice.text), choice.text
