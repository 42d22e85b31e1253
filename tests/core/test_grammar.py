"""Grammars: what they allow after a text, what looking ahead leaves behind, and what is refused before it costs."""

from __future__ import annotations

import json
import random
import threading
from functools import cache
from typing import Any

import pytest
import torch
from llguidance import LLParserLimits

from dspark_core.errors import RequestError
from dspark_core.grammar import Constraint, GrammarCompiler, GrammarKind
from dspark_core.grammar_limits import MAX_CHOICES, MAX_RULES, MAX_SOURCE
from tests.server.engines import tiny_target

V = 258
EOS = [1, 0]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
SOURCES: list[tuple[GrammarKind, Any]] = [
    ("json", SCHEMA),
    ("regex", "(ab|a)*c?d{2,5}"),
    ("choice", ["yes", "yellow", "y", "é\U0001f600"]),
    ("grammar", 'root ::= "hello" [a-z]* "!"'),
    ("grammar", 'start: WORD (" " WORD)*\nWORD: /[a-z]+/'),
]


@cache
def compiler(vocab_size: int = V) -> GrammarCompiler:
    return GrammarCompiler(tiny_target().tokenizer, EOS, vocab_size)


def start(kind: GrammarKind, source: Any) -> Constraint:
    return compiler().compile(kind, source).start()


def encode(text: str) -> list[int]:
    return tiny_target().tokenizer.encode_plain(text)


def allowed(constraint: Constraint, block: list[int]) -> torch.Tensor:
    """[V] bool."""
    mask = constraint.mask(block)
    assert bool(((mask == 0) | (mask == float("-inf"))).all())
    return mask == 0


def texts_allowed(constraint: Constraint, block: list[int]) -> set[str]:
    ids = allowed(constraint, block).nonzero().flatten().tolist()
    return {"<eos>" if i in EOS else tiny_target().tokenizer.decode([i]) for i in ids}


def test_a_choice_allows_its_texts_and_nothing_else() -> None:
    constraint = start("choice", ["yes", "no", "y"])
    assert texts_allowed(constraint, []) == {"y", "n"}
    assert texts_allowed(constraint, encode("n")) == {"o"}
    assert texts_allowed(constraint, encode("y")) == {"e", "<eos>"}
    for token in encode("yes"):
        assert not constraint.finished
        constraint.advance(token)
    assert constraint.finished
    assert allowed(constraint, []).nonzero().flatten().tolist() == sorted(EOS)


@pytest.mark.parametrize(
    ("kind", "source", "whole", "broken"),
    [
        ("json", SCHEMA, ['{"a":"x"}', '{"a": "x", "b": -12}', '{ "a":"\\n"}'], ['{"b":1}', '{"a":"1234567"}', "[]"]),
        ("json", {"type": "object"}, ["{}", '{"x":[1,{"y":null}]}'], ["[]", "{} ", "x"]),
        ("regex", "(ab|a)*c?d{2,5}", ["dd", "abaacddddd"], ["cd", "bdd", "dddddd"]),
        ("choice", ["a b", "é\U0001f600"], ["a b", "é\U0001f600"], ["a", "é"]),
        ("grammar", 'root ::= "x" y?\ny ::= [0-9]+', ["x", "x12"], ["y", "xa"]),
        ("grammar", 'start: "x" Y?\nY: /[0-9]+/', ["x", "x12"], ["y", "xa"]),
    ],
)
def test_whole_texts_are_followed_to_their_end(
    kind: GrammarKind, source: Any, whole: list[str], broken: list[str]
) -> None:
    def fits(text: str) -> bool:
        constraint = start(kind, source)
        for token in encode(text):
            if not allowed(constraint, [])[token]:
                return False
            constraint.advance(token)
        return constraint.finished or bool(allowed(constraint, [])[EOS].all())

    assert [text for text in whole if not fits(text)] == []
    assert [text for text in broken if fits(text)] == []


@pytest.mark.parametrize(("kind", "source"), SOURCES)
def test_looking_ahead_leaves_no_trace_and_sees_what_walking_sees(kind: GrammarKind, source: Any) -> None:
    grammar = compiler().compile(kind, source)
    for seed in range(12):
        rng = random.Random(seed)
        walked, text = grammar.start(), list[int]()
        for _ in range(16):
            mask = allowed(walked, [])
            cut = rng.randint(0, len(text))
            ahead = grammar.start()
            for token in text[:cut]:
                ahead.advance(token)
            noise = [rng.randrange(V) for _ in range(3)]
            allowed(ahead, [*text[cut:], *noise])
            allowed(ahead, noise)
            assert torch.equal(allowed(ahead, text[cut:]), mask)
            text.append(rng.choice(mask.nonzero().flatten().tolist()))
            walked.advance(text[-1])
            assert not walked.error
            if walked.finished:
                assert torch.equal(allowed(ahead, text[cut:]), allowed(walked, [])), "at the end too"
                assert allowed(ahead, [*text[cut:], 5]).all(), "behind it there are no rules"
                break


def test_behind_a_broken_rule_everything_is_allowed() -> None:
    constraint = start("choice", ["yes"])
    assert allowed(constraint, encode("n")).all()
    assert allowed(constraint, encode("yn")).all()
    assert texts_allowed(constraint, encode("y")) == {"e"}
    assert not constraint.error


def test_requests_of_one_grammar_do_not_share_their_place() -> None:
    grammar = compiler().compile("choice", ["yes", "no"])
    first, second = grammar.start(), grammar.start()
    first.advance(*encode("y"))
    assert (texts_allowed(first, []), texts_allowed(second, [])) == ({"e"}, {"y", "n"})


def test_an_end_token_ends_the_text_where_it_may_end() -> None:
    constraint = start("regex", "a*")
    assert texts_allowed(constraint, []) == {"a", "<eos>"}
    constraint.advance(EOS[1])
    assert constraint.finished


LARK_DEEP = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(10_000)) + '\nr10000: "a"'


@pytest.mark.parametrize(
    ("kind", "source", "complaint"),
    [
        ("json", {"type": "nonsense"}, "Invalid type"),
        ("json", {"not": {}}, "not"),
        ("json", {"type": "object", "x-guidance": {"lenient": True}, "dependentSchemas": {}}, "dependentSchemas"),
        ("json", {"type": "string", "format": "nonsense"}, "format"),
        ("json", {"type": "integer", "minimum": 5, "maximum": 1}, "minimum"),
        ("json", {"$ref": "http://localhost/x"}, "localhost"),
        ("json", {"$ref": "file:///etc/passwd"}, "passwd"),
        ("json", {"$ref": "#"}, "from the first token"),
        ("regex", "(", "unclosed"),
        ("regex", r"(a)\1", "backreference"),
        ("regex", "(?=a)b", "look"),
        ("grammar", "", "root"),
        ("grammar", "root ::= missing", "missing"),
        ("grammar", 'start: "a" missing', "missing"),
        ("grammar", "start: start", "from the first token"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(kind: GrammarKind, source: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=f"^response_format: .*{complaint}") as caught:
        compiler().compile(kind, source, "response_format")
    assert caught.value.field == "response_format"
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "(a{1000}){1000}"),
        ("regex", "a?" * 20_000),
        ("regex", "(" * 20_000 + "a" + ")" * 20_000),
        ("regex", "x" * (MAX_SOURCE + 1)),
        ("choice", ["x" * (MAX_SOURCE + 1)]),
        ("choice", [str(i) for i in range(MAX_CHOICES + 1)]),
        ("json", {"enum": ["x" * 100] * (MAX_SOURCE // 100)}),
        ("json", {"type": "integer", "multipleOf": 10**9 + 7}),
        ("json", {"type": "number", "multipleOf": 0.00123457}),
        ("json", {"allOf": [{"type": "integer", "multipleOf": 1009}, {"multipleOf": 1013}]}),
        ("grammar", 'start: %json {"type":"integer","multiple\\u004ff":1000000007}'),
        ("grammar", 'start: %json {"multipleOf":1000000007,"multipleOf":1}'),
        ("grammar", LARK_DEEP),
        ("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
        ("grammar", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_would_cost_too_much_is_refused(kind: GrammarKind, source: Any) -> None:
    with pytest.raises(RequestError):
        compiler().compile(kind, source)


def test_a_deeply_nested_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="nested too deeply"):
        compiler().compile("json", schema)


def test_what_is_large_but_sensible_is_taken() -> None:
    names = [f"field_{i}" for i in range(150)]
    fields = {name: {"type": ["string", "null"], "maxLength": 2000} for name in names}
    compiler().compile("json", {"type": "object", "properties": fields, "required": names})
    compiler().compile("json", {"type": "object", "properties": {"t": {"multipleOf": 0.01}, "s": {"multipleOf": 3600}}})
    compiler().compile("choice", [f"country number {i}" for i in range(1000)])
    compiler().compile("regex", r"\w{1,500}( \w{1,500}){0,20}")
    words = "\n".join(f'r{i}: "word{i}" r{i + 1}' for i in range(MAX_RULES - 2))
    compiler().compile("grammar", f'start: r0\n{words}\nr{MAX_RULES - 2}: "."')


def test_long_chains_of_rules_do_not_end_the_process() -> None:
    """Thousands of references are short as text. On an ordinary stack the library's recursion overflows."""
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(2700)}
    schema = {"$defs": {**chain, "a2700": {"type": "string"}}, "$ref": "#/$defs/a0"}
    assert len(json.dumps(schema)) < MAX_SOURCE
    assert texts_allowed(start("json", schema), []) >= {'"'}
    assert threading.stack_size() == 0, "other threads keep the usual size"


def test_a_branch_that_is_too_complex_fails_only_the_text_that_takes_it() -> None:
    limits = LLParserLimits(max_items_in_row=50, verbose_errors=False)
    strict = GrammarCompiler(tiny_target().tokenizer, EOS, V, limits)
    many = " | ".join(f'"x" r{i}' for i in range(200))
    rules = "\n".join(f'r{i}: "{i}" r{i} | "."' for i in range(200))
    grammar = strict.compile("grammar", f'start: "y" "es" | "z" big\nbig: {many}\n{rules}')
    calm, daring = grammar.start(), grammar.start()
    block = encode("zx")
    assert allowed(daring, block).all()
    assert allowed(calm, block).all(), "nobody knows the rules there"
    assert not calm.error
    assert texts_allowed(calm, []) == {"y", "z"}
    for token in encode("yes"):
        calm.advance(token)
    assert calm.finished
    for token in block:
        daring.advance(token)
    assert "50" in daring.error
    assert not daring.finished


def test_a_model_without_the_tokens_says_so() -> None:
    few = GrammarCompiler(tiny_target(97).tokenizer, EOS, 97)
    constraint = few.compile("choice", ["aé", "b"]).start()
    constraint.advance(*encode("a"))
    allowed(constraint, [])
    assert constraint.error
    with pytest.raises(RequestError, match="end-of-text"):
        GrammarCompiler(tiny_target().tokenizer, [], V).compile("choice", ["a"])
    with pytest.raises(RequestError, match="end-of-text"):
        GrammarCompiler(tiny_target().tokenizer, [V], V).compile("choice", ["a"])
