"""The kinds of error that a user of dspark is meant to read."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A model folder cannot be used: the message names the file or key, what was found and what was expected."""


class RunError(RuntimeError):
    """A long run cannot go on: the message says why, and what is left of it."""


class RequestError(ValueError):
    """A request cannot be served as sent (HTTP 400).

    Attributes:
        field: the request field at fault, or None when no single field is.
        code: a word for programs where OpenAI's API has one, such as context_length_exceeded.
    """

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.code = field, code
