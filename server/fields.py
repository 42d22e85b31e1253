"""The sampling fields that `/generate` and the OpenAI endpoints share, under the names that their users type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dspark_core.errors import RequestError
from dspark_core.grammar import Grammar, GrammarKind
from dspark_core.sampling import MAX_SEED, SamplingParams
from dspark_core.settings import explain, quote
from server.request import RequestParams

MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000  # characters
ANY_OBJECT = {"type": "object"}  # as a schema
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def _whole_characters(value: Any) -> Any:
    """JSON can spell half a UTF-16 pair; no tokenizer can encode it."""
    if isinstance(value, str) and _LONE_SURROGATE.search(value):
        raise ValueError(f"found {quote(value)}, expected text without lone surrogates")
    return value


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _numbered(value: Any) -> Any:
    """JSON's keys are texts, and these are token ids."""
    if not isinstance(value, dict):
        return value
    for key in value:
        if not (isinstance(key, int) or re.fullmatch(r"\d{1,9}", str(key))):
            raise ValueError(f"found key {quote(key)}, expected token ids as keys")
    return {int(key): bias for key, bias in value.items()}


def _random_is_absent(value: Any) -> Any:
    return None if value == -1 else value  # as vLLM and llama.cpp have it


def _how_far(value: Any) -> Any:
    if not isinstance(value, bool) and value != "full":
        raise ValueError(f'found {quote(value)}, expected true, false or "full"')
    return value


Text = Annotated[str, BeforeValidator(_whole_characters)]
SomeText = Annotated[str, Field(min_length=1), BeforeValidator(_whole_characters)]
# Every token is compared with what a stop may yet become, at the cost of its square.
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH), BeforeValidator(_whole_characters)]
TokenId = Annotated[int, Field(ge=0)]


class GrammarSource(NamedTuple):
    """A grammar that a request asks for, and the field in which it does."""

    kind: GrammarKind
    source: Any
    field: str


class Fields(BaseModel):
    """Base of what requests hold: a field that is null counts as absent."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {k: v for k, v in values.items() if v is not None or k not in cls.model_fields}


class JsonSchema(Fields):
    """The `json_schema` of a response format; its name and description are for people, and `strict` is always so."""

    model_config = ConfigDict(extra="ignore")

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Fields):
    """OpenAI's `response_format`."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            found = "with" if self.json_schema else "without"
            raise ValueError(f"found type {self.type} {found} json_schema, expected json_schema where type says so")
        return self


class StructuredOutputs(Fields):
    """vLLM's `structured_outputs`: exactly one kind."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: Text | None = None
    choice: Annotated[list[SomeText], Field(min_length=1)] | None = None
    grammar: Text | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> StructuredOutputs:
        given = self.model_dump(by_alias=True, exclude_none=True)
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"found {found}, expected exactly one of json, json_object, regex, choice and grammar")
        return self


class SamplingFields(Fields):
    """How an answer is sampled. Ranges are SamplingParams' own."""

    temperature: float = SamplingParams.temperature
    top_p: float = SamplingParams.top_p
    top_k: int = SamplingParams.top_k
    min_p: float = SamplingParams.min_p
    presence_penalty: float = SamplingParams.presence_penalty
    frequency_penalty: float = SamplingParams.frequency_penalty
    repetition_penalty: float = SamplingParams.repetition_penalty
    logit_bias: Annotated[dict[TokenId, float], BeforeValidator(_numbered)] = {}
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED), BeforeValidator(_random_is_absent)] = None
    stop: Annotated[list[StopString], BeforeValidator(_one_or_many), Field(max_length=MAX_STOPS)] = []
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool = False
    speculative: Annotated[bool | Literal["full"], BeforeValidator(_how_far)] = True

    @model_validator(mode="after")
    def _one_grammar(self) -> SamplingFields:
        if self.response_format and self.response_format.type != "text" and self.structured_outputs:
            raise ValueError("found response_format and structured_outputs, expected at most one of them")
        return self

    def grammar_source(self) -> GrammarSource | None:
        """What the text must conform to, if anything."""
        wanted = self.response_format
        if wanted and wanted.json_schema:
            return GrammarSource("json", wanted.json_schema.schema_, "response_format")
        if wanted and wanted.type == "json_object":
            return GrammarSource("json", ANY_OBJECT, "response_format")
        if (rules := self.structured_outputs) is None:
            return None
        kinds: dict[GrammarKind, Any] = {"regex": rules.regex, "choice": rules.choice, "grammar": rules.grammar}
        kinds["json"] = ANY_OBJECT if rules.json_object else rules.json_
        kind, source = next(item for item in kinds.items() if item[1] is not None)
        return GrammarSource(kind, source, "structured_outputs")

    def request_params(self, choice_index: int, grammar: Grammar | None = None, **more: Any) -> RequestParams:
        """What the engine is asked to do for one choice; RequestError for a value out of range.

        Args:
            more: what endpoints call by different names: max_tokens, logprobs and the like.
        """
        sampling = SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            seed=self.seed,
        )
        return RequestParams(
            sampling=sampling,
            stop=tuple(self.stop),
            stop_token_ids=frozenset(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            speculative=self.speculative is not False,
            whole_blocks=self.speculative == "full",
            grammar=grammar,
            choice_index=choice_index,
            **more,
        )


AnyFields = TypeVar("AnyFields", bound=BaseModel)


def read_fields(model: type[AnyFields], values: Mapping[str, Any]) -> AnyFields:
    """Validate; RequestError names the field, what was found and what was expected."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        field, complaint = explain(error, model.model_fields)
        raise RequestError(f"{field}: {complaint}" if field else complaint, field or None) from None
