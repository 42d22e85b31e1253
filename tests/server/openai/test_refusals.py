"""What the OpenAI endpoints refuse, in OpenAI's shape, and what they let pass."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from server.engine import Engine
from server.openai.chat import ChatRequest
from server.openai.completions import CompletionRequest
from tests.server.openai.conftest import MODEL

COMPLETION: dict[str, Any] = {"prompt": "Hi", "max_tokens": 2}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f"}}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}


def refusal(url: str, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    response = httpx.post(f"{url}{path}", json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert httpx.post(f"{url}{path}", json=PATHS[path]).status_code == 200, "the next request is answered"
    return dict(error)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["a", "b" * 1001]}, "stop[1]"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stream_options": {"include_usage": True}}, None),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}}, "response_format"),
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, None),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"length_penalty": 0}, "length_penalty"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
    ids=str,
)
def test_fields_that_cannot_be_kept_are_named(url: str, path: str, fields: Any, param: str | None) -> None:
    error = refusal(url, path, {**PATHS[path], **fields})
    assert error["param"] == param
    assert (param or "").split("[")[0] in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [99999]}, "prompt_ids"),
        ({"prompt": [2**40]}, "prompt_ids"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 2}, None),
        ({"suffix": "x"}, "suffix"),
        ({"add_special_tokens": False}, "add_special_tokens"),
    ],
    ids=repr,
)
def test_completions_refuse(url: str, fields: Any, param: str | None) -> None:
    """Cases I1 and K3."""
    body = {**COMPLETION, **fields}
    response = httpx.post(f"{url}/v1/completions", content=_ascii_json(body))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def _ascii_json(body: Any) -> bytes:
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "Hi"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"top_logprobs": 2}, None),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [{"type": "magic"}]}, "tools"),
        ({"tools": [json.loads("[" * 900 + "]" * 900)]}, "tools"),
        ({"messages": [{"role": "user", "content": "<|end|>", "x": json.loads("[" * 900 + "]" * 900)}]}, "messages"),
        ({"tool_choice": "required"}, None),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities[1]"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ],
    ids=repr,
)
def test_chat_refuses(url: str, fields: Any, param: str | None) -> None:
    """Cases M3, M4 and M6."""
    error = refusal(url, "/v1/chat/completions", {**CHAT, **fields})
    assert (error["param"] or "").split(".")[0] == (param or "")


@pytest.mark.parametrize("path", PATHS)
def test_unknown_fields_are_ignored_and_null_is_absent(url: str, path: str) -> None:
    """Cases M1 and M3."""
    model = CompletionRequest if path == "/v1/completions" else ChatRequest
    nulls = dict.fromkeys(name for name in model.model_fields if name not in ("prompt", "messages", "max_tokens"))
    refused = dict.fromkeys(model.refused)
    unknown = {"user": "ann", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "best_guess": 1}
    for body in ({**nulls, **refused, **unknown}, *({name: None} for name in nulls)):
        response = httpx.post(f"{url}{path}", json={**PATHS[path], **body})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", PATHS)
def test_what_is_switched_off_asks_for_nothing(url: str, path: str) -> None:
    off = {
        "suffix": "",
        "bad_words": [],
        "guided_json": {},
        "use_beam_search": False,
        "length_penalty": 1.0,
        "typical_p": 1,
        "repeat_penalty": 1,
        "skip_special_tokens": True,
        "stream": True,
        "stream_options": {"include_usage": None},
    }
    response = httpx.post(f"{url}{path}", json={**PATHS[path], **off})
    assert response.status_code == 200, response.text


def test_more_prompts_than_could_ever_wait_are_refused_before_anything_is_made_of_them(
    url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(engine.tokenizer, "encode", read.append)
    error = httpx.post(f"{url}/v1/completions", json={"prompt": ["a"] * 50, "n": 16}).json()["error"]
    assert (error["param"], read) == ("n", [])
    assert "800 choices" in error["message"]


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(client: openai.OpenAI, engine: Engine) -> None:
    """Cases I3 and I4."""
    limit = engine.max_model_len
    for size in (limit, limit + 1, 10 * limit):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(prompt=[5] * size, max_tokens=1, model=MODEL)
        assert caught.value.code == "context_length_exceeded"
        assert str(size) in caught.value.message
        assert str(limit) in caught.value.message


@pytest.mark.parametrize("path", PATHS)
def test_another_model_is_not_found(url: str, path: str) -> None:
    error = refusal(url, path, {**PATHS[path], "model": "gpt-x"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert MODEL in error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a": NaN}', b"\xff", b"[" * 100_000])
def test_bodies_that_are_no_json_objects(url: str, path: str, content: bytes) -> None:
    response = httpx.post(f"{url}{path}", content=content)
    assert response.status_code == 400
    assert response.json()["error"]["message"]
