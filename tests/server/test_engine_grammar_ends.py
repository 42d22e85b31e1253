"""A text ends where its grammar ends, also amid a block; a grammar that gets too complex fails one request alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLParserLimits

from dspark_core.grammar import Grammar, GrammarCompiler
from server.request import RequestParams
from tests.server.drafts import ScriptedDrafter
from tests.server.engines import GREEDY, Result, make_engine, make_prompt, run, run_one, tiny_target
from tests.server.test_engine_grammar import EOS, compiled, encode
from tests.server.test_engine_stops import spent


@pytest.mark.parametrize("size", range(1, 14))
@pytest.mark.parametrize("pattern", [[-1], [0], [2, 0, 5]], ids=["oracle", "adversary", "scripted"])
def test_a_text_ends_where_its_grammar_ends(size: int, pattern: list[int]) -> None:
    text = "Hello, world!"[:size]
    params = RequestParams(GREEDY, max_tokens=19, grammar=compiled("choice", [text]))
    engine = make_engine(ScriptedDrafter(5, lambda _: encode(text), pattern), eos=[EOS])
    result = run_one(engine, make_prompt(7), params)
    assert (result.text, result.ids, result.last.finish_reason) == (text, encode(text), "stop")
    # No other token may come: even the adversary is right, and what it proposes behind the end counts for nothing.
    assert result.last.speculation == spent(size)


def end(source: str, bias: dict[int, float], pattern: Sequence[int] = (-1,), **fields: Any) -> Result:
    """The text of a regular expression in whose every place some tokens are favoured."""
    sampling = replace(GREEDY, logit_bias=tuple(bias.items()))
    params = RequestParams(sampling, max_tokens=12, grammar=compiled("regex", source), **fields)
    drafter = ScriptedDrafter(5, lambda _: [*encode("aaaaaaaaaaaaaaaa")], pattern)
    return run_one(make_engine(drafter, eos=[EOS]), make_prompt(5), params)


A = encode("a")[0]


@pytest.mark.parametrize("pattern", [[-1], [0], [2]])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_end_token_comes_where_the_grammar_lets_it(pattern: list[int], ignore_eos: bool) -> None:
    fields: dict[str, Any] = {"pattern": pattern, "ignore_eos": ignore_eos}
    early = end("a{3,}", {EOS: 100.0}, **fields)
    assert (early.ids, early.text, early.last.finish_reason) == ([A, A, A, EOS], "aaa", "stop")
    for least in range(13):
        late = end("a{3,}", {EOS: 100.0}, min_tokens=least, **fields)
        size = max(least, 3)
        expected = [*[A] * size, EOS][:12]
        assert (late.ids, late.last.finish_reason) == (expected, "stop" if size < 12 else "length")
    forced = end("a{3}", {EOS: 100.0}, min_tokens=7, **fields)
    assert (forced.ids, forced.last.finish_reason) == ([A, A, A], "stop"), "no token is left to wait with"


def test_every_end_token_ends_a_text() -> None:
    other = encode("F")[0]
    engine = make_engine(ScriptedDrafter(4, lambda _: [A] * 9, [-1]), eos=[EOS, other])
    grammar = engine.grammars.compile("regex", "a{2,}F?")
    for token in (EOS, other):
        params = RequestParams(replace(GREEDY, logit_bias=((token, 100.0),)), max_tokens=9, grammar=grammar)
        result = run_one(engine, make_prompt(5), params)
        assert (result.ids, result.text, result.last.finish_reason) == ([A, A, token], "aa", "stop")


def test_other_ends_come_before_the_grammars() -> None:
    grammar = compiled("choice", ["abcdefgh"])
    drafter = ScriptedDrafter(5, lambda _: encode("abcdefgh"), [-1])
    engine = make_engine(drafter, eos=[EOS])
    base = RequestParams(GREEDY, max_tokens=20, grammar=grammar)
    for change, text, size, reason in (
        ({"stop": ("de",)}, "abc", 5, "stop"),
        ({"stop": ("gh",)}, "abcdef", 8, "stop"),
        ({"stop": ("hi",)}, "abcdefgh", 8, "stop"),
        ({"max_tokens": 3}, "abc", 3, "length"),
        ({"max_tokens": 8}, "abcdefgh", 8, "stop"),
        ({"stop_token_ids": frozenset(encode("f"))}, "abcde", 6, "stop"),
    ):
        result = run_one(engine, make_prompt(5), replace(base, **change))  # type: ignore[arg-type]
        assert (result.text, len(result.ids), result.last.finish_reason) == (text, size, reason)


def hard() -> Grammar:
    """A grammar that goes "ayes", or into a thicket that the limits do not allow after "azx"."""
    many = " | ".join(f'"x" r{i}' for i in range(200))
    rules = "\n".join(f'r{i}: "{i}" r{i} | "."' for i in range(200))
    target = tiny_target()
    strict = GrammarCompiler(target.tokenizer, [EOS], target.vocab_size, LLParserLimits(max_items_in_row=50))
    return strict.compile("grammar", f'start: "a" ("y" "es" | "z" big)\nbig: {many}\n{rules}')


def favouring(text: str, grammar: Grammar) -> RequestParams:
    bias = tuple((token, 100.0) for token in encode(text))
    return RequestParams(replace(GREEDY, logit_bias=bias), max_tokens=9, grammar=grammar)


@pytest.mark.parametrize("pattern", [None, [-1], [0]])
def test_a_grammar_too_complex_fails_its_own_request_alone(pattern: list[int] | None) -> None:
    grammar = hard()
    draft = ScriptedDrafter(4, lambda _: encode("azx"), pattern) if pattern else None
    work = [(make_prompt(5), favouring(text, grammar)) for text in ("z", "y")]
    lost, kept = run(make_engine(draft, eos=[EOS]), work)
    assert lost.last.error is not None
    assert re.match("the grammar cannot be followed: .*50", lost.last.error)
    assert lost.text == "az", "as far as the rules are known"
    assert (kept.text, kept.last.finish_reason) == ("ayes", "stop"), "a draft looked into the thicket in vain"
