"""What the answers of both endpoints have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from server.openai.fields import OpenAIFields
from server.protocol import Json
from server.request import Delta


class OpenAIWriter(ABC):
    """Base: ids, kinds and usage of one answer; subclasses word the choices.

    Args:
        request: what was asked.
        request_id: of the HTTP request, which the log has too.
        model: name of the model.
        prompt_tokens: of all prompts together.

    Attributes:
        prefix: what ids begin with.
        kind, chunk_kind: object type of a whole answer, and of a part of a stream.
    """

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, request: OpenAIFields, request_id: str, model: str, prompt_tokens: int) -> None:
        self.include_usage, self.prompt_tokens = request.include_usage, prompt_tokens
        self._fields = {"id": f"{self.prefix}-{request_id}", "created": int(time.time()), "model": model}
        self._completion_tokens: dict[int, int] = {}  # by choice

    @abstractmethod
    def events(self, index: int, delta: Delta) -> Iterator[Json]:
        """See `server.generation.Writer`."""

    @abstractmethod
    def choice(self, index: int, deltas: Sequence[Delta]) -> Json:
        """A whole choice."""

    def closing(self) -> Iterator[Json]:
        """The usage, if it was asked for."""
        if self.include_usage:
            yield {**self._fields, "object": self.chunk_kind, "choices": [], "usage": self._usage()}

    def reply(self, choices: Sequence[Sequence[Delta]]) -> Json:
        """All choices, prompt by prompt."""
        objects = [self.choice(index, deltas) for index, deltas in enumerate(choices)]
        return {**self._fields, "object": self.kind, "choices": objects, "usage": self._usage()}

    def count(self, index: int, delta: Delta) -> None:
        """Remember how many tokens a choice has."""
        self._completion_tokens[index] = delta.completion_tokens

    def chunk(self, choice: Json) -> Json:
        """A part of a stream."""
        usage = {"usage": None} if self.include_usage else {}
        return {**self._fields, "object": self.chunk_kind, "choices": [choice], **usage}

    def _usage(self) -> Json:
        generated = sum(self._completion_tokens.values())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
        }
