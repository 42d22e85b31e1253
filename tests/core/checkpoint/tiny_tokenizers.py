"""Small tokenizers of every kind that the server meets, built by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import settings
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
# BYTE_CHARACTERS[b] is the character by which byte-level vocabularies spell byte b.
BYTE_CHARACTERS = [chr(b) if b in VISIBLE else chr(256 + HIDDEN.index(b)) for b in range(256)]

# The same examples in every run, however slow the machine is.
SEEDED = settings(derandomize=True, database=None, deadline=None)

SPECIALS = ["<|start|>", "<|end|>"]


def spell(piece: bytes) -> str:
    """The byte-level spelling of `piece`."""
    return "".join(BYTE_CHARACTERS[byte] for byte in piece)


def byte_level(pieces: Sequence[bytes] = ()) -> Tokenizer:
    """Byte-level BPE: two special tokens (ids 0, 1), one token a byte (ids 2 + byte), `pieces` (from id 258
    on), two merges, and last the added token `<think>`, which is not special. No merge makes a piece: only a
    model emits it.
    """
    made = ["he", "ll"]
    vocabulary = [*SPECIALS, *BYTE_CHARACTERS, *map(spell, pieces), *made]
    ids = {token: i for i, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[("h", "e"), ("l", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


def byte_level_outside() -> Tokenizer:
    """Byte-level BPE whose special tokens lie behind the vocabulary, as in Llama 3, with a BOS."""
    ids = {token: i for i, token in enumerate([*BYTE_CHARACTERS, "he"])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[("h", "e")], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.post_processor = processors.TemplateProcessing("<|start|> $A", special_tokens=[("<|start|>", 257)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A sentencepiece-like BPE with byte tokens, as in Llama 2: `<s>` 1, `</s>` 2, bytes from 3 on."""
    vocabulary = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *map(chr, range(97, 123)),
    ]
    vocabulary += ["▁a", "▁ab"]
    ids = {token: i for i, token in enumerate(vocabulary)}
    merges = [("▁", "a"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def spelled_by_merges() -> Tokenizer:
    """Characters whose merges spell the two special tokens."""
    tokens = ["<", "s", "/", ">", "a", "b", " ", "<s", "</", "</s", "<s>", "</s>"]
    merges = [("<", "s"), ("<", "/"), ("</", "s"), ("<s", ">"), ("</s", ">")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def metaspace_first() -> Tokenizer:
    """Unigram with the special tokens among its pieces; the first word alone gets a mark."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁ab", -3.0)]
    pieces += [(chr(code), -4.0) for code in range(33, 127)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def words() -> Tokenizer:
    """One token a word and no decoder: texts are joined by spaces."""
    ids = {word: i for i, word in enumerate(["<|start|>", "<|end|>", "red", "green", "blue", "user", "assistant"])}
    tokenizer = Tokenizer(models.WordLevel(vocab=ids, unk_token="<|end|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte level, specials outside": byte_level_outside,
    "byte fallback": byte_fallback,
    "metaspace": metaspace_first,
    "spelled by merges": spelled_by_merges,
    "words": words,
}


def write_folder(folder: Path, backend: Tokenizer, **files: Any) -> Path:
    """Save `backend`; each keyword is a JSON file beside it."""
    backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder
