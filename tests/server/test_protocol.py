"""The body of /generate: what is taken, what is refused and in which words; the JSON that is sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dspark_core.errors import RequestError
from server.protocol import GenerateRequest, error_body, parse_generate
from server.request import RequestParams

OPTIONAL = [name for name in GenerateRequest.model_fields if name not in ("prompt", "prompt_ids", "messages")]


def parse(**values: Any) -> GenerateRequest:
    return parse_generate(json.dumps({"prompt": "hi", **values}).encode())


def refusal(body: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_generate(body)
    return caught.value


def test_what_is_left_out_has_the_engines_own_defaults() -> None:
    assert parse().params(0) == RequestParams(sampling=parse().params(0).sampling)
    assert (parse().n, parse().stream, parse().temperature) == (1, False, 1.0)


@pytest.mark.parametrize("field", OPTIONAL)
def test_null_is_absent(field: str) -> None:
    """Case M1."""
    assert parse(**{field: None}) == parse()


def test_all_nulls_at_once_are_absent() -> None:
    assert parse(**dict.fromkeys([*OPTIONAL, "prompt_ids", "messages"])) == parse()


def test_every_field_reaches_the_engine() -> None:
    request = parse(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        seed=2**63 - 1,
        stop=["a", "b"],
        stop_token_ids=[5, 6],
        ignore_eos=True,
        logprobs=20,
        speculative=False,
    )
    params = request.params(3)
    assert params.sampling.temperature == 0.5
    assert (params.sampling.top_p, params.sampling.top_k, params.sampling.min_p) == (0.9, 40, 0.1)
    assert (params.sampling.presence_penalty, params.sampling.frequency_penalty) == (0.2, 0.3)
    assert (params.sampling.repetition_penalty, params.sampling.seed) == (1.2, 2**63 - 1)
    assert (params.max_tokens, params.stop, params.stop_token_ids) == (7, ("a", "b"), frozenset({5, 6}))
    assert (params.ignore_eos, params.logprobs, params.speculative) == (True, 20, False)
    assert params.choice_index == 3


@pytest.mark.parametrize(
    ("stop", "expected"), [("end", ["end"]), (["a", "b"], ["a", "b"]), ([], []), (["s"] * 16, ["s"] * 16)]
)
def test_stop_is_a_string_or_a_list(stop: Any, expected: list[str]) -> None:
    assert parse(stop=stop).stop == expected


@pytest.mark.parametrize(
    ("field", "value", "path", "expected"),
    [
        ("max_tokens", 0, "max_tokens", "found 0, expected greater than or equal to 1"),
        ("max_tokens", -1, "max_tokens", "found -1, expected greater than or equal to 1"),
        ("max_tokens", 1.5, "max_tokens", "found 1.5, expected a valid integer"),
        ("max_tokens", "5", "max_tokens", 'found "5", expected a valid integer'),
        ("max_tokens", True, "max_tokens", "found true, expected a valid integer"),
        ("temperature", "hot", "temperature", 'found "hot", expected a valid number'),
        ("temperature", True, "temperature", "found true, expected a valid number"),
        ("top_k", 1.0, "top_k", "found 1.0, expected a valid integer"),
        ("seed", -2, "seed", "found -2, expected greater than or equal to 0"),
        ("seed", 2**63, "seed", f"found {2**63}, expected less than or equal to {2**63 - 1}"),
        ("n", 0, "n", "found 0, expected greater than or equal to 1"),
        ("n", 17, "n", "found 17, expected less than or equal to 16"),
        ("logprobs", -1, "logprobs", "found -1, expected greater than or equal to 0"),
        ("logprobs", 21, "logprobs", "found 21, expected less than or equal to 20"),
        ("logprobs", True, "logprobs", "found true, expected a valid integer"),
        ("stop", "", "stop[0]", 'found "", expected at least 1 character'),
        ("stop", ["x", ""], "stop[1]", 'found "", expected at least 1 character'),
        ("stop", ["x", None], "stop[1]", "found null, expected a valid string"),
        ("stop", 3, "stop", "found 3, expected a valid list"),
        ("stop_token_ids", [1, -1], "stop_token_ids[1]", "found -1, expected greater than or equal to 0"),
        ("stop_token_ids", 3, "stop_token_ids", "found 3, expected a valid list"),
        ("stream", "yes", "stream", 'found "yes", expected a valid boolean'),
        ("speculative", 1, "speculative", 'found 1, expected true, false or "full"'),
        ("speculative", "half", "speculative", 'found "half", expected true, false or "full"'),
        ("prompt", 3, "prompt", "found 3, expected a valid string"),
        ("prompt", ["a"], "prompt", 'found ["a"], expected a valid string'),
    ],
)
def test_a_bad_value_is_named_with_what_was_found_and_expected(
    field: str, value: Any, path: str, expected: str
) -> None:
    error = refusal(json.dumps({"prompt": "hi", field: value}).encode())
    assert str(error) == f"{path}: {expected}"
    assert error.field == path


def test_seventeen_stop_strings_are_too_many() -> None:
    error = refusal(json.dumps({"prompt": "hi", "stop": ["s"] * 17}).encode())
    assert str(error).startswith("stop: found [")
    assert str(error).endswith("expected at most 16 items")


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
def test_numbers_json_does_not_have_are_refused(field: str, literal: str) -> None:
    error = refusal(f'{{"prompt": "hi", "{field}": {literal}}}'.encode())
    assert error.field == field
    assert str(error).endswith("expected a finite number")


def test_nan_in_an_integer_field_is_refused() -> None:
    assert str(refusal(b'{"prompt": "hi", "max_tokens": NaN}')) == ("max_tokens: found NaN, expected a valid integer")


@pytest.mark.parametrize("value", ["1", "null", '{"a": []}'])
def test_an_unknown_field_is_named(value: str) -> None:
    error = refusal(f'{{"prompt": "hi", "max_token": {value}}}'.encode())
    assert error.field == "max_token"
    assert str(error).startswith("max_token: unknown field (found ")
    assert "max_tokens" in str(error)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "none of them"),
        ({"prompt": None, "prompt_ids": None}, "none of them"),
        ({"prompt": "a", "prompt_ids": [1]}, "prompt and prompt_ids"),
        (
            {"prompt": "a", "prompt_ids": [1], "messages": [{"role": "user", "content": "b"}]},
            "prompt and prompt_ids and messages",
        ),
    ],
)
def test_exactly_one_kind_of_prompt(given: dict[str, Any], found: str) -> None:
    error = refusal(json.dumps({"max_tokens": 3, **given}).encode())
    assert str(error) == f"found {found}, expected exactly one of prompt, prompt_ids and messages"


@pytest.mark.parametrize(
    ("given", "path", "expected"),
    [
        ({"prompt_ids": []}, "prompt_ids", "found [], expected at least 1 item"),
        ({"prompt_ids": [1, True]}, "prompt_ids[1]", "found true, expected a valid integer"),
        ({"prompt_ids": [1, -2]}, "prompt_ids[1]", "found -2, expected greater than or equal to 0"),
        ({"prompt_ids": "1"}, "prompt_ids", 'found "1", expected a valid list'),
        ({"messages": []}, "messages", "found [], expected at least 1 item"),
        ({"messages": ["hi"]}, "messages[0]", 'found "hi", expected an object'),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing, expected a value"),
        (
            {"messages": [{"role": "wizard", "content": ""}]},
            "messages[0].role",
            "found \"wizard\", expected 'system', 'user' or 'assistant'",
        ),
        (
            {"messages": [{"role": "user", "content": "", "name": "x"}]},
            "messages[0].name",
            'unknown field (found "x"), expected no such key',
        ),
    ],
)
def test_bad_prompts_are_named(given: dict[str, Any], path: str, expected: str) -> None:
    error = refusal(json.dumps(given).encode())
    assert (error.field, str(error)) == (path, f"{path}: {expected}")


def test_an_empty_message_is_a_message() -> None:
    body = {"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": ""}]}
    messages = parse_generate(json.dumps(body).encode()).messages
    assert messages is not None
    assert [m.content for m in messages] == ["A", ""]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\\ud83d"}',
        b'{"prompt": "a", "stop": ["\\udc00"]}',
        b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
    ],
)
def test_half_a_character_is_refused_and_a_whole_pair_is_not(body: bytes) -> None:
    assert "expected text without lone surrogates" in str(refusal(body))
    assert parse_generate(b'{"prompt": "\\ud83d\\ude00"}').prompt == "😀"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty, expected a JSON object"),
        (b" \n", "the body is empty, expected a JSON object"),
        (b"prompt=hi", "the body is not JSON: "),
        (b'{"prompt": "hi"', "the body is not JSON: "),
        (b'{"prompt": "hi"} x', "the body is not JSON: "),
        (b'{"n": ' + b"1" * 5000 + b"}", "the body is not JSON: "),
        (b"[]", "the body is [], expected a JSON object"),
        (b'"hi"', 'the body is "hi", expected a JSON object'),
        (b"null", "the body is null, expected a JSON object"),
        (b'{"prompt": "\xff"}', "the body is not UTF-8 at byte 12, expected JSON in UTF-8"),
        ('{"prompt": "hi"}'.encode("utf-16"), "the body is not UTF-8 at byte 0, expected JSON in UTF-8"),
        (b'{"stop": ' + b"[" * 100_000, "the body is nested too deeply, expected a flat JSON object"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, message: str) -> None:
    error = refusal(body)
    assert str(error).startswith(message)
    assert error.field is None


@pytest.mark.parametrize("depth", range(100, 1000, 25))
def test_nesting_of_any_depth_is_a_plain_refusal(depth: int) -> None:
    assert refusal(b'{"prompt": "hi", "stop": ' + b"[" * depth + b"]" * depth + b"}").args


def test_errors_say_whose_fault_they_are() -> None:
    assert error_body("m", 400, "c", "p")["error"] == {
        "message": "m",
        "type": "invalid_request_error",
        "param": "p",
        "code": "c",
    }
    assert error_body("m", 503)["error"]["type"] == "server_error"
