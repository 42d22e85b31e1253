"""From token ids to text, one token at a time, never half a character."""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_MARK = "\u2581"


class Detokenizer(ABC):
    """Turns the ids of one request into text. One object per request, not shared between threads.

    The texts of all steps and of the flush, joined, equal `Tokenizer.decode` of the same ids.
    """

    @abstractmethod
    def step(self, token_id: int) -> str:
        """Take the next id, return the text now certain: "" for a special token or half a character."""

    @abstractmethod
    def flush(self) -> str:
        """Return what is still held, U+FFFD for bytes that became no character. Call once, at the end."""


@dataclass(frozen=True)
class TokenBytes:
    """The bytes of each token.

    Attributes:
        backend: the tokenizer.
        byte_level: tokens spell bytes in the byte-level alphabet; otherwise they are text with word marks,
            and tokens like <0x0A> for single bytes.
        exact: joined bytes are the text, apart from `strip_start`. False for other kinds of tokenizer, whose
            decoder may look at several tokens at once.
        strip_start: how many leading spaces the decoder drops from the whole text.
    """

    backend: tokenizers.Tokenizer
    byte_level: bool
    exact: bool
    strip_start: int

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> TokenBytes:
        """Read from the tokenizer's decoder which kind it is."""
        decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "none"}
        steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(backend, byte_level=True, exact=True, strip_start=0)
        strip: dict[str, Any] = {"content": " ", "start": 0, "stop": 0}
        if kinds[-1:] == ["Strip"]:
            strip = steps[-1]
        exact = (
            kinds[:3] == ["Replace", "ByteFallback", "Fuse"]
            and kinds[3:] in ([], ["Strip"])
            and (steps[0]["pattern"], steps[0]["content"]) == ({"String": _WORD_MARK}, " ")
            and (strip["content"], strip["stop"]) == (" ", 0)
        )
        return cls(backend, byte_level=False, exact=exact, strip_start=strip["start"] if exact else 0)

    def __call__(self, token_id: int) -> bytes:
        """The bytes of one token, special or not; b"" for an id that the tokenizer does not know."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            spelled = [_BYTE_OF_CHARACTER.get(character) for character in token]
            known = [byte for byte in spelled if byte is not None]
            return bytes(known) if len(known) == len(spelled) else token.encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_WORD_MARK, " ").encode()


class ByteDetokenizer(Detokenizer):
    """Detokenizer for the tokenizers whose text is the joined bytes of their tokens."""

    def __init__(self, token_bytes: TokenBytes, special_ids: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._special_ids = special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._spaces_to_drop = token_bytes.strip_start

    def step(self, token_id: int) -> str:
        if token_id in self._special_ids:
            return ""
        return self._strip(self._utf8.decode(self._token_bytes(token_id)))

    def flush(self) -> str:
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        dropped = min(self._spaces_to_drop, len(text) - len(text.lstrip(" ")))
        # Only a text of nothing but dropped spaces leaves the beginning open.
        self._spaces_to_drop = self._spaces_to_drop - dropped if dropped == len(text) else 0
        return text[dropped:]


class StreamDetokenizer(Detokenizer):
    """Detokenizer for all other tokenizers, through the decoder of the `tokenizers` library."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._sent = 0

    def step(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._stream.step(self._backend, token_id) or ""
        self._sent += len(text)
        return text

    def flush(self) -> str:
        return self._backend.decode(self._ids, skip_special_tokens=True)[self._sent :]


def _byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet: visible Latin-1 characters are their own bytes, the rest are 256 and on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_alphabet()
