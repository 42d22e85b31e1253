"""Ids of requests, the line a request leaves, the two formats, and what is never logged."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from fastapi import Request, Response

from server.logs import JsonFormatter, TextFormatter, note
from tests.server.http_util import FakeEngine, client_of, endless, make_app

BODY = {"prompt": "hi"}


@pytest.fixture(autouse=True)
def _everything(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(logging.getLogger("httpx"), "disabled", True)  # the tests' own client logs what it asks


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the lines that requests left."""
    return [vars(record)["fields"] for record in caplog.records if record.name == "server.logs"]


async def ask(engine: FakeEngine, body: Any = None, headers: Any = None, **config: Any) -> httpx.Response:
    async with client_of(make_app(engine, **config)) as client:
        return await client.post("/generate", json=BODY if body is None else body, headers=headers)


@pytest.mark.parametrize("given", ["abc-123", "a b", "~" * 128])
async def test_a_sane_id_comes_back(given: str) -> None:
    assert (await ask(FakeEngine(), headers={"X-Request-Id": given})).headers.get_list("X-Request-Id") == [given]


@pytest.mark.parametrize("given", [b"", b"~" * 129, b"a\tb", "ü".encode(), b"\x7f"])
async def test_another_id_is_replaced(given: bytes) -> None:
    (found,) = (await ask(FakeEngine(), headers={"X-Request-Id": given})).headers.get_list("X-Request-Id")
    assert re.fullmatch("[0-9a-f]{32}", found)


async def test_every_answer_has_an_id_and_no_two_share_one() -> None:
    app = make_app(FakeEngine(), api_key=["k"])
    key = {"Authorization": "Bearer k"}

    @app.get("/fault")
    async def fault(_: Request) -> Response:
        raise ZeroDivisionError

    async with client_of(app) as client:
        answers = [
            await client.post("/generate", json=BODY, headers=key),
            await client.post("/generate", json={**BODY, "stream": True}, headers=key),
            await client.post("/generate", json={}, headers=key),
            await client.get("/nothing", headers=key),
            await client.get("/generate", headers=key),
            await client.get("/generate"),
            await client.get("/fault", headers=key),
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 404, 405, 401, 500]
    assert len({answer.headers["X-Request-Id"] for answer in answers}) == len(answers)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_request_leaves_one_line_when_it_ends(streaming: bool, caplog: pytest.LogCaptureFixture) -> None:
    await ask(FakeEngine(), {"prompt": "hello", "n": 2, "max_tokens": 3, "stream": streaming})
    (fields,) = lines(caplog)
    assert fields.pop("milliseconds") >= 0
    assert fields == {
        "method": "POST",
        "path": "/generate",
        "status": 200,
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "finish_reason": "length,length",
        "acceptance_length": 2.5,
    }


@pytest.mark.parametrize(
    ("body", "config", "expected"),
    [
        (BODY, {"api_key": ["k"]}, {"status": 401, "error": "invalid_api_key"}),
        (BODY, {}, {"status": 504, "error": "timeout", "prompt_tokens": 2}),
        ({"prompt": "x" * 99}, {}, {"status": 400}),
        (["no object"], {}, {"status": 400}),
    ],
)
async def test_a_request_that_failed_says_what_was_wrong(
    body: Any,
    config: dict[str, Any],
    expected: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.streaming.remaining", lambda: 0.02)
    await ask(FakeEngine(endless), body, **config)
    (fields,) = lines(caplog)
    assert fields.items() >= expected.items()
    assert "finish_reason" not in fields


async def test_a_stream_that_was_cut_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.streaming.remaining", lambda: 0.05)
    await ask(FakeEngine(endless), {**BODY, "stream": True})
    (fields,) = lines(caplog)
    assert (fields["status"], fields["error"], fields["prompt_tokens"]) == (200, "timeout", 2)
    assert "finish_reason" not in fields


async def test_an_unexpected_error_is_logged_once_with_its_trace_and_the_id() -> None:
    app = make_app(FakeEngine())

    @app.get("/fault")
    async def fault(_: Request) -> Response:
        raise ZeroDivisionError("a bug")

    with written() as logged:
        async with client_of(app) as client:
            response = await client.get("/fault", headers={"X-Request-Id": "mine"})
    assert response.json()["error"]["code"] == "internal_error"
    error, access = logged
    assert (error["level"], error["request_id"]) == ("error", "mine")
    assert (access["level"], access["request_id"], access["status"]) == ("info", "mine", 500)
    assert error["exception"].endswith("ZeroDivisionError: a bug")


async def test_what_users_write_is_logged_when_that_is_wanted_only(caplog: pytest.LogCaptureFixture) -> None:
    secret = {"prompt": "tell no one"}
    for body in (
        secret,
        {**secret, "stream": True},
        {**secret, "max_tokens": -1},
        {**secret, "unknown": "tell no one"},
    ):
        await ask(FakeEngine(), body)
    assert len(lines(caplog)) == 4
    assert "tell no one" not in "".join(str(vars(record)) for record in caplog.records)
    caplog.clear()
    await ask(FakeEngine(), secret, log_prompts=True)
    assert lines(caplog)[0]["prompt"] == secret


async def test_keys_and_queries_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(make_app(FakeEngine(), api_key=["hunter2"])) as client:
        for key in ("hunter2", "hunter3"):
            await client.post(f"/generate?key={key}", json=BODY, headers={"Authorization": f"Bearer {key}"})
    assert [fields["status"] for fields in lines(caplog)] == [200, 401]
    assert "hunter" not in "".join(str(vars(record)) for record in caplog.records)


async def test_a_path_cannot_begin_a_line_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(make_app(FakeEngine())) as client:
        await client.get("/x%0aERROR%20forged")
    assert lines(caplog)[0]["path"] == "/x%0AERROR%20forged"


async def test_notes_of_a_request_without_a_log_are_dropped() -> None:
    scope: dict[str, Any] = {"type": "http"}
    note(scope, prompt_tokens=3)
    assert scope == {"type": "http"}


def record(message: str, *args: object, fields: dict[str, Any] | None = None, error: bool = False) -> logging.LogRecord:
    """A record as a logger makes it."""
    info = sys.exc_info() if error else None
    made = logging.getLogger("a.b").makeRecord("a.b", logging.WARNING, "f.py", 1, message, args, info)
    made.created, made.msecs = 0.0, 7.0
    if fields is not None:
        vars(made)["fields"] = fields
    return made


def test_a_line_of_text_has_its_fields_at_the_end() -> None:
    found = TextFormatter().format(
        record("%d of %s", 3, "9%d", fields={"status": 200, "x": "a b", "y": "c\nd", "z": ""})
    )
    assert found.endswith(r' WARNING a.b: 3 of 9%d status=200 x="a b" y="c\nd" z=""')
    assert "\n" not in found


def test_a_line_of_json_is_one_object_in_utc() -> None:
    try:
        int("first line\nsecond line")
    except ValueError:
        made = record("line\nbreak \u2028", fields={"status": 200, "odd": {1}}, error=True)
    line = JsonFormatter().format(made)
    assert len(line.splitlines()) == 1
    found = json.loads(line)
    assert "second line" in found.pop("exception")
    assert found == {
        "time": "1970-01-01T00:00:00.007Z",
        "level": "warning",
        "logger": "a.b",
        "message": "line\nbreak \u2028",
        "status": 200,
        "odd": "{1}",
    }


@contextmanager
def written() -> Iterator[list[dict[str, Any]]]:
    """What is logged meanwhile, as the JSON format writes it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logging.getLogger().addHandler(handler)
    found: list[dict[str, Any]] = []
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(handler)
        found += map(json.loads, stream.getvalue().splitlines())
