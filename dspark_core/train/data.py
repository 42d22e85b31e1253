"""Training sequences: tokens, and which of them the target said."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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
        id: unique.
        prompt: what answers to one prompt have in common, so that none of them leaks into a validation set.
        token_ids: of prompt and answers.
        supervised: for each token, whether the target said it (loss mask).
    """

    id: str
    domain: str
    prompt: str
    token_ids: list[int]
    supervised: list[bool]

    def cut(self, max_length: int) -> Example:
        """The first tokens."""
        return replace(self, token_ids=self.token_ids[:max_length], supervised=self.supervised[:max_length])


class RewritingTemplateError(RequestError):
    """A chat template that writes a turn differently once others follow: its tokens cannot be told apart."""


def load_examples(
    paths: Iterable[Path], tokenizer: Tokenizer, *, vocab_size: int, max_length: int, min_supervised: int
) -> list[Example]:
    """Examples of JSONL files, in their order.

    A line is an answer of `dspark-train generate` (`prompt_ids`, `response_ids`) or a finished conversation
    (`messages`, whose assistant turns are supervised). What has too few supervised tokens, and conversations whose
    turns the chat template does not leave apart, are left out and counted.

    Raises:
        CheckpointError: a malformed line, a token outside the vocabulary, an id that comes twice, or nothing left.
    """
    examples: dict[str, Example] = {}
    dropped: Counter[str] = Counter()
    files = list(paths)
    for path in files:
        for keys in read_lines(path):
            try:
                example = _example(keys, tokenizer)
            except RewritingTemplateError as error:
                dropped[str(error)] += 1
                continue
            if bad := [i for i in example.token_ids if not 0 <= i < vocab_size]:
                raise CheckpointError(f"{keys.where}: token {bad[0]} is outside the vocabulary of {vocab_size}")
            if example.id in examples:
                raise CheckpointError(f"{keys.where}: id {example.id!r} came before, expected each once")
            example = example.cut(max_length)
            if sum(example.supervised) < min_supervised:
                dropped[f"fewer than {min_supervised} supervised tokens within {max_length}"] += 1
                continue
            examples[example.id] = example
    for reason, count in dropped.items():
        logger.warning("%d sequences left out: %s", count, reason)
    if not examples:
        raise CheckpointError(f"{', '.join(map(str, files))}: no usable sequence, expected at least one")
    return list(examples.values())


def _example(keys: Keys, tokenizer: Tokenizer) -> Example:
    name, domain = keys.get("id", str, keys.where), keys.get("domain", str, "all")
    if "response_ids" in keys.values:
        prompt, response = _ids(keys, "prompt_ids"), _ids(keys, "response_ids")
        asked = ",".join(map(str, prompt))
        return Example(name, domain, asked, prompt + response, [False] * len(prompt) + [True] * len(response))
    if "messages" not in keys.values:
        raise CheckpointError(f"{keys.where}: expected 'prompt_ids' and 'response_ids', or 'messages'")
    try:
        ids, supervised = conversation(tokenizer, keys.get("messages", list))
    except RewritingTemplateError:
        raise
    except RequestError as error:
        raise CheckpointError(f"{keys.where}: {error}") from None
    return Example(name, domain, name, ids, supervised)


def _ids(keys: Keys, key: str) -> list[int]:
    values: list[int] = keys.get(key, list)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in values):
        raise CheckpointError(f"{keys.where}: key '{key}' is not a list of token ids")
    return values


def conversation(tokenizer: Tokenizer, messages: Sequence[dict[str, object]]) -> tuple[list[int], list[bool]]:
    """Tokens of a finished conversation in the model's chat format, and which of them are the assistant's.

    Found by rendering up to each assistant turn, without and with it, which needs a template that only appends. A turn
    ends with its end-of-text token: what a template writes after that, no target says.

    Raises:
        RequestError: malformed messages, none of the assistant, or one before the first question.
        RewritingTemplateError: the template does not only append.
    """
    turns = [i for i, m in enumerate(messages) if isinstance(m, dict) and m.get("role") == "assistant"]
    if not turns or turns[0] == 0:
        found = "no assistant message" if not turns else "an assistant message before any other"
        raise RequestError(f"the conversation has {found}, expected answers that follow something", "messages")
    whole = tokenizer.encode_chat(list(messages[: turns[-1] + 1]), add_generation_prompt=False)
    supervised = [False] * len(whole)
    for turn in turns:
        before = tokenizer.encode_chat(list(messages[:turn]))
        after = tokenizer.encode_chat(list(messages[: turn + 1]), add_generation_prompt=False)
        if whole[: len(before)] != before or whole[: len(after)] != after or len(after) <= len(before):
            raise RewritingTemplateError("the chat template rewrites earlier turns of a conversation", "messages")
        ends = [i for i in range(len(before), len(after)) if whole[i] in tokenizer.eos_token_ids]
        stop = ends[0] + 1 if ends else len(after)
        supervised[len(before) : stop] = [True] * (stop - len(before))
    return whole, supervised


def split_holdout(examples: Sequence[Example], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices for training and for validation: whole prompts, chosen by the seed and their name alone."""
    held = [derive_key("holdout", seed, example.prompt) / 2**63 < share for example in examples]
    return [i for i, h in enumerate(held) if not h], [i for i, h in enumerate(held) if h]
