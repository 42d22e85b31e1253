"""Rebuild a byte-level BPE tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dspark_core.errors import CheckpointError

# Kinds of token in `tokenizer.ggml.token_type`.
_CONTROL, _USER_DEFINED = 3, 4


def rebuild_tokenizer(metadata: dict[str, Any], source: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer and what its `tokenizer_config.json` should say.

    Args:
        metadata: all keys of the GGUF file.
        source: the GGUF file, for messages.

    Raises:
        CheckpointError: a key is missing, or names a kind of tokenizer that this converter does not know.
    """
    for key, expected in (("model", "gpt2"), ("pre", "smollm")):
        found = metadata.get(f"tokenizer.ggml.{key}")
        if found != expected:
            raise CheckpointError(f"{source}: tokenizer.ggml.{key} is {found!r}, expected {expected!r}")
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if metadata.get(f"tokenizer.ggml.{key}", False):
            raise CheckpointError(f"{source}: tokenizer.ggml.{key} is true, expected false")
    missing = [key for key in ("tokens", "merges", "token_type") if f"tokenizer.ggml.{key}" not in metadata]
    if missing:
        raise CheckpointError(f"{source}: GGUF key 'tokenizer.ggml.{missing[0]}' is missing")
    return _byte_level_bpe(metadata), _tokenizer_config(metadata)


def _byte_level_bpe(metadata: dict[str, Any]) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    # No unknown token: a byte that the vocabulary lacks is dropped, it must not turn into a control token.
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = dict(zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True))
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in kinds.items()
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata["llama.context_length"]),
    }
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        key = f"tokenizer.ggml.{theirs}_token_id"
        if key in metadata:
            config[f"{ours}_token"] = tokens[int(metadata[key])]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config
