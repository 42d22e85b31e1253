"""The three endpoints that generate, asked alike, and what each says brought into one form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx

from tests.server.http_util import ByteTokenizer, sse_data

GENERATE, COMPLETIONS, CHAT = PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")
# One prompt's token ids, as those endpoints call them that take any.
IDS = {GENERATE: "prompt_ids", COMPLETIONS: "prompt"}
WAYS = [(path, stream) for path in PATHS for stream in (False, True)]


@dataclass(frozen=True)
class Said:
    """What an answer of one choice says, whole or streamed.

    Attributes:
        parts: pieces of the text as they came; one if it was not streamed.
        token_bytes: of all entries of its logprobs.
    """

    parts: tuple[str, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    token_bytes: bytes

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def ending(self) -> tuple[str, str, int]:
        """What is the same however it was asked for."""
        return self.text, self.finish_reason, self.completion_tokens


class ChatTokenizer(ByteTokenizer):
    """Bytes, for chat through either endpoint."""

    chat_template = ""

    def encode_chat(self, messages: list[dict[str, Any]], **more: Any) -> list[int]:
        return super().encode_chat(messages)


@dataclass(frozen=True)
class Prompt:
    """Messages, and their ids for the endpoint that takes no messages."""

    messages: list[dict[str, Any]]
    ids: list[int]


def ask(
    client: httpx.Client, path: str, prompt: Prompt, *, stream: bool, logprobs: bool = False, **fields: Any
) -> Said:
    """One request."""
    body: dict[str, Any] = {**fields, "stream": stream}
    if path == COMPLETIONS:
        body["prompt"] = prompt.ids
    else:
        body["messages"] = prompt.messages
    if stream and path != GENERATE:
        body["stream_options"] = {"include_usage": True}
    if logprobs:
        body |= {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return _joined(path, response.text) if stream else _said(path, [response.json()], response.json()["usage"])


def _joined(path: str, body: str) -> Said:
    *data, done = sse_data(body)
    assert done == "[DONE]"
    events = [json.loads(item) for item in data]
    if path == GENERATE:
        return _said(path, events, events[-1]["usage"])
    *events, last = events
    assert last["choices"] == []
    return _said(path, events, last["usage"])


def _said(path: str, events: list[Any], usage: dict[str, int]) -> Said:
    read = [_part(path, event) for event in events]
    reasons = [reason for _, reason, _ in read]
    assert reasons[:-1] == [None] * (len(reasons) - 1), "the reason comes once, and nothing after it"
    assert reasons[-1] is not None
    return Said(
        parts=tuple(text for text, _, _ in read if text),
        finish_reason=reasons[-1],
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        token_bytes=b"".join(raw for _, _, raw in read),
    )


def _part(path: str, event: dict[str, Any]) -> tuple[str, str | None, bytes]:
    """Text, reason and the bytes of the logprobs' tokens."""
    if path == GENERATE:
        return event["text"], event.get("finish_reason"), _bytes(event.get("logprobs") or ())
    (choice,) = event["choices"]
    logprobs = choice["logprobs"] or {}
    if path == COMPLETIONS:
        raw = b"".join(map(spelled, logprobs.get("tokens", ())))
        return choice["text"], choice["finish_reason"], raw
    said = choice["message"] if "message" in choice else choice["delta"]
    return said.get("content") or "", choice["finish_reason"], _bytes(logprobs.get("content", ()))


def _bytes(entries: Any) -> bytes:
    return b"".join(bytes(entry["bytes"]) for entry in entries)


def spelled(name: str) -> bytes:
    """The bytes of a token of completions, where half a character is written `bytes:\\xf0`."""
    if name.startswith("bytes:"):
        return bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
    return name.encode()
