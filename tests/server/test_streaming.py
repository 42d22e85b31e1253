"""Streams: what their events carry, and what becomes of a fault after they began."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from server.async_engine import EngineDeadError
from server.protocol import to_json
from server.request import Delta, RequestParams
from tests.server.http_util import (
    SPECULATION,
    FakeEngine,
    delta,
    post,
    scripted,
    sse_data,
)


async def stream(engine: FakeEngine, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream that must end with exactly one [DONE]."""
    response = await post(engine, {"prompt": "hello", "stream": True, **body})
    assert response.status_code == 200
    data = sse_data(response.text)
    assert data[-1] == "[DONE]"
    assert data.count("[DONE]") == 1
    return [json.loads(item) for item in data[:-1]]


async def test_a_stream_carries_new_text_and_ends_once() -> None:
    events = await stream(FakeEngine())
    assert [event["text"] for event in events] == ["h", "e", "l", "l", "o", ""]
    assert [event["token_ids"] for event in events] == [[104], [101], [108], [108], [111], []]
    assert all(set(event) == {"text", "token_ids"} for event in events[:-1])
    assert events[-1] == {
        "text": "",
        "token_ids": [],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 5, "completion_tokens": 5},
        "speculation": SPECULATION,
    }


async def test_a_stream_is_neither_cached_nor_buffered() -> None:
    headers = (await post(FakeEngine(), {"prompt": "a", "stream": True})).headers
    assert headers["content-type"].split(";")[0] == "text/event-stream"
    assert headers["cache-control"] == "no-cache, no-store"
    assert headers["x-accel-buffering"] == "no"


async def test_deltas_without_news_are_not_sent_and_ids_without_text_are() -> None:
    last = delta("😀", [4], finish_reason="stop", completion_tokens=4)
    events = await stream(FakeEngine(scripted(delta(""), delta("", [1, 2, 3]), delta(""), last)))
    assert [(event["text"], event["token_ids"]) for event in events] == [("", [1, 2, 3]), ("😀", [4])]


async def test_stream_and_reply_say_the_same() -> None:
    body = {"logprobs": 2, "seed": 3}
    whole = (await post(FakeEngine(), {"prompt": "hello", **body})).json()
    events = await stream(FakeEngine(), **body)
    joined = events[-1] | {
        "text": "".join(event["text"] for event in events),
        "token_ids": [i for event in events for i in event["token_ids"]],
        "logprobs": [entry for event in events for entry in event.get("logprobs", [])],
    }
    assert joined == whole


async def test_choices_of_a_stream_are_told_apart_by_index() -> None:
    events = await stream(FakeEngine(), n=2)
    for index in range(2):
        own = [event for event in events if event["index"] == index]
        assert "".join(event["text"] for event in own) == "hello"
        assert [event.get("finish_reason") for event in own] == [None] * 5 + ["stop"]


async def test_text_no_encoder_takes_is_still_sent() -> None:
    engine = FakeEngine(scripted(delta("\ud800", [1]), delta("", finish_reason="stop")))
    events = await stream(engine)
    assert events[0]["text"] == "\ud800"
    assert to_json(events[0])


FAULTS = [
    (delta("", error="KV pool lost a page"), "KV pool lost a page", 500),
    (EngineDeadError("out of memory"), "out of memory", 503),
    (ZeroDivisionError("secret"), "internal error; the server's log has the details", 500),
]


@pytest.mark.parametrize(("fault", "message", "status"), FAULTS)
async def test_a_fault_after_the_stream_began_is_an_event_and_one_done(
    fault: Delta | Exception, message: str, status: int
) -> None:
    """Case N1."""
    events = await stream(FakeEngine(scripted(delta("a"), delta("b"), fault)))
    assert [event.get("text") for event in events] == ["a", "b", None]
    assert set(events[-1]) == {"error"}
    assert events[-1]["error"]["message"] == message


@pytest.mark.parametrize(("fault", "message", "status"), FAULTS)
async def test_a_fault_fails_a_reply_as_a_whole(fault: Delta | Exception, message: str, status: int) -> None:
    response = await post(FakeEngine(scripted(delta("a"), fault)), {"prompt": "hi"})
    assert response.status_code == status
    assert response.json()["error"]["message"] == message


async def test_a_failed_choice_leaves_the_others_alone() -> None:
    async def script(prompt_ids: list[int], params: RequestParams) -> AsyncIterator[Delta]:
        if params.choice_index == 1:
            yield delta("", error="NaN logits")
            return
        yield delta("fine")
        yield delta("", finish_reason="stop", completion_tokens=4)

    events = await stream(FakeEngine(script), n=2)
    assert [event["text"] for event in events if event["index"] == 0] == ["fine", ""]
    (failed,) = [event for event in events if event["index"] == 1]
    assert failed["error"]["message"] == "NaN logits"


def test_json_is_readable_utf8_on_one_line_under_every_line_splitter() -> None:
    text = 'für 😀 龜 \n\r\x0b\x0c\x1c\x85\u2028\u2029 \\ "'
    raw = to_json({"text": text})
    assert "für 😀 龜".encode() in raw
    assert len(raw.decode().splitlines()) == 1
    assert json.loads(raw) == {"text": text}


def test_lone_surrogates_are_sent_as_jsons_own_escapes() -> None:
    raw = to_json({"text": "\\\ud800x"})
    assert raw == b'{"text":"\\\\\\ud800x"}'
    assert json.loads(raw) == {"text": "\\\ud800x"}


def test_nan_is_never_sent() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        to_json({"logprob": float("nan")})
