"""Log-probabilities in the two shapes of OpenAI's answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dspark_core.checkpoint.tokenizer import Tokenizer
from server.protocol import Json, finite_logprob, token_text
from server.request import TokenLogprob


class CompletionLogprobs:
    """The shape of completions, for one choice: parallel lists, with places in the text.

    Args:
        tokenizer: for the text of tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.place = tokenizer, 0

    def of(self, entries: Sequence[TokenLogprob], first_token: int | None = None) -> Json:
        """The next entries.

        Args:
            first_token: of the prompt, which nothing foretold: it has no log-probability.
        """
        fields: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if first_token is not None:
            self._add(fields, first_token, None, None)
        for entry in entries:
            top = {self._name(token_id): finite_logprob(value) for token_id, value in entry.top}
            own = finite_logprob(entry.logprob)
            self._add(fields, entry.token_id, own, top | {self._name(entry.token_id): own})
        return fields

    def _add(self, fields: Json, token_id: int, logprob: float | None, top: dict[str, float] | None) -> None:
        name = self._name(token_id)
        for key, value in zip(fields, (name, logprob, top, self.place), strict=True):
            fields[key].append(value)
        if token_id not in self.tokenizer.special_ids:  # which are no text
            self.place += len(token_text(self.tokenizer, token_id))

    def _name(self, token_id: int) -> str:
        """A token as text; one that is no whole character is spelled, so that no two tokens have one name."""
        raw = self.tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> Json:
    """The shape of chat: a list of objects."""

    def one(token_id: int, logprob: float) -> Json:
        return {
            "token": token_text(tokenizer, token_id),
            "logprob": finite_logprob(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        {**one(entry.token_id, entry.logprob), "top_logprobs": [one(*other) for other in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}
