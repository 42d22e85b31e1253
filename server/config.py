"""The server's settings. Each is written once, here; the flags, their defaults and help come from it."""

from __future__ import annotations

import contextlib
import re
from typing import Literal

from pydantic import field_validator

from dspark_core.settings import PAGE_SIZES, CpuWeights, DtypeName, Settings, setting


class ServerConfig(Settings):
    """Everything `dspark-serve` can be told."""

    ckpt: str = setting("demo", "model", "draft: a local folder, a hub id or 'demo'", min_length=1)
    target: str | None = setting(
        None, "model", "target: the same kinds of name; unset: the one the draft names", min_length=1
    )
    served_model_name: str | None = setting(
        None, "model", "name of the model in /v1/models; unset: the target's", min_length=1
    )
    dtype: DtypeName = setting(
        "auto", "model", "number type of weights and KV; auto: float32 on a CPU, bfloat16 on CUDA"
    )
    cpu_weights: CpuWeights = setting(
        "exact", "model", "weights on a CPU: exact packs them without changing one; float16, int8 and int4 round them"
    )
    device: str = setting("auto", "model", "cpu, cuda, cuda:N or auto: CUDA if there is any", min_length=1)

    max_model_len: int | None = setting(
        None, "engine", "longest prompt + completion, in tokens; unset: as the target's config allows", ge=2
    )
    max_num_seqs: int = setting(16, "engine", "requests decoded at once; the rest wait", ge=1)
    max_num_batched_tokens: int | None = setting(
        None,
        "engine",
        "tokens in one pass of the target, which prompts fill up (at least 32 of theirs fit beside any that decode); "
        "unset: 128 on a CPU, else 2048",
        ge=1,
    )
    draft_len: int | None = setting(
        None, "engine", "tokens drafted per round (K); unset: as many as the draft was trained for", ge=1
    )
    verify: str = setting(
        "auto",
        "engine",
        "auto: draft and verify as far as pays, or not at all; full: whole blocks; off: draft nothing; "
        "N: so many tokens; threshold=X: what survives with this probability",
    )
    calibration: str | None = setting(
        None, "engine", "calibration.json; unset: beside the draft or in the cache; off: raw confidence", min_length=1
    )
    step_cost: str | None = setting(
        None, "engine", "step_cost.json; unset: beside the draft, else measured at start and kept", min_length=1
    )
    recalibrate_online: bool = setting(
        False, "engine", "refit the calibration in service, from a few blocks that are verified in full"
    )
    kv_memory_fraction: float = setting(0.3, "engine", "share of the free memory given to KV", gt=0, lt=1)
    page_size: int = setting(64, "engine", "token positions in a page of KV")
    prefix_cache: bool = setting(True, "engine", "keep the KV of prompts for later ones that begin alike")
    max_queue: int = setting(256, "engine", "requests that may wait; further ones are answered 503", ge=0)
    seed: int | None = setting(
        None, "engine", "seed for requests that bring none; unset: fresh every time", ge=0, le=2**63 - 1
    )

    host: str = setting("127.0.0.1", "http", "address to listen on; 0.0.0.0: every interface", min_length=1)
    port: int = setting(8000, "http", "port to listen on; 0: any free one", ge=0, le=65535)
    api_key: tuple[str, ...] = setting(
        (),
        "http",
        "keys, one of which a request must bring as 'Authorization: Bearer KEY'; unset: no request needs one. "
        "Other users of the machine can see flags: prefer the variable or the file",
        repr=False,
    )
    cors_origins: tuple[str, ...] = setting(
        (), "http", "origins whose web pages may ask, such as https://example.org, or *; unset: none"
    )
    max_body_mb: int = setting(8, "http", "largest body of a request, in MiB; a larger one is answered 413", ge=1)
    request_timeout: float | None = setting(
        None, "http", "seconds from its arrival after which a request is cut and its place freed; unset: never", gt=0
    )
    drain_seconds: int = setting(
        5, "http", "seconds that running requests get to finish once a signal to stop has come", ge=0
    )

    check: bool = setting(False, "run", "load everything, say what would be served, and end: nothing is served")
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "run", "least severe message that is logged"
    )
    log_format: Literal["text", "json"] = setting("text", "run", "a line of text a message, or an object of JSON")
    log_prompts: bool = setting(False, "run", "log what requests ask; otherwise no text of theirs is logged")

    @field_validator("api_key")
    @classmethod
    def _sendable_keys(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(re.fullmatch("[!-~]+", key) for key in value):
            raise ValueError("found a key that is empty or not printable ASCII, expected keys without spaces")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ValueError(f"found {origin!r}, expected * or scheme://host[:port] without a path")
        return value

    @field_validator("page_size")
    @classmethod
    def _whole_pages(cls, value: int) -> int:
        if value not in PAGE_SIZES:
            raise ValueError(f"found {value}, expected one of {', '.join(map(str, PAGE_SIZES))}")
        return value

    @field_validator("verify")
    @classmethod
    def _known_rule(cls, value: str) -> str:
        kind, _, number = value.partition("=")
        if value in ("auto", "full", "off") or (value.isascii() and value.isdecimal() and int(value) > 0):
            return value
        if kind == "threshold" and re.fullmatch(r"[0-9.]+(e-?[0-9]+)?", number):
            with contextlib.suppress(ValueError):
                if 0 < float(number) <= 1:
                    return value
        raise ValueError(f"found {value}, expected auto, full, off, a number of tokens, or threshold=X with X up to 1")
