"""Structured output: which tokens a grammar allows after a text. The automata are llguidance's.

A grammar is compiled once; each request follows a copy of its own, token by token. Drafting and verification ask what
would be allowed after tokens that may yet be rejected, which leaves no trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from
from torch import Tensor

from dspark_core.checkpoint.tokenizer import Tokenizer
from dspark_core.grammar_limits import LIMITS, check_cost, refusal, with_deep_stack

GrammarKind = Literal["json", "regex", "choice", "grammar"]
# Between the parts of JSON: enough for a pretty layout, and an end to the blanks that small models never tire of.
JSON_BLANKS = r"[ \n]{0,16}"
_LONGEST_COMPLAINT = 300
# [256, 8] what each bit of a byte means for a score: many times faster than masked_fill.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_MASKS = np.where(_BITS, np.float32(0), np.float32(-np.inf))


class GrammarCompiler:
    """Compiles grammars for one model.

    Args:
        tokenizer: of the model.
        eos_token_ids: ids that end a text; a grammar allows them wherever its text may end.
        vocab_size: ids below this may be emitted.
        limits: of what a grammar may cost.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        limits: LLParserLimits = LIMITS,
    ) -> None:
        self.tokenizer, self.vocab_size, self.limits = tokenizer, vocab_size, limits
        self.eos_token_ids = sorted(i for i in eos_token_ids if i < vocab_size)  # others cannot be emitted

    def compile(self, kind: GrammarKind, source: Any, field: str | None = None) -> Grammar:
        """Compile a grammar. A large one takes a while, most of it outside Python's lock.

        Args:
            source: a JSON schema (object), a regular expression, a list of texts, or a grammar as text, in Lark's
                or GBNF's notation.
            field: of the request, for messages.

        Raises:
            RequestError: the source is not of its kind, or asks for what cannot be followed token by token.
        """
        if not self.eos_token_ids or not self.tokenizer.exact_bytes:
            reason = "tokens have no bytes of their own" if self.eos_token_ids else "it names no end-of-text token"
            raise refusal(f"this model's output cannot be constrained: {reason}", field)
        check_cost(kind, source, field)
        return with_deep_stack(lambda: self._compile(kind, source, field))

    def _compile(self, kind: GrammarKind, source: Any, field: str | None) -> Grammar:
        try:
            notation = _in_own_notation(kind, source)
        except Exception as error:  # whatever a converter trips over is the source's fault
            raise refusal(f"the {kind} cannot be read: {_short(str(error))}", field) from None
        matcher = LLMatcher(self._tokens, notation, log_level=0, limits=self.limits)
        if matcher.is_error():
            raise refusal(f"the {kind} cannot be followed: {_short(matcher.get_error())}", field)
        grammar = Grammar(matcher, self.vocab_size, frozenset(self.eos_token_ids))
        for _ in range(2):  # twice: what all copies share may be used up by the first look
            beginning = grammar.start()
            beginning.mask(())
            if beginning.error:
                raise refusal(f"the {kind} cannot be followed from the first token: {beginning.error}", field)
        return grammar

    @cached_property
    def _tokens(self) -> LLTokenizer:
        vocabulary = _Vocabulary(self.tokenizer, self.eos_token_ids[0], self.vocab_size)
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=self.eos_token_ids)


class _Vocabulary:
    """A tokenizer as llguidance wants to see it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int, vocab_size: int) -> None:
        self.tokenizer, self.eos_token_id = tokenizer, eos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < vocab_size)

    def __call__(self, text: str) -> list[int]:
        return self.tokenizer.encode_plain(text)


def _in_own_notation(kind: GrammarKind, source: Any) -> str:
    if kind == "json":
        # What the library does not know of JSON schema is an error: a schema is kept as a whole or not at all.
        overrides: Any = {"whitespace_pattern": JSON_BLANKS, "lenient": False}
        return LLMatcher.grammar_from_json_schema(source, overrides=overrides)
    if kind == "choice":
        # One terminal: as rules, thousands of choices would be followed side by side.
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in source)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    return grammar_from(kind, source)


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _LONGEST_COMPLAINT else f"{words[:_LONGEST_COMPLAINT]}..."


class Grammar:
    """A compiled grammar, which many requests may follow.

    Attributes:
        vocab_size: of the model.
        end_ids: tokens that end a text, allowed wherever it may end.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._matcher, self.vocab_size, self.end_ids = matcher, vocab_size, end_ids

    def start(self) -> Constraint:
        """At the beginning of a text."""
        return Constraint(self)

    def matcher_at(self, token_ids: Sequence[int]) -> LLMatcher:
        """A matcher that has followed a text; in an error state if it cannot be followed."""
        matcher = self._matcher.deep_copy()
        matcher.consume_tokens(list(token_ids))
        return matcher


class Constraint:
    """How far one request has come in its grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar, self._text = grammar, list[int]()
        self._matcher = grammar.matcher_at(())
        self.end_ids = grammar.end_ids
        self._failed: dict[tuple[int, ...], str] = {}  # texts that cannot be followed any further, and why

    @property
    def error(self) -> str:
        """Why no token may follow the text; "" while one may, as far as is known."""
        return self._failed.get(tuple(self._text), "") if self._failed else ""

    @property
    def finished(self) -> bool:
        """Whether the text is whole: nothing but an end-of-text token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self, block: Sequence[int]) -> Tensor:
        """What scores of the token after those of `block` must add: [V] float32, -inf for tokens that may not follow.

        Everything may, where the block itself breaks the rules: behind a token that verification is bound to reject,
        or behind the end of the text. Where the grammar gets too complex everything may follow as well, and there is
        an error if the text comes to there.
        """
        followed = self._matcher.try_consume_tokens(list(block))
        if followed == len(block) and not self._matcher.is_error():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            if bits.any() and not self._matcher.is_error():
                self._matcher.rollback(followed)
                return torch.from_numpy(_MASKS.take(bits, axis=0).reshape(-1)[: self._grammar.vocab_size])
        if self._matcher.is_error():  # and will stay so: it is replaced
            self._fail((*self._text, *block), self._matcher.get_error())
            self._matcher = self._grammar.matcher_at(self._text)
        else:
            if followed == len(block):
                self._fail((*self._text, *block), "the model has no token for what must come next")
            self._matcher.rollback(followed)
        return torch.zeros(self._grammar.vocab_size)

    def advance(self, token_id: int) -> None:
        """Take over a token that stands."""
        self._text.append(token_id)
        if not self._matcher.consume_token(token_id):
            self._fail(tuple(self._text), self._matcher.get_error())

    def _fail(self, text: tuple[int, ...], reason: str) -> None:
        self._failed[text] = _short(reason)
