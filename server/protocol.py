"""What `/generate` takes, and the JSON in which the server answers. Knows nothing of sockets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dspark_core.checkpoint.tokenizer import Tokenizer
from dspark_core.errors import RequestError
from dspark_core.grammar import Grammar
from dspark_core.settings import quote
from server.detail import RoundDetail
from server.fields import MAX_TOP_LOGPROBS, SamplingFields, Text, TokenId, read_fields
from server.request import Delta, RequestParams, TokenLogprob

Json = dict[str, Any]
INTERNAL_ERROR = "internal error; the server's log has the details"
MODEL_NOT_FOUND = "model_not_found"  # a code of OpenAI's
# Python's line splitters, unlike JSON, end a line at these: escaped, every event is one line to every client.
_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
# JSON has no -inf; OpenAI's own stand-in for the log of zero.
_LOWEST_LOGPROB = -9999.0


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    role: Literal["system", "user", "assistant"]
    content: Text


class GenerateRequest(SamplingFields):
    """Body of POST /generate. An unknown field is an error."""

    model_config = ConfigDict(extra="forbid")

    prompt: Text | None = None
    prompt_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    max_tokens: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    detail: bool = False

    @model_validator(mode="after")
    def _one_kind_of_prompt(self) -> GenerateRequest:
        given = [name for name in ("prompt", "prompt_ids", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"found {found}, expected exactly one of prompt, prompt_ids and messages")
        return self

    def prompt_tokens(self, tokenizer: Tokenizer) -> list[int]:
        """The prompt as token ids. Takes long for a long text: call it outside the event loop."""
        if self.prompt_ids is not None:
            return self.prompt_ids
        if self.prompt is not None:
            return tokenizer.encode(self.prompt)
        return tokenizer.encode_chat([message.model_dump() for message in self.messages or []])

    def params(self, choice_index: int, grammar: Grammar | None = None) -> RequestParams:
        """What the engine is asked to do for one of the n choices; RequestError for a value out of range."""
        more = {"max_tokens": self.max_tokens, "logprobs": self.logprobs, "detail": self.detail}
        return self.request_params(choice_index, grammar, **more)


def parse_generate(body: bytes) -> GenerateRequest:
    """Read the body of POST /generate as JSON whatever its content type; RequestError names what is wrong."""
    return read_fields(GenerateRequest, parse_object(body))


def parse_object(body: bytes) -> Json:
    """A JSON object from raw bytes; RequestError when it is anything else."""
    if not body.strip():
        raise RequestError("the body is empty, expected a JSON object")
    try:
        values = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 at byte {error.start}, expected JSON in UTF-8") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply, expected a flat JSON object") from None
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}; expected a JSON object") from None
    if not isinstance(values, dict):
        raise RequestError(f"the body is {quote(values)}, expected a JSON object")
    return values


def to_json(value: Mapping[str, Any]) -> bytes:
    """UTF-8 JSON on one line, non-ASCII text readable, lone surrogates as JSON's own `\\udXXX` escapes."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_LINE_BREAKS).encode("utf-8", "backslashreplace")


def error_body(message: str, status: int, code: str | None = None, param: str | None = None) -> Json:
    """The one shape of every error; `type` says whose fault it is."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def closing_fields(last: Delta, prompt_tokens: int) -> Json:
    """What a choice says once, at its end."""
    spent = last.speculation
    return {
        "finish_reason": last.finish_reason,
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": last.completion_tokens},
        "speculation": {
            "rounds": spent.rounds,
            "drafted": spent.drafted,
            "verified": spent.verified,
            "accepted": spent.accepted,
            "acceptance_length": spent.acceptance_length,
        },
    }


def round_fields(tokenizer: Tokenizer, detail: RoundDetail) -> Json:
    """What became of one round's draft."""
    confidence: Sequence[float | None] = detail.confidence or [None] * len(detail.draft_ids)
    draft = [
        {"token_id": token_id, "text": token_text(tokenizer, token_id), "confidence": value}
        for token_id, value in zip(detail.draft_ids, confidence, strict=True)
    ]
    tokens = [
        {"token_id": token.token_id, "text": token.text, "source": source}
        for token, source in zip(detail.tokens, detail.sources, strict=True)
    ]
    counts = {"drafted": len(draft), "verified": detail.verified, "accepted": detail.accepted}
    return {**counts, "draft": draft, "tokens": tokens}


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token by itself; U+FFFD stands for bytes that are no whole character."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def logprob_entry(tokenizer: Tokenizer, entry: TokenLogprob) -> Json:
    """One emitted token's log-probability (natural log) and its alternatives, most likely first."""
    top = [_token_logprob(tokenizer, token_id, logprob) for token_id, logprob in entry.top]
    return {**_token_logprob(tokenizer, entry.token_id, entry.logprob), "top": top}


def _token_logprob(tokenizer: Tokenizer, token_id: int, logprob: float) -> Json:
    return {
        "token": token_text(tokenizer, token_id),
        "token_id": token_id,
        "logprob": finite_logprob(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def finite_logprob(logprob: float) -> float:
    """A number that JSON can hold."""
    return logprob if logprob > _LOWEST_LOGPROB else _LOWEST_LOGPROB  # NaN too
