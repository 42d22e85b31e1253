"""What a grammar from a stranger may cost: refused before it is compiled, or given up by the library on the way."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any, TypeVar

from llguidance import LLParserLimits

from dspark_core.errors import RequestError

# A schema is as long as its JSON, a choice as its texts together.
MAX_SOURCE = 100_000
MAX_CHOICES = 10_000
# One may build on another, which costs the square of how many do.
MAX_RULES = 500
# An automaton has a state for every remainder, and for every pair of them where two multiples apply together.
MAX_MULTIPLE = 100_000
# Half a second of a thread to compile, a few at the very worst, and some milliseconds of the engine's time for a token.
# Ordinary grammars need a fifth of it at most.
LIMITS = LLParserLimits(
    initial_lexer_fuel=100_000,
    step_lexer_fuel=60_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
# Enough for the longest chain of rules that MAX_SOURCE can spell: the library recurses into them.
_STACK_BYTES = 256 * 1024 * 1024
_stack_size = threading.Lock()
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref")
T = TypeVar("T")


def refusal(message: str, field: str | None) -> RequestError:
    """What is wrong with a grammar, and in which field of a request it stands."""
    return RequestError(f"{field}: {message}" if field else message, field)


def check_cost(kind: str, source: Any, field: str | None) -> None:
    """Raise RequestError for a source that is larger, or may need more states, than is sensible.

    Args:
        kind, source: as `GrammarCompiler.compile` takes them.
        field: of the request, for messages.
    """
    if kind == "choice" and len(source) > MAX_CHOICES:
        raise refusal(f"found {len(source)} choices, expected at most {MAX_CHOICES}", field)
    try:
        size = len(source if isinstance(source, str) else json.dumps(source))
    except RecursionError:
        raise refusal(f"the {kind} is nested too deeply", field) from None
    if size > MAX_SOURCE:
        raise refusal(f"the {kind} has {size} characters, expected at most {MAX_SOURCE}", field)
    if kind == "grammar" and (rules := sum(":" in line for line in source.splitlines())) > MAX_RULES:
        raise refusal(f"the {kind} has {rules} rules, expected at most {MAX_RULES}", field)
    for schema in _schemas(kind, source):
        for together in _multiples(schema):
            if _common(together) > MAX_MULTIPLE:
                found = " and ".join(str(value) for value in together[:5])
                expected = f"at most {MAX_MULTIPLE} units of the last digit until they meet"
                raise refusal(f"the {kind} has multipleOf {found}, expected {expected}", field)


def _schemas(kind: str, source: Any) -> Iterator[Any]:
    """The JSON schemas in a source, objects as lists of pairs: a key that comes twice counts twice."""
    if kind not in ("json", "grammar"):
        return
    decoder = json.JSONDecoder(object_pairs_hook=list)
    texts = [json.dumps(source)] if kind == "json" else re.split(r"%json\s*", source)[1:]
    for text in texts:
        try:
            yield decoder.raw_decode(text)[0]
        except (ValueError, RecursionError):
            continue  # the library cannot read it either


def _multiples(schema: Any) -> list[list[Decimal]]:
    """The values of `multipleOf` in a schema: all in one list where some of them may apply to the same number."""
    found: list[Decimal] = []
    left, combined = [schema], False
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, tuple):  # a key with its value
            key, number = value
            left.append(number)
            combined |= key in _COMBINING
            if key == "multipleOf" and isinstance(number, int | float) and math.isfinite(number) and number:
                found.append(abs(Decimal(str(number))))
    return [found] if combined and found else [[value] for value in found]


def _common(values: list[Decimal]) -> int:
    """Their least common multiple, in units of the last digit that any of them has."""
    exponents = [value.normalize().as_tuple().exponent for value in values]
    digits = max(0, *(-exponent for exponent in exponents if isinstance(exponent, int)))
    if max(abs(value.adjusted()) for value in values) > 30 or digits > 30:
        return MAX_MULTIPLE + 1
    return math.lcm(*(int(value.scaleb(digits)) for value in values))


def with_deep_stack(work: Callable[[], T]) -> T:
    """Do `work` in a thread of its own, on a stack that recursion through long chains of rules does not overflow."""
    with ThreadPoolExecutor(1) as pool:
        with _stack_size:
            before = threading.stack_size(_STACK_BYTES)
            try:
                running = pool.submit(work)
            finally:
                threading.stack_size(before)
        return running.result()
