"""Where values of settings come from besides flags: TOML files and environment variables, and which place wins."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_core.settings import AnySettings, UsageError, build, nearest

PREFIX = "DSPARK_"
# Variables that are no settings: the cache, the demo's wheel, and what scripts/_env reads.
OTHER_VARIABLES = frozenset({"DSPARK_CACHE", "DSPARK_DEMO_WHEEL", "DSPARK_VENV", "DSPARK_PYTHON", "DSPARK_CONSTRAINTS"})


class Layers:
    """Values of settings from several places: a later place wins, and an error names the place a value came from."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._where: dict[str, str] = {}

    def add(self, found: Mapping[str, Any], called: Callable[[str], str]) -> None:
        """Lay values over those that are there; `called` says what a field is called where they come from."""
        self._values |= found
        self._where |= {name: called(name) for name in found}

    def add_file(self, path: Path, found: Mapping[str, Any]) -> None:
        """Values of a file, whose errors name it and the key."""
        self.add(found, lambda key: f"{path}: {key}")

    def build(self, settings: type[AnySettings]) -> AnySettings:
        """The settings; UsageError names the flag, the variable, or the file and key at fault."""
        return build(settings, self._values, self._where)


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file; UsageError when it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as TOML: {error}") from None


def read_flat_toml(path: Path, known: Sequence[str]) -> dict[str, Any]:
    """Settings of a TOML file without sections; UsageError names a key that is none of `known`."""
    content = read_toml(path)
    if unknown := [key for key in content if key not in known]:
        raise UsageError(f"{path}: unknown key {unknown[0]}, expected {nearest(unknown[0], known)}")
    return content


def variable(name: str) -> str:
    """The environment variable of a field."""
    return f"{PREFIX}{name.upper()}"


def read_environment(known: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Values by field from `DSPARK_*` variables. One that is set to nothing is a value too: the empty text."""
    return {name: environ[variable(name)] for name in known if variable(name) in environ}


def unknown_variables(known: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """A warning for every `DSPARK_*` variable that means nothing here. It does not show the value."""
    names = [variable(name) for name in known]
    strangers = sorted(name for name in environ if name.startswith(PREFIX) and name not in {*names, *OTHER_VARIABLES})
    return [f"{name} is set, which is no setting: expected {nearest(name, names)}" for name in strangers]
