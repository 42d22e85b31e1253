"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from dspark_core.checkpoint.tokenizer import Tokenizer
from dspark_core.errors import RequestError
from dspark_core.grammar import Grammar
from dspark_core.settings import quote
from server.async_engine import Stream
from server.fields import MAX_TOP_LOGPROBS
from server.openai.fields import REFUSED, OpenAIFields
from server.openai.logprobs import CompletionLogprobs
from server.openai.writer import OpenAIWriter
from server.protocol import Json
from server.request import Delta, RequestParams

DEFAULT_MAX_TOKENS = 16  # OpenAI's own


def _off_is_absent(value: Any) -> Any:
    return None if value is False else value


class CompletionRequest(OpenAIFields):
    """Body of POST /v1/completions."""

    refused: ClassVar[dict[str, str]] = {
        **REFUSED,
        "suffix": "the models served here only continue a text",
        "add_special_tokens": "send token ids",
    }

    prompt: Any = None
    echo: bool = False  # before max_tokens, whose least value it decides
    max_tokens: Annotated[int, Field(ge=0)] = DEFAULT_MAX_TOKENS
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS), BeforeValidator(_off_is_absent)] = None
    best_of: int | None = None

    @field_validator("max_tokens")
    @classmethod
    def _something(cls, value: int, info: ValidationInfo) -> int:
        if value == 0 and not info.data.get("echo"):
            raise ValueError("found 0, expected at least 1, or echo: true to score the prompt alone")
        return value

    @model_validator(mode="after")
    def _possible(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise ValueError(f"found best_of {self.best_of}, expected n, which is {self.n}: no choice is thrown away")
        return self

    def prompts(self) -> list[str | list[int]]:
        """The prompts in any of the four forms: a text, texts, token ids, lists of token ids."""
        given = self.prompt
        if isinstance(given, str) or _is_ids(given):
            return [given]
        if isinstance(given, list) and given and all(isinstance(item, str) or _is_ids(item) for item in given):
            return given
        expected = (
            "a text, a list of texts, a list of token ids (none negative), or a list of such lists, none of them empty"
        )
        raise RequestError(f"prompt: found {quote(given)}, expected {expected}", "prompt")

    def params(self, choice_index: int, grammar: Grammar | None) -> RequestParams:
        """What the engine is asked to do for one of all choices."""
        return self.request_params(
            choice_index,
            grammar,
            max_tokens=max(self.max_tokens, 1),  # to score a prompt, the engine has to choose a token: it is dropped
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


def _is_ids(value: Any) -> bool:
    numbers = isinstance(value, list) and value != []
    return numbers and all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value)


class CompletionWriter(OpenAIWriter):
    """Words the answer.

    Args:
        request, request_id, model: as for every writer.
        tokenizer: for the text of single tokens.
        prompts: each as it was sent, and its ids; each has `request.n` choices, one after the other.
        streams: of the choices.
    """

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        request: CompletionRequest,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        prompts: Sequence[tuple[str | list[int], list[int]]],
        streams: Sequence[Stream],
    ) -> None:
        super().__init__(request, request_id, model, sum(len(ids) for _, ids in prompts))
        self.request, self.tokenizer, self.prompts, self.streams = request, tokenizer, prompts, streams
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def events(self, index: int, delta: Delta) -> Iterator[Json]:
        """One chunk; the first of a choice begins with the prompt if it is to be echoed."""
        choice = self.choice(index, [delta])
        if choice["text"] or choice["logprobs"] or choice["finish_reason"]:
            yield self.chunk(choice)

    def choice(self, index: int, deltas: Sequence[Delta]) -> Json:
        """What `deltas` add to a choice; its first ones begin with the prompt if that is to be echoed."""
        echo = self._echo(index)
        if self.request.max_tokens == 0:  # the prompt alone is scored
            return {"index": index, **echo, "finish_reason": "length"}
        self.count(index, deltas[-1])
        text, logprobs = echo["text"] + "".join(delta.text for delta in deltas), None
        if self.request.logprobs is not None:
            logprobs = self._logprobs[index].of([entry for delta in deltas for entry in delta.logprobs or ()])
            if echo["logprobs"]:
                logprobs = {name: values + logprobs[name] for name, values in echo["logprobs"].items()}
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": deltas[-1].finish_reason}

    def _echo(self, index: int) -> Json:
        """What stands before a choice's first words: the prompt and its scores, if they are to be repeated."""
        nothing: Json = {"text": "", "logprobs": None}
        if index in self._logprobs:
            return nothing
        scores = self._logprobs[index] = CompletionLogprobs(self.tokenizer)
        if not self.request.echo:
            return nothing
        prompt, ids = self.prompts[index // self.request.n]
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
        # Whole since before the first delta was sent, and not touched again.
        entries = self.streams[index].request.prompt_logprobs
        return {"text": text, "logprobs": None if self.request.logprobs is None else scores.of(entries, ids[0])}
