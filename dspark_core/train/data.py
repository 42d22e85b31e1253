"""Training sequences: tokens, and which of them the target said."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark_core.checkpoint.tokenizer import Tokenizer
from dspark_core.errors import CheckpointError, RequestError
from dspark_core.keys import Keys
from dspark_core.randomness import derive_key
from dspark_core.train.records import read_lines

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """One sequence.

    Attributes:
        id: unique; answers to one prompt share what comes before the last "-".
        token_ids: of prompt and answers.
        supervised: for each token, whether the target said it (loss mask).
    """

    id: str
    domain: str
    token_ids: list[int]
    supervised: list[bool]

    @property
    def prompt(self) -> str:
        """What answers to one prompt have in common, so that none of them leaks into a validation set."""
        return self.id.rpartition("-")[0] or self.id

    def cut(self, max_length: int) -> Example:
        """The first tokens."""
        return Example(self.id, self.domain, self.token_ids[:max_length], self.supervised[:max_length])


def load_examples(
    paths: Iterable[Path], tokenizer: Tokenizer, *, vocab_size: int, max_length: int, min_supervised: int
) -> list[Example]:
    """Examples of JSONL files, in their order.

    A line is an answer of `dspark-train generate` (`prompt_ids`, `response_ids`) or a finished conversation
    (`messages`, whose assistant turns are supervised). What has too few supervised tokens is left out and counted.

    Raises:
        CheckpointError: a malformed line, a token outside the vocabulary, an id that comes twice, or nothing left.
    """
    examples: dict[str, Example] = {}
    dropped: Counter[str] = Counter()
    for path in paths:
        for number, keys in enumerate(read_lines(path)):
            example = _example(keys, tokenizer, f"{path.name}:{number}-0")
            if bad := [i for i in example.token_ids if not 0 <= i < vocab_size]:
                raise CheckpointError(f"{keys.where}: token {bad[0]} is outside the vocabulary of {vocab_size}")
            if example.id in examples:
                raise CheckpointError(f"{keys.where}: id {example.id!r} came before, expected each once")
            example = example.cut(max_length)
            if sum(example.supervised) < min_supervised:
                dropped["too short"] += 1
                continue
            examples[example.id] = example
    if dropped:
        reason = f"fewer than {min_supervised} supervised tokens within {max_length}"
        logger.warning("%d sequences left out: %s", dropped["too short"], reason)
    if not examples:
        raise CheckpointError(f"{', '.join(map(str, paths))}: no usable sequence")
    return list(examples.values())


def _example(keys: Keys, tokenizer: Tokenizer, fallback_id: str) -> Example:
    name, domain = keys.get("id", str, fallback_id), keys.get("domain", str, "all")
    if "response_ids" in keys.values:
        prompt, response = _ids(keys, "prompt_ids"), _ids(keys, "response_ids")
        return Example(name, domain, prompt + response, [False] * len(prompt) + [True] * len(response))
    if "messages" not in keys.values:
        raise CheckpointError(f"{keys.where}: expected 'prompt_ids' and 'response_ids', or 'messages'")
    try:
        ids, supervised = conversation(tokenizer, keys.get("messages", list))
    except RequestError as error:
        raise CheckpointError(f"{keys.where}: {error}") from None
    return Example(name, domain, ids, supervised)


def _ids(keys: Keys, key: str) -> list[int]:
    values: list[int] = keys.get(key, list)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in values):
        raise CheckpointError(f"{keys.where}: key '{key}' is not a list of token ids")
    return values


def conversation(tokenizer: Tokenizer, messages: Sequence[dict[str, object]]) -> tuple[list[int], list[bool]]:
    """Tokens of a finished conversation in the model's chat format, and which of them are the assistant's.

    Found by rendering up to each assistant turn, without and with it, which needs a template that only appends.

    Raises:
        RequestError: malformed messages, none of the assistant, or a template that rewrites earlier turns.
    """
    turns = [i for i, m in enumerate(messages) if isinstance(m, dict) and m.get("role") == "assistant"]
    if not turns:
        raise RequestError("the conversation has no assistant message, expected at least one", "messages")
    whole = tokenizer.encode_chat(list(messages[: turns[-1] + 1]), add_generation_prompt=False)
    supervised = [False] * len(whole)
    for turn in turns:
        before = tokenizer.encode_chat(list(messages[:turn]))
        after = tokenizer.encode_chat(list(messages[: turn + 1]), add_generation_prompt=False)
        if whole[: len(before)] != before or whole[: len(after)] != after or len(after) <= len(before):
            raise RequestError(f"the chat template rewrites what comes before messages[{turn}]", "messages")
        supervised[len(before) : len(after)] = [True] * (len(after) - len(before))
    return whole, supervised


def split_holdout(examples: Sequence[Example], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices for training and for validation: whole prompts, chosen by the seed and their name alone."""
    held = [derive_key("holdout", seed, example.prompt) / 2**63 < share for example in examples]
    return [i for i, h in enumerate(held) if not h], [i for i, h in enumerate(held) if h]
