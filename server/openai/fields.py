"""What the OpenAI endpoints have in common: what they take, what they refuse, and the parts of every answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, model_validator

from dspark_core.errors import RequestError
from dspark_core.settings import quote
from server.fields import Fields, SamplingFields, Text, read_fields
from server.protocol import MODEL_NOT_FOUND, parse_object

_STRUCTURED = "structured_outputs"
# Fields that others know and that would change the output: to leave them out silently would be to lie.
REFUSED: dict[str, str] = {
    "guided_json": f"use {_STRUCTURED}",
    "guided_regex": f"use {_STRUCTURED}",
    "guided_choice": f"use {_STRUCTURED}",
    "guided_grammar": f"use {_STRUCTURED}",
    "use_beam_search": "texts are sampled one token at a time",
    "bad_words": "use logit_bias",
    "allowed_token_ids": "use logit_bias",
    "truncate_prompt_tokens": "prompts are never cut",
    "length_penalty": "it belongs to beam search",
    "typical_p": "use top_p or min_p",
    "prompt_logprobs": "use echo and logprobs of /v1/completions",
    "lora_request": "one model is served",
    "repeat_penalty": "use repetition_penalty",
    "skip_special_tokens": "special tokens are never part of a text",
    "include_stop_str_in_output": "stop texts are never part of a text",
}
# With these values they ask for nothing, as others do with null, false, and what is empty.
_OFF = {
    "length_penalty": 1,
    "typical_p": 1,
    "repeat_penalty": 1,
    "skip_special_tokens": True,
    "add_special_tokens": True,
}


class StreamOptions(Fields):
    """OpenAI's `stream_options`."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class OpenAIFields(SamplingFields):
    """Base of both bodies. Unknown fields are ignored, since clients send many; known ones are kept or refused."""

    model_config = ConfigDict(extra="ignore")
    refused: ClassVar[Mapping[str, str]] = REFUSED

    model: Text | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _streamed(self) -> OpenAIFields:
        if self.stream_options and not self.stream:
            raise ValueError("found stream_options without stream, expected stream: true beside them")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


AnyBody = TypeVar("AnyBody", bound=OpenAIFields)


def parse_body(model: type[AnyBody], body: bytes, served: str) -> AnyBody:
    """Read a body; RequestError names the field at fault.

    Args:
        served: the name of the one model there is.
    """
    values = parse_object(body)
    for name, reason in model.refused.items():
        if _asks_for_something(name, values.get(name)):
            raise RequestError(f"{name}: found {quote(values[name])}, which is not supported: {reason}", name)
    request = read_fields(model, values)
    check_model(request.model, served)
    return request


def _asks_for_something(name: str, value: Any) -> bool:
    if name in _OFF:
        return value not in (None, _OFF[name])
    return value is not None and value is not False and value not in ([], {}, "")


def check_model(name: str | None, served: str) -> None:
    """Raise RequestError unless a client means the one model there is."""
    if name not in (None, served):
        message = f"model: found {quote(name)}, expected {quote(served)}, the model that is served"
        raise RequestError(message, "model", MODEL_NOT_FOUND)
