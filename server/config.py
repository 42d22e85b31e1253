"""The server's settings. Each is written once, here; the flags, their defaults and help come from it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

_LONGEST_QUOTE = 80
PAGE_SIZES = (16, 32, 64, 128)


def _setting(default: Any, group: str, description: str, **limits: Any) -> Any:
    return Field(default, description=description, json_schema_extra={"group": group}, **limits)


class ServerConfig(BaseModel):
    """Everything `dspark-serve` can be told. Unknown names and values out of range raise ValidationError."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    ckpt: str = _setting("demo", "model", "draft: a local folder, a hub id or 'demo'", min_length=1)
    target: str | None = _setting(
        None, "model", "target: the same kinds of name; unset: the one the draft names", min_length=1
    )
    served_model_name: str | None = _setting(
        None, "model", "name of the model in /v1/models; unset: the target's", min_length=1
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting(
        "auto", "model", "number type of weights and KV; auto: float32 on a CPU, bfloat16 on CUDA"
    )
    device: str = _setting("auto", "model", "cpu, cuda, cuda:N or auto: CUDA if there is any", min_length=1)

    max_model_len: int | None = _setting(
        None, "engine", "longest prompt + completion, in tokens; unset: as the target's config allows", ge=2
    )
    max_num_seqs: int = _setting(16, "engine", "requests decoded at once; the rest wait", ge=1)
    max_num_batched_tokens: int = _setting(512, "engine", "tokens in one pass of the target", ge=1)
    draft_len: int | None = _setting(
        None, "engine", "tokens drafted per round (K); unset: as many as the draft was trained for", ge=1
    )
    kv_memory_fraction: float = _setting(0.3, "engine", "share of the free memory given to KV", gt=0, lt=1)
    page_size: int = _setting(64, "engine", "token positions in a page of KV")
    seed: int | None = _setting(
        None, "engine", "seed for requests that bring none; unset: fresh every time", ge=0, le=2**63 - 1
    )

    host: str = _setting("127.0.0.1", "http", "address to listen on; 0.0.0.0: every interface", min_length=1)
    port: int = _setting(8000, "http", "port to listen on; 0: any free one", ge=0, le=65535)
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", "http", "least severe message that is logged"
    )

    @field_validator("page_size")
    @classmethod
    def _whole_pages(cls, value: int) -> int:
        if value not in PAGE_SIZES:
            raise ValueError(f"found {value}, expected one of {', '.join(map(str, PAGE_SIZES))}")
        return value


def explain(error: ValidationError, known: Iterable[str]) -> tuple[str, str]:
    """Word the first complaint of a pydantic error for the person who typed the value.

    Args:
        error: what validation raised.
        known: the names that would have been accepted at the top level.

    Returns:
        The path of the field, such as `stop[1]` ("" when no single field is at fault), and the complaint,
        which says what was found and what was expected.
    """
    first = error.errors(include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:]
    if first["type"] == "value_error":
        return path, str(first["ctx"]["error"])
    if first["type"] == "missing":
        return path, "missing, expected a value"
    found = quote(first["input"])
    if first["type"] == "extra_forbidden":
        expected = f"one of {', '.join(known)}" if len(first["loc"]) == 1 else "no such key"
        return quote(path)[1:-1], f"unknown field (found {found}), expected {expected}"
    if first["type"] in ("model_type", "model_attributes_type"):
        return path, f"found {found}, expected an object"
    expected = re.sub(r"^(Input should be|\w+ should have) ", "", first["msg"])
    return path, f"found {found}, expected {re.split(', unable| after validation', expected)[0]}"


def quote(value: Any) -> str:
    """A value in JSON's notation, cut to a length that fits an error message."""
    try:
        text = json.dumps(value, default=repr)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE - 3]}..."
