"""The tokenizer of a model folder: prompts to ids, ids to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from dspark_core.checkpoint.chat_template import ChatTemplate, find_chat_template, read_optional
from dspark_core.checkpoint.control_tokens import ControlTokens
from dspark_core.checkpoint.detokenizer import ByteDetokenizer, Detokenizer, StreamDetokenizer, TokenBytes
from dspark_core.errors import CheckpointError, RequestError

__all__ = ["Detokenizer", "Tokenizer"]


class Tokenizer:
    """Encodes and decodes for one model. Safe to share between threads.

    Special tokens spelled out in a raw prompt are special tokens: whoever sends one writes the whole prompt
    and may need them. Inside chat messages they are plain text.

    Attributes:
        vocab_size: number of ids the tokenizer knows, the largest id + 1.
        eos_token_ids: what tokenizer_config.json and special_tokens_map.json name as end of text.
        chat_template: source of the chat template, or None.
        special_ids: ids of control tokens, which are no text.
        exact_bytes: whether the joined bytes of tokens are their text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_token_ids: frozenset[int] = frozenset(),
        template: ChatTemplate | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._template = template
        self.eos_token_ids = eos_token_ids
        self.chat_template = template.source if template else None
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        special = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}
        self.special_ids = frozenset(special.values())
        self._control = ControlTokens(backend, special)
        self._token_bytes = TokenBytes.of(backend)
        self.exact_bytes = self._token_bytes.exact

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Load tokenizer.json and the files beside it.

        Raises:
            CheckpointError: a file is missing or broken, or names a token that the vocabulary lacks.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: not found; expected the tokenizer of the model as tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for every kind of damage
            raise CheckpointError(f"{path}: not a readable tokenizer: {error}") from error
        config = read_optional(folder / "tokenizer_config.json")
        files = [_named_tokens(read_optional(folder / "special_tokens_map.json")), _named_tokens(config)]
        eos = {names["eos_token"] for names in files if "eos_token" in names}
        for token in sorted(eos):
            if backend.token_to_id(token) is None:
                raise CheckpointError(f"{path}: no token {token!r}, which a file beside it names as eos_token")
        names = files[0] | files[1]
        _mark_special(backend, eos | {names.get("bos_token", "")})
        found = find_chat_template(folder, config)
        template = ChatTemplate(*found, special_tokens=names) if found else None
        ids = map(backend.token_to_id, eos)
        return cls(backend, frozenset(id_ for id_ in ids if id_ is not None), template)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a raw prompt, with what the tokenizer itself puts around a text (its BOS).

        Raises:
            RequestError: `text` holds half a surrogate pair, which no encoding of Unicode can carry.
        """
        _check_unicode(text, "prompt")
        # A batch of one: unlike `encode` it lets other threads run, and a long text takes seconds.
        return list(self._backend.encode_batch([text])[0].ids)

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a piece of text, with nothing around it."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation in the model's chat format.

        Args:
            tools: functions that may be called, in OpenAI's notation.
            add_generation_prompt: end with the opening of the next answer.
            variables: more variables of this model's template.

        Raises:
            RequestError: there is no chat template, the messages are malformed, or the template refuses them.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; send a prompt, not messages", "messages")
        if tools and not self._template.takes_tools:
            raise RequestError("tools: this model's chat template knows none", "tools")
        spoken = {"messages": self._template.normalise_messages(messages), "tools": tools, "variables": variables}
        shown, hidden = self._control.hide(spoken)
        rendered = self._template.render(**shown, add_generation_prompt=add_generation_prompt)
        _check_unicode(rendered, "messages")
        return self._control.encode(rendered, hidden)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens. Invalid UTF-8 becomes U+FFFD."""
        if not self.exact_bytes:
            return self._backend.decode(list(ids), skip_special_tokens=True)
        detokenizer = self.detokenizer()
        return "".join([*map(detokenizer.step, ids), detokenizer.flush()])

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, special or not; b"" for an id that the tokenizer does not know."""
        return self._token_bytes(token_id)

    def detokenizer(self) -> Detokenizer:
        """Return a fresh detokenizer, for one request."""
        if self.exact_bytes:
            return ByteDetokenizer(self._token_bytes, self.special_ids)
        return StreamDetokenizer(self._backend)


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The entries such as bos_token of a config file, each written as text or as an object with "content"."""
    named = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            named[key] = content
    return named


def _mark_special(backend: tokenizers.Tokenizer, tokens: set[str]) -> None:
    """Make the named tokens of the vocabulary special where tokenizer.json does not, as Transformers does."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens([t for t in sorted(tokens - special) if backend.token_to_id(t) is not None])


def _check_unicode(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{field} holds half a surrogate pair at character {error.start}; expected valid Unicode", field
        ) from error
