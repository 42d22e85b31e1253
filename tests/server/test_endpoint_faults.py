"""What goes wrong is told alike on every endpoint, streamed or whole, and the next request is answered."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from dspark_core.checkpoint.tokenizer import Tokenizer
from server.app import create_app
from server.async_engine import AsyncEngine
from server.config import ServerConfig
from server.request import Delta, RequestParams
from tests.server.endpoints import CHAT, COMPLETIONS, GENERATE, IDS, PATHS, ChatTokenizer
from tests.server.engines import MAX_MODEL_LEN, make_engine, tiny_draft
from tests.server.http_util import (
    DEADLINE_S,
    FakeEngine,
    Script,
    client_of,
    delta,
    echo,
    endless,
    eventually,
    make_app,
    server_of,
    silent,
    sse_data,
)
from tests.tiny import edit_json, tiny_target_folder

GOOD: dict[str, dict[str, Any]] = {
    GENERATE: {"prompt": "Hi"},
    COMPLETIONS: {"prompt": "Hi"},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
}
FAULTS: list[tuple[Delta | Exception, int, str]] = [
    (delta("", error="KV pool lost a page"), 500, "KV pool lost a page"),
    (ZeroDivisionError("secret"), 500, "internal error; the server's log has the details"),
]


def breaks_after_three(fault: Delta | Exception) -> Script:
    """A script that echoes prompts, but breaks where it has said `abc`."""

    async def script(prompt_ids: list[int], params: RequestParams) -> AsyncIterator[Delta]:
        if b"bad" not in bytes(prompt_ids):
            async for item in echo(prompt_ids, params):
                yield item
            return
        for letter in "abc":
            yield delta(letter)
        if isinstance(fault, Exception):
            raise fault
        yield fault

    return script


def spoilt(path: str) -> dict[str, Any]:
    return dict(json.loads(json.dumps(GOOD[path]).replace("Hi", "bad")))


@pytest.mark.parametrize(("fault", "status", "message"), FAULTS)
@pytest.mark.parametrize("path", PATHS)
async def test_a_fault_is_told_once_and_others_live_on(
    path: str, fault: Delta | Exception, status: int, message: str
) -> None:
    """Case N1."""
    async with client_of(make_app(FakeEngine(breaks_after_three(fault), ChatTokenizer()))) as client:
        response = await client.post(path, json={**spoilt(path), "stream": True})
        *events, done = sse_data(response.text)
        assert (done, events.count("[DONE]")) == ("[DONE]", 0)
        error = json.loads(events[-1])["error"]
        assert (error["message"], error["type"]) == (message, "server_error")
        assert not any("error" in json.loads(event) or '"stop"' in event for event in events[:-1])
        assert "".join(_text(path, json.loads(event)) for event in events[:-1]) == "abc"
        whole = await client.post(path, json=spoilt(path))
        assert (whole.status_code, whole.json()["error"]["message"]) == (status, message)
        assert "abc" not in whole.text
        assert (await client.post(path, json=GOOD[path])).status_code == 200


def _text(path: str, event: dict[str, Any]) -> str:
    if path == GENERATE:
        return str(event["text"])
    (choice,) = event["choices"]
    return str(choice["text"] if path == COMPLETIONS else choice["delta"].get("content", ""))


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """Of a real engine with a tiny model."""
    engine = make_engine(tiny_draft("vanilla", 4))
    engine.info["target"] = "tiny"
    with (
        server_of(create_app(AsyncEngine(engine), ServerConfig())) as url,
        httpx.Client(base_url=url, timeout=DEADLINE_S) as client,
    ):
        yield client


def refusal(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The error of a request, streamed and whole; the next one must be answered."""
    errors = []
    for stream in (False, True):
        response = client.post(path, json={**body, "stream": stream})
        assert response.status_code == 400, response.text
        errors.append(response.json()["error"])
        assert client.post(path, json={**GOOD[path], "max_tokens": 2}).status_code == 200
    assert errors[0] == errors[1]
    return dict(errors[0])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": ["x", ""]}, "stop[1]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
    ],
    ids=str,
)
def test_values_that_cannot_be_are_refused_by_name(
    client: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    """Cases B10, D8 and F4."""
    assert refusal(client, path, {**GOOD[path], **fields})["param"] == param


@pytest.mark.parametrize("max_tokens", [{}, {"max_tokens": 1}, {"max_tokens": 0}], ids=str)
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        (GENERATE, {}),
        (GENERATE, {"prompt": ""}),
        (GENERATE, {"prompt_ids": []}),
        (GENERATE, {"messages": []}),
        (COMPLETIONS, {}),
        (COMPLETIONS, {"prompt": ""}),
        (COMPLETIONS, {"prompt": [""]}),
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {"prompt": [[]]}),
        (CHAT, {}),
        (CHAT, {"messages": []}),
    ],
    ids=str,
)
def test_empty_prompts_are_refused(
    client: httpx.Client, path: str, prompt: dict[str, Any], max_tokens: dict[str, Any]
) -> None:
    """Cases I1 and I2."""
    refusal(client, path, {**prompt, **max_tokens})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 10 * MAX_MODEL_LEN])
def test_prompts_beyond_the_context_are_refused_with_both_numbers(client: httpx.Client, path: str, size: int) -> None:
    """Cases I3 and I4."""
    error = refusal(client, path, {**long_prompt(client, path, size), "max_tokens": 1})
    assert error["code"] == "context_length_exceeded"
    assert str(size) in error["message"]
    assert str(MAX_MODEL_LEN) in error["message"]


@pytest.mark.parametrize("path", PATHS)
def test_what_is_left_of_the_context_is_used_and_no_more_is_promised(client: httpx.Client, path: str) -> None:
    """Cases F6 and F7: 14 tokens fit."""
    body = {**long_prompt(client, path, MAX_MODEL_LEN - 14), "temperature": 0}
    error = refusal(client, path, {**body, "max_tokens": 64})
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert all(str(number) in error["message"] for number in (MAX_MODEL_LEN - 14, 64, MAX_MODEL_LEN))
    rest = {"max_tokens": 14} if path == COMPLETIONS else {}  # OpenAI's default there is 16, which do not fit
    answer = client.post(path, json={**body, **rest}).json()
    assert answer["usage"]["completion_tokens"] == 14
    assert (answer if path == GENERATE else answer["choices"][0])["finish_reason"] == "length"


def long_prompt(client: httpx.Client, path: str, size: int) -> dict[str, Any]:
    if path in IDS:
        return {IDS[path]: [5] * size}
    messages = [{"role": "user", "content": ""}]
    scaffold = client.post("/tokenize", json={"messages": messages}).json()["count"]
    return {"messages": [{"role": "user", "content": "x" * (size - scaffold)}]}


@pytest.mark.parametrize("script", [endless, silent], ids=["decoding", "prefilling"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_clients_that_hang_up_free_the_engine(path: str, script: Script) -> None:
    """Cases H1, H2 and H5, on the endpoints of OpenAI; tests.server.test_disconnect has `/generate`."""
    engine = FakeEngine(script, ChatTokenizer())
    with server_of(make_app(engine)) as url:
        address = httpx.URL(url)
        for stream in (True, False, True, False):
            body = json.dumps({**GOOD[path], "stream": stream, "n": 2}).encode()
            head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            with closing(socket.create_connection((address.host, address.port))) as connection:
                connection.sendall(head + body)
                eventually(lambda: len(engine.active) == 2)
            eventually(lambda: not engine.active)
        assert httpx.get(f"{url}/health").json() == {"status": "ok", "running": 0, "waiting": 0}


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}"], ids=["none", "raises"])
async def test_without_a_template_that_works_there_is_no_chat(template: str | None, tmp_path: Path) -> None:
    """Case O1."""
    folder = tiny_target_folder(tmp_path)
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    engine = make_engine()
    engine.tokenizer, engine.info["target"] = Tokenizer.from_folder(folder), "tiny"
    async with client_of(create_app(AsyncEngine(engine), ServerConfig())) as client:
        for path in (CHAT, GENERATE):
            refused = await client.post(path, json={**GOOD[CHAT], "max_tokens": 2})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
            assert "template" in refused.json()["error"]["message"]
        for path in (COMPLETIONS, GENERATE):
            assert (await client.post(path, json={**GOOD[path], "max_tokens": 2})).status_code == 200
