"""Keys, origins, limits of bodies and of time, as clients meet them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.http_util import (
    FakeEngine,
    Script,
    client_of,
    endless,
    eventually,
    make_app,
    server_of,
    silent,
    sse_data,
)

KEYS = ("first-key", "second-key")
BODY = {"prompt": "hi"}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("headers", [bearer("first-key"), bearer("second-key"), {"authorization": "bearer second-key"}])
async def test_any_of_the_keys_opens_the_door(headers: dict[str, str]) -> None:
    async with client_of(make_app(FakeEngine(), api_key=KEYS)) as client:
        assert (await client.post("/generate", json=BODY, headers=headers)).json()["text"] == "hi"
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("first-ke"),
        bearer("first-key2"),
        bearer("first-key,second-key"),
        bearer(""),
        {"Authorization": "first-key"},
        {"Authorization": "Basic first-key"},
        {"X-Api-Key": "first-key"},
        [("Authorization", "Bearer first-key"), ("Authorization", "Bearer first-key")],
        {"Authorization": b"Bearer \xff\xfe"},
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/generate"), ("GET", "/metrics"), ("GET", "/no/such/path")])
async def test_without_a_key_nothing_is_told_and_nothing_begins(headers: Any, method: str, path: str) -> None:
    engine = FakeEngine()
    async with client_of(make_app(engine, api_key=KEYS)) as client:
        response = await client.request(method, path, json=BODY, headers=headers)
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert "first-key" not in response.text
    assert not engine.submitted


@pytest.mark.parametrize("path", ["/", "/health", "/version", "/playground/main.js"])
async def test_some_pages_need_no_key(path: str) -> None:
    async with client_of(make_app(FakeEngine(), api_key=KEYS)) as client:
        assert (await client.get(path)).status_code == 200


async def test_health_can_be_asked_without_a_body() -> None:
    async with client_of(make_app(FakeEngine(), api_key=KEYS)) as client:
        assert (await client.head("/health")).status_code == 200


@pytest.mark.parametrize("path", ["/playground/../generate", "/playground", "//generate", "/health/", "/HEALTH"])
async def test_paths_that_resemble_those_reach_nothing(path: str) -> None:
    engine = FakeEngine()
    async with client_of(make_app(engine, api_key=KEYS)) as client:
        response = await client.post(httpx.URL("http://server", raw_path=path.encode()), json=BODY)
    assert response.status_code in (401, 404, 405)
    assert not engine.submitted


async def test_the_version_tells_names_and_no_places(tmp_path: Path) -> None:
    async with client_of(make_app(FakeEngine(), ckpt=str(tmp_path))) as client:
        told = (await client.get("/version")).json()
    assert told == {"version": "0.1.0", "target": "tiny-target", "draft": tmp_path.name}


PREFLIGHT = {
    "Origin": "https://a.org",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,openai-organization,x-stainless-lang",  # OpenAI's own
}


async def test_a_page_of_a_known_origin_may_ask_and_its_preflight_needs_no_key() -> None:
    async with client_of(make_app(FakeEngine(), api_key=KEYS, cors_origins=["https://a.org"])) as client:
        preflight = await client.options("/generate", headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["Access-Control-Allow-Origin"] == "https://a.org"
        for headers, status in ((bearer("first-key"), 200), ({}, 401)):
            response = await client.post("/generate", json=BODY, headers={"Origin": "https://a.org", **headers})
            assert response.status_code == status
            assert response.headers["Access-Control-Allow-Origin"] == "https://a.org", "pages may read errors too"
            assert response.headers["Access-Control-Expose-Headers"] == "X-Request-Id"
        stranger = await client.options("/generate", headers={**PREFLIGHT, "Origin": "https://b.org"})
        assert "Access-Control-Allow-Origin" not in stranger.headers


async def test_every_origin_or_none() -> None:
    async with client_of(make_app(FakeEngine(), cors_origins=["*"])) as client:
        response = await client.post("/generate", json=BODY, headers={"Origin": "https://b.org"})
        assert response.headers["Access-Control-Allow-Origin"] == "*"
    async with client_of(make_app(FakeEngine())) as client:
        response = await client.post("/generate", json=BODY, headers={"Origin": "https://b.org"})
        assert "Access-Control-Allow-Origin" not in response.headers


async def test_the_largest_body_is_a_setting() -> None:
    big = b'{"prompt": "' + b"x" * 2**20 + b'"}'
    async with client_of(make_app(FakeEngine(), max_body_mb=1)) as client:
        response = await client.post("/generate", content=big)
    assert response.status_code == 413
    assert response.json()["error"]["message"] == "the body is longer than 1 MiB, the most that is read"
    async with client_of(make_app(FakeEngine(), max_body_mb=2)) as client:
        assert (await client.post("/generate", content=big)).status_code == 400, "read, and then found too long"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is over soon after the waiting began, however long it took to come so far."""
    monkeypatch.setattr("server.streaming.remaining", lambda: 0.02)


async def test_time_counts_from_the_arrival() -> None:
    engine = FakeEngine(silent)
    async with client_of(make_app(engine, request_timeout=0.02)) as client:
        response = await client.post("/generate", json=BODY)
    assert response.status_code in (408, 504), "on a busy machine it may be over before the body is read"
    assert not engine.active


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("script", [endless, silent])
async def test_a_request_that_takes_too_long_is_a_504_and_frees_its_place(script: Script) -> None:
    engine = FakeEngine(script)
    async with client_of(make_app(engine)) as client:
        response = await client.post("/generate", json={**BODY, "n": 2})
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "timeout"
    assert "--request-timeout" in response.json()["error"]["message"]
    assert len(engine.submitted) == 2
    assert not engine.active


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("script", [endless, silent])
async def test_a_stream_that_takes_too_long_ends_with_an_error_and_frees_its_place(script: Script) -> None:
    engine = FakeEngine(script)
    async with client_of(make_app(engine)) as client:
        response = await client.post("/generate", json={**BODY, "stream": True})
    assert response.status_code == 200
    data = sse_data(response.text)
    assert json.loads(data[-2])["error"]["code"] == "timeout"
    assert data.count("[DONE]") == 1
    assert data[-1] == "[DONE]"
    assert not engine.active


async def test_a_slow_body_is_a_408() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        await asyncio.Event().wait()

    engine = FakeEngine()
    async with client_of(make_app(engine, request_timeout=0.05)) as client:
        response = await client.post("/generate", content=slow())
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "body_timeout"
    assert not engine.submitted


async def test_time_without_a_limit_or_within_it_changes_nothing() -> None:
    for limit in (None, 1000.0):
        async with client_of(make_app(FakeEngine(), request_timeout=limit)) as client:
            assert (await client.post("/generate", json=BODY)).json()["text"] == "hi"
            whole = sse_data((await client.post("/generate", json={**BODY, "stream": True})).text)
            assert "".join(json.loads(item)["text"] for item in whole[:-1]) == "hi"


async def test_in_the_drain_only_the_state_is_told() -> None:
    app = make_app(FakeEngine())
    async with client_of(app) as client:
        app.state.drain.begun = True
        assert (await client.get("/health")).json()["status"] == "draining"
        assert (await client.get("/version")).status_code == 200
        assert (await client.get("/metrics")).status_code != 503
        for method, path in (("POST", "/generate"), ("GET", "/v1/models"), ("GET", "/")):
            response = await client.request(method, path, json=BODY)
            assert response.status_code == 503
            assert response.headers["Retry-After"] == "5"


def test_a_request_whose_body_is_not_whole_at_the_end_of_the_drain_is_told(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(FakeEngine())
    with server_of(app) as url:
        address = httpx.URL(url)
        client = socket.create_connection((address.host, address.port))
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n{")
        eventually(lambda: app.state.drain.running == 1)
    with client:
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"the server is shutting down" in answer
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_requests_are_counted_while_they_run_however_they_end() -> None:
    engine = FakeEngine(silent)
    app = make_app(engine)
    async with client_of(app) as client:
        running = asyncio.create_task(client.post("/generate", json=BODY))
        while not engine.active:
            await asyncio.sleep(0)
        assert app.state.drain.running == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert app.state.drain.running == 0
        await client.post("/generate", content=b"no JSON")
        assert app.state.drain.running == 0


@pytest.mark.parametrize(
    ("host", "header", "origin", "status"),
    [
        ("127.0.0.1", "localhost:8000", None, 200),
        ("127.0.0.1", "localhost:8000", "http://localhost:8000", 200),
        ("127.0.0.1", "127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        ("::1", "[::1]:8000", "http://[::1]:8000", 200),
        ("0.0.0.0", "box.lan:8000", "http://box.lan:8000", 200),
        ("127.0.0.1", "localhost:8000", "https://friend.example", 200),
        ("127.0.0.1", "localhost:8000", "https://evil.example", 403),
        ("127.0.0.1", "localhost:8000", "http://localhost:9000", 403),
        ("127.0.0.1", "localhost:8000", "null", 403),
        ("127.0.0.1", "evil.example:8000", "http://evil.example:8000", 403),
        ("0.0.0.0", "box.lan:8000", "https://evil.example", 403),
    ],
)
async def test_a_page_of_another_origin_may_not_ask_a_server_without_keys(
    host: str, header: str, origin: str | None, status: int
) -> None:
    engine = FakeEngine()
    headers = {"Host": header, **({"Origin": origin} if origin else {})}
    async with client_of(make_app(engine, host=host, cors_origins=("https://friend.example",))) as client:
        response = await client.post("/generate", json=BODY, headers=headers)
    assert response.status_code == status
    if status == 403:
        assert response.json()["error"]["code"] == "cross_origin"
        assert origin is not None
        assert origin in response.json()["error"]["message"]
        assert not engine.submitted


async def test_with_a_key_the_page_does_not_matter() -> None:
    async with client_of(make_app(FakeEngine(), api_key=KEYS)) as client:
        headers = {**bearer("first-key"), "Origin": "https://elsewhere.example"}
        assert (await client.post("/generate", json=BODY, headers=headers)).status_code == 200


async def test_a_path_with_a_slash_too_many_is_told_and_not_sent_elsewhere() -> None:
    async with client_of(make_app(FakeEngine())) as client:
        assert (await client.post("/generate/", json=BODY)).status_code == 404
