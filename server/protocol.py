"""What `/generate` takes, and the JSON in which the server answers. Knows nothing of sockets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from dspark_core.checkpoint.tokenizer import Tokenizer
from dspark_core.errors import RequestError
from dspark_core.sampling import MAX_SEED, SamplingParams
from dspark_core.settings import explain, quote
from server.request import Delta, RequestParams, TokenLogprob

Json = dict[str, Any]
INTERNAL_ERROR = "internal error; the server's log has the details"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# Python's line splitters, unlike JSON, end a line at these: escaped, every event is one line to every client.
_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
# JSON has no -inf; OpenAI's own stand-in for the log of zero.
_LOWEST_LOGPROB = -9999.0


def _whole_characters(value: Any) -> Any:
    """JSON can spell half a UTF-16 pair; no tokenizer can encode it."""
    if isinstance(value, str) and _LONE_SURROGATE.search(value):
        raise ValueError(f"found {quote(value)}, expected text without lone surrogates")
    return value


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(_whole_characters)]
StopString = Annotated[str, Field(min_length=1), BeforeValidator(_whole_characters)]
TokenId = Annotated[int, Field(ge=0)]


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    role: Literal["system", "user", "assistant"]
    content: Text


class GenerateRequest(BaseModel):
    """Body of POST /generate. An optional field that is null counts as absent; an unknown field is an error.

    The ranges of the sampling fields are SamplingParams' own.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    prompt: Text | None = None
    prompt_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = SamplingParams.temperature
    top_p: float = SamplingParams.top_p
    top_k: int = SamplingParams.top_k
    min_p: float = SamplingParams.min_p
    presence_penalty: float = SamplingParams.presence_penalty
    frequency_penalty: float = SamplingParams.frequency_penalty
    repetition_penalty: float = SamplingParams.repetition_penalty
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    stop: Annotated[list[StopString], BeforeValidator(_one_or_many), Field(max_length=16)] = []
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    n: int = Field(1, ge=1, le=16)
    logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool = False
    speculative: bool = True

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: Json) -> Json:
        return {k: v for k, v in values.items() if v is not None or k not in cls.model_fields}

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

    def params(self, choice_index: int) -> RequestParams:
        """What the engine is asked to do for one of the n choices; RequestError for a value out of range."""
        sampling = SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
        )
        return RequestParams(
            sampling=sampling,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop),
            stop_token_ids=frozenset(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            speculative=self.speculative,
            choice_index=choice_index,
        )


def parse_generate(body: bytes) -> GenerateRequest:
    """Read the body of POST /generate as JSON whatever its content type; RequestError names what is wrong."""
    values = parse_object(body)
    try:
        return GenerateRequest.model_validate(values)
    except ValidationError as error:
        field, complaint = explain(error, GenerateRequest.model_fields)
        raise RequestError(f"{field}: {complaint}" if field else complaint, field or None) from None


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


def logprob_entry(tokenizer: Tokenizer, entry: TokenLogprob) -> Json:
    """One emitted token's log-probability (natural log) and its alternatives, most likely first."""
    top = [_token_logprob(tokenizer, token_id, logprob) for token_id, logprob in entry.top]
    return {**_token_logprob(tokenizer, entry.token_id, entry.logprob), "top": top}


def _token_logprob(tokenizer: Tokenizer, token_id: int, logprob: float) -> Json:
    raw = tokenizer.token_bytes(token_id)
    return {
        "token": raw.decode("utf-8", "replace"),
        "token_id": token_id,
        "logprob": max(logprob, _LOWEST_LOGPROB),
        "bytes": list(raw),
    }
