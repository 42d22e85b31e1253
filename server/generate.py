"""How `/generate` answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dspark_core.checkpoint.tokenizer import Tokenizer
from server.protocol import Json, closing_fields, logprob_entry, round_fields
from server.request import Delta


class GenerateWriter:
    """Words the answer to one request.

    Args:
        tokenizer: for the text of single tokens.
        prompt_tokens: length of the prompt.
        num_choices: how many share it; where there are several, each tells its index.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tokens: int, num_choices: int) -> None:
        self.tokenizer, self.prompt_tokens, self.num_choices = tokenizer, prompt_tokens, num_choices

    def events(self, index: int, delta: Delta) -> Iterator[Json]:
        """The new text; the last event of a choice also says how it ended."""
        fields = self._content([delta])
        if delta.finish_reason is not None:
            yield {**self._place(index), **fields, **closing_fields(delta, self.prompt_tokens)}
        elif delta.text or delta.token_ids:
            yield {**self._place(index), **fields}

    def closing(self) -> Iterator[Json]:
        """Nothing: every choice has spoken for itself."""
        yield from ()

    def reply(self, choices: Sequence[Sequence[Delta]]) -> Json:
        """One object for one choice, a list of them for several."""
        objects = [
            {**self._place(i), **self._content(deltas), **closing_fields(deltas[-1], self.prompt_tokens)}
            for i, deltas in enumerate(choices)
        ]
        if len(objects) == 1:
            return objects[0]
        completion_tokens = sum(deltas[-1].completion_tokens for deltas in choices)
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": completion_tokens}
        return {"choices": objects, "usage": usage}

    def _place(self, index: int) -> dict[str, int]:
        return {"index": index} if self.num_choices > 1 else {}

    def _content(self, deltas: Sequence[Delta]) -> Json:
        """Text, token ids and, where asked for, logprobs and rounds of consecutive deltas of one choice."""
        fields: Json = {
            "text": "".join(delta.text for delta in deltas),
            "token_ids": [token_id for delta in deltas for token_id in delta.token_ids],
        }
        if any(delta.logprobs is not None for delta in deltas):
            entries = [entry for delta in deltas for entry in delta.logprobs or ()]
            fields["logprobs"] = [logprob_entry(self.tokenizer, entry) for entry in entries]
        if any(delta.rounds is not None for delta in deltas):
            rounds = [detail for delta in deltas for detail in delta.rounds or ()]
            fields["rounds"] = [round_fields(self.tokenizer, detail) for detail in rounds]
        return fields
