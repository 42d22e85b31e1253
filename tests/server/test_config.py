"""ServerConfig: ranges, strictness, and the words of its errors."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dspark_core.settings import explain, quote
from server.cli import GROUPS
from server.config import ServerConfig


def complaint(**values: Any) -> tuple[str, str]:
    with pytest.raises(ValidationError) as caught:
        ServerConfig(**values)
    return explain(caught.value, ServerConfig.model_fields)


def test_the_defaults_serve_the_demo_on_loopback_only() -> None:
    config = ServerConfig()
    assert (config.ckpt, config.target, config.host, config.port) == ("demo", None, "127.0.0.1", 8000)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.page_size) == (16, None, 64)


def test_settings_cannot_change_after_the_start() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        ServerConfig().port = 80


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("port", 65536, "found 65536, expected less than or equal to 65535"),
        ("port", "http", 'found "http", expected a valid integer'),
        ("max_model_len", 1, "found 1, expected greater than or equal to 2"),
        ("max_num_seqs", 0, "found 0, expected greater than or equal to 1"),
        ("max_num_batched_tokens", 0, "found 0, expected greater than or equal to 1"),
        ("draft_len", 0, "found 0, expected greater than or equal to 1"),
        ("max_body_mb", 0, "found 0, expected greater than or equal to 1"),
        ("request_timeout", 0, "found 0, expected greater than 0"),
        ("drain_seconds", -1, "found -1, expected greater than or equal to 0"),
        ("log_format", "xml", "found \"xml\", expected 'text' or 'json'"),
        (
            "cors_origins",
            ["https://a.org/"],
            "found 'https://a.org/', expected * or scheme://host[:port] without a path",
        ),
        ("cors_origins", "a.org", "found 'a.org', expected * or scheme://host[:port] without a path"),
        ("api_key", "", "found a key that is empty or not printable ASCII, expected keys without spaces"),
        ("api_key", ["schlüssel"], "found a key that is empty or not printable ASCII, expected keys without spaces"),
        ("page_size", 24, "found 24, expected one of 16, 32, 64, 128"),
        ("seed", -1, "found -1, expected greater than or equal to 0"),
        ("seed", 2**63, f"found {2**63}, expected less than or equal to {2**63 - 1}"),
        ("kv_memory_fraction", 0, "found 0, expected greater than 0"),
        ("kv_memory_fraction", 1, "found 1, expected less than 1"),
        ("kv_memory_fraction", float("nan"), "found NaN, expected a finite number"),
        ("ckpt", "", 'found "", expected at least 1 character'),
        ("dtype", "int8", "found \"int8\", expected 'auto', 'float32', 'bfloat16' or 'float16'"),
    ],
)
def test_a_bad_value_is_named_with_what_was_found_and_expected(field: str, value: Any, expected: str) -> None:
    assert complaint(**{field: value}) == (field, expected)


def test_an_unknown_setting_is_named_with_those_that_exist() -> None:
    field, text = complaint(prot=80)
    assert field == "prot"
    assert text.startswith("unknown field (found 80), expected one of ckpt, target,")


def test_every_setting_is_described_and_belongs_to_a_group() -> None:
    for name, field in ServerConfig.model_fields.items():
        assert field.description, name
        assert isinstance(field.json_schema_extra, dict), name
        assert field.json_schema_extra["group"] in GROUPS, name


def test_quotes_are_short_whatever_the_value() -> None:
    nested: list[Any] = []
    for _ in range(20_000):
        nested = [nested]
    assert quote("x" * 1000) == '"' + "x" * 76 + "..."
    assert quote(nested) == "a deeply nested value"
    while nested:  # one level at a time: freeing it at once would recurse as deeply
        nested = nested.pop()


def test_the_page_sizes_are_those_of_the_kv_pool() -> None:
    """Written twice, because the settings are read without waiting for torch."""
    from dspark_core.models import kv_cache
    from server import config

    assert config.PAGE_SIZES == kv_cache.PAGE_SIZES
