"""The HTTP side around a scripted engine: replies, refusals, health."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from server.app import create_app
from server.async_engine import AsyncEngine, EngineDeadError
from server.config import ServerConfig
from server.request import RequestParams, TokenLogprob
from tests.server.engines import make_engine
from tests.server.http_util import (
    DEADLINE_S,
    SPECULATION,
    ByteTokenizer,
    FakeEngine,
    client_of,
    delta,
    endless,
    make_app,
    post,
    scripted,
)


async def test_a_reply_is_one_object() -> None:
    response = await post(FakeEngine(), {"prompt": "hello", "max_tokens": 3})
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {
        "text": "hel",
        "token_ids": list(b"hel"),
        "finish_reason": "length",
        "usage": {"prompt_tokens": 5, "completion_tokens": 3},
        "speculation": SPECULATION,
    }


async def test_logprobs_name_every_token_and_its_bytes() -> None:
    logprobs = [
        TokenLogprob(token_id=0xC3, logprob=-0.25, top=((0xC3, -0.25), (0x41, float("-inf")))),
        TokenLogprob(token_id=0xBC, logprob=-0.5, top=()),
    ]
    last = delta("ü", logprobs=logprobs, finish_reason="stop")
    reply = (await post(FakeEngine(scripted(last)), {"prompt": "a", "logprobs": 2})).json()
    first, second = reply["logprobs"]
    assert first == {
        "token": "�",
        "token_id": 0xC3,
        "logprob": -0.25,
        "bytes": [0xC3],
        "top": [
            {"token": "�", "token_id": 0xC3, "logprob": -0.25, "bytes": [0xC3]},
            {"token": "A", "token_id": 0x41, "logprob": -9999.0, "bytes": [0x41]},
        ],
    }
    assert second["top"] == []
    assert bytes(first["bytes"] + second["bytes"]).decode() == reply["text"]


async def test_every_choice_is_an_engine_request_of_its_own() -> None:
    engine = FakeEngine()
    reply = (await post(engine, {"prompt": "abc", "n": 3, "seed": 1})).json()
    assert [params.choice_index for _, params in engine.submitted] == [0, 1, 2]
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 9}
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert all(choice["text"] == "abc" for choice in reply["choices"])
    assert all(choice["usage"]["completion_tokens"] == 3 for choice in reply["choices"])


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ({"prompt": "ü"}, [0xC3, 0xBC]),
        ({"prompt_ids": [7, 0, 255]}, [7, 0, 255]),
        ({"messages": [{"role": "user", "content": "hi"}]}, list(b"user:hi\n")),
    ],
)
async def test_every_kind_of_prompt_reaches_the_engine(prompt: dict[str, Any], ids: list[int]) -> None:
    engine = FakeEngine()
    assert (await post(engine, prompt)).status_code == 200
    assert engine.submitted[0][0] == ids


BAD_BODIES = [
    (b"", None),
    (b"prompt=hi", None),
    (b"[1]", None),
    (b'{"prompt": "\xff"}', None),
    ({}, None),
    ({"prompt": ""}, "prompt"),
    ({"prompt_ids": []}, "prompt_ids"),
    ({"messages": []}, "messages"),
    ({"prompt": "hi", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "hi", "max_tokens": 10**9}, "max_tokens"),
    ({"prompt": "hi" * 100}, "max_tokens"),
    ({"prompt": "hi", "temperature": -1}, "temperature"),
    (b'{"prompt": "hi", "temperature": NaN}', "temperature"),
    ({"prompt": "hi", "top_n": 1}, "top_n"),
    ({"prompt": "hi", "\ud800": 1}, None),
]


@pytest.mark.parametrize(("body", "param"), BAD_BODIES)
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_bad_request_is_a_400_and_the_next_one_works(body: Any, param: str, streaming: bool) -> None:
    engine = FakeEngine()
    async with client_of(make_app(engine)) as client:
        if isinstance(body, dict):
            body = json.dumps({**body, "stream": streaming}).encode()
        refused = await client.post("/generate", content=body)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert (await client.post("/generate", json={"prompt": "next"})).json()["text"] == "next"
    assert not engine.active


async def test_choices_before_a_refused_one_are_taken_back() -> None:
    class Full(FakeEngine):
        def submit(self, prompt_ids: list[int], params: RequestParams) -> Any:
            if params.choice_index == 2:
                raise EngineDeadError("died between two choices")
            return super().submit(prompt_ids, params)

    engine = Full(endless)
    assert (await post(engine, {"prompt": "hi", "n": 3})).status_code == 503
    assert len(engine.submitted) == 2


async def test_a_body_over_the_limit_is_a_413() -> None:
    response = await post(FakeEngine(), b'{"prompt": "' + b"x" * 2**23 + b'"}')
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/nothing", 404, "not_found"), ("GET", "/generate", 405, "method_not_allowed")],
)
async def test_wrong_paths_and_methods_are_told_what_there_is(method: str, path: str, status: int, code: str) -> None:
    async with client_of(make_app(FakeEngine())) as client:
        response = await client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert "POST /generate" in response.json()["error"]["message"]


async def test_health_and_models() -> None:
    async with client_of(make_app(FakeEngine())) as client:
        assert (await client.get("/health")).json() == {"status": "ok", "running": 0, "waiting": 0}
        models = (await client.get("/v1/models")).json()
    (card,) = models["data"]
    assert (models["object"], card["id"], card["object"]) == ("list", "tiny-target", "model")
    assert card["max_model_len"] == 64


async def test_the_served_name_replaces_the_targets() -> None:
    async with client_of(make_app(FakeEngine(), served_model_name="mine")) as client:
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "mine"


async def test_a_dead_engine_is_a_503_everywhere() -> None:
    """Case T1."""
    engine = FakeEngine()
    async with client_of(make_app(engine)) as client:
        engine.healthy = False
        for response in (
            await client.get("/health"),
            await client.post("/generate", json={"prompt": "hi"}),
            await client.post("/generate", json={"prompt": "hi", "stream": True}),
        ):
            assert response.status_code == 503
            assert response.json()["error"]["type"] == "server_error"


async def test_a_full_queue_is_a_503_that_says_when_to_come_back() -> None:
    engine = AsyncEngine(make_engine(max_num_seqs=1), max_queue=1)
    engine.engine.info["target"] = "tiny"
    async with client_of(create_app(engine, ServerConfig())) as client:
        body = {"prompt": "hi", "max_tokens": 100, "ignore_eos": True}
        with engine._wake:  # the engine's thread takes nothing meanwhile: it wakes with this lock
            two = [asyncio.create_task(client.post("/generate", json=body)) for _ in range(2)]
            while len(engine._commands) < 2:
                await asyncio.sleep(0.001)
            for streaming in (False, True):
                refused = await client.post("/generate", json={**body, "stream": streaming})
                assert refused.status_code == 503
                assert refused.headers["Retry-After"] == "1"
                assert refused.json()["error"]["code"] == "queue_full"
        for response in await asyncio.gather(*two):
            assert response.json()["usage"]["completion_tokens"] == 100
        assert (await client.post("/generate", json=body)).status_code == 200


async def test_the_engine_lives_as_long_as_the_application() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    assert not engine.healthy
    async with client_of(app):
        assert engine.healthy
    assert not engine.healthy


async def test_a_long_prompt_is_tokenised_beside_the_event_loop() -> None:
    begun, release = threading.Event(), threading.Event()

    class SlowTokenizer(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            begun.set()
            assert release.wait(DEADLINE_S), "the event loop waits for the tokenizer"
            return [1]

    async with client_of(make_app(FakeEngine(tokenizer=SlowTokenizer()))) as client:
        slow = asyncio.create_task(client.post("/generate", json={"prompt": "hi"}))
        while not begun.is_set():
            await asyncio.sleep(0)
        assert (await client.get("/health")).status_code == 200
        release.set()
        assert (await slow).status_code == 200
