"""Strict reading of JSON files: every error names the file, the key, what was found and what was expected."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dspark_core.errors import CheckpointError

_MISSING: Any = object()


class Keys:
    """A JSON object whose reads fail with the file and key named.

    Args:
        values: the parsed object.
        where: what to call it in errors, usually the file's path.
    """

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    @classmethod
    def of_file(cls, path: Path) -> Keys:
        """Read a JSON object; a missing, broken or non-object file is a CheckpointError."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist; expected a model folder with this file") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds a {type(values).__name__}, expected a JSON object")
        return cls(values, str(path))

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = _MISSING) -> Any:
        """The value of `key`; null counts as absent, and a value of another type is an error."""
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise CheckpointError(f"{self.where}: key '{key}' is missing")
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(k.__name__ for k in kinds)
            raise CheckpointError(f"{self.where}: key '{key}' is {value!r}, expected {names}")
        return value

    def positive(self, key: str, default: Any = _MISSING) -> int:
        """An integer of at least 1."""
        value = self.get(key, int, default)
        if value < 1:
            raise CheckpointError(f"{self.where}: key '{key}' is {value}, expected at least 1")
        return int(value)

    def numbers(
        self, key: str, count: int, *, least: float = -math.inf, above: float = -math.inf, most: float = math.inf
    ) -> list[float]:
        """A list of `count` finite numbers, each at least `least`, more than `above` and at most `most`."""
        values = self.get(key, list)
        if len(values) != count:
            raise CheckpointError(f"{self.where}: key '{key}' holds {len(values)} values, expected {count}")
        limits = (("at least", least), ("above", above), ("at most", most))
        expected = " and ".join(f"{word} {limit:g}" for word, limit in limits if math.isfinite(limit))
        for value in values:
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < least or value <= above or value > most:
                wanted = f"finite numbers {expected}".rstrip()
                raise CheckpointError(f"{self.where}: key '{key}' holds {value!r}, expected {wanted}")
        return [float(value) for value in values]
