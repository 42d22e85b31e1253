"""`step_cost.json`: seconds of the target's pass and of drafting, measured on one machine.

The standard keys are those of SGLang's table (steps a second over tokens of the batch); SGLang's additive form is read
too. What is ours lies under `dspark`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from dspark_core.checkpoint.files import write_atomically
from dspark_core.checkpoint.origin import Origin
from dspark_core.errors import CheckpointError
from dspark_core.keys import Keys
from dspark_core.step_cost import CostCurves, StepCost

logger = logging.getLogger(__name__)

STEP_COST_FILE = "step_cost.json"
VERSION = 1
_MUST_AGREE = ("target", "draft", "draft_len", "dtype", "weights", "device", "machine", "threads")
_CONTEXT = ("context", "block", "request_seconds", "per_request", "per_row", "draft_per_request")
_CURVES = ("tokens", "verify", "requests", "first_slot", "all_slots")


def save_step_cost(
    path: Path, cost: StepCost, origin: Origin, versions: Mapping[str, str], details: Mapping[str, Any] | None = None
) -> None:
    """Write the file, all at once."""
    first = cost.curves
    content = {
        "sample_batch_tokens": list(first.tokens),
        "sample_steps_per_sec": [1 / seconds for seconds in first.verify],
        "max_batch_tokens": max(first.tokens),
        "dspark": {
            "version": VERSION,
            "origin": origin.as_json(),
            "versions": dict(versions),
            "curves": {name: list(getattr(cost.curves, name)) for name in _CURVES},
            **{name: getattr(cost, name) for name in _CONTEXT},
            "details": dict(details or {}),
        },
    }
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def load_step_cost(path: Path, origin: Origin) -> StepCost:
    """Read a file of ours or SGLang's; of the latter, drafting is taken to cost nothing, for it does not say.

    Raises:
        CheckpointError: it cannot be read, a value is impossible, or it says that it was made for another model, block
            length, kind of weights or machine.
    """
    keys = Keys.of_file(path)
    own = keys.get("dspark", dict, None)
    if own is None:
        logger.warning("%s does not say which models and machine it was made for: used as it is", path)
        tokens, verify = _additive(keys) if "bias_seconds" in keys.values else _table(keys)
        return StepCost(CostCurves(tokens, verify, [1], [0.0], [0.0], origin.draft_len))
    inner = Keys(own, f"{path}: key 'dspark'")
    if (version := inner.get("version", int)) != VERSION:
        raise CheckpointError(f"{inner.where}: version {version}, expected {VERSION}")
    origin.check(inner.get("origin", dict), path, _MUST_AGREE)
    context = {name: inner.get(name, (int, float)) for name in _CONTEXT}
    if bad := [name for name, value in context.items() if not math.isfinite(value) or value < 0]:
        raise CheckpointError(f"{inner.where}: key '{bad[0]}' is {context[bad[0]]}, expected at least 0")
    if context["block"] < 1 or any(int(context[name]) != context[name] for name in ("context", "block")):
        raise CheckpointError(f"{inner.where}: keys 'context' and 'block', expected whole numbers, 'block' at least 1")
    return StepCost(_curves(inner.get("curves", dict), f"{inner.where}: key 'curves'", origin), **context)


def _curves(part: dict[str, Any], where: str, origin: Origin) -> CostCurves:
    keys = Keys(part, where)
    tokens, requests = _ascending(keys, "tokens"), _ascending(keys, "requests")
    return CostCurves(
        tokens,
        keys.numbers("verify", len(tokens), above=0),
        requests,
        keys.numbers("first_slot", len(requests), least=0),
        keys.numbers("all_slots", len(requests), least=0),
        origin.draft_len,
    )


def _table(keys: Keys) -> tuple[list[int], list[float]]:
    tokens = _ascending(keys, "sample_batch_tokens")
    return tokens, [1 / rate for rate in keys.numbers("sample_steps_per_sec", len(tokens), above=0)]


def _additive(keys: Keys) -> tuple[list[int], list[float]]:
    """A constant, a part by requests and a part by tokens. The part of one request is taken: it does not vary here."""
    tokens = _ascending(keys, "m_probes")
    bias = float(keys.get("bias_seconds", (int, float)))
    requests = _ascending(keys, "bs_probes")
    alpha = keys.numbers("alpha_seconds", len(requests), least=0)[0]
    seconds = [bias + alpha + theta for theta in keys.numbers("theta_seconds", len(tokens), least=0)]
    if min(seconds) <= 0:
        raise CheckpointError(f"{keys.where}: a step of {min(seconds)} s, expected more than 0")
    return tokens, seconds


def _ascending(keys: Keys, name: str) -> list[int]:
    values = keys.get(name, list)
    whole = all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values)
    if not values or not whole or any(a >= b for a, b in pairwise(values)):
        raise CheckpointError(f"{keys.where}: key '{name}' is {values!r}, expected ascending whole numbers")
    return list(values)
