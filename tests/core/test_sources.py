"""Files and variables as sources of settings. Precedence as users meet it is in tests/server/test_cli.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_core.settings import Settings, UsageError, flag, setting
from dspark_core.sources import (
    OTHER_VARIABLES,
    Layers,
    read_environment,
    read_flat_toml,
    read_toml,
    unknown_variables,
    variable,
)


class Sizes(Settings):
    """Two fields."""

    max_steps: int = setting(1, "sizes", "steps", ge=1)
    kind: str = setting("a", "sizes", "kind")


def test_a_later_layer_wins_field_by_field_and_is_blamed() -> None:
    layers = Layers()
    layers.add_file(Path("a.toml"), {"max_steps": 2, "kind": "b"})
    layers.add({"max_steps": "3"}, variable)
    assert layers.build(Sizes) == Sizes(max_steps=3, kind="b")
    layers.add({"max_steps": "0"}, flag)
    with pytest.raises(UsageError, match=r'^--max-steps: found "0", expected greater'):
        layers.build(Sizes)


def test_a_layer_that_is_right_heals_one_below_that_is_wrong() -> None:
    layers = Layers()
    layers.add({"max_steps": "x"}, variable)
    with pytest.raises(UsageError, match=r"^DSPARK_MAX_STEPS: found"):
        layers.build(Sizes)
    layers.add({"max_steps": "2"}, flag)
    assert layers.build(Sizes).max_steps == 2


def test_variables_are_the_fields_in_capitals_and_nothing_is_a_value() -> None:
    environ = {"DSPARK_MAX_STEPS": "5", "MAX_STEPS": "6", "DSPARK_max_steps": "7", "DSPARK_KIND": ""}
    assert read_environment(["max_steps", "kind", "other"], environ) == {"max_steps": "5", "kind": ""}


def test_what_is_set_in_vain_is_told_with_what_was_probably_meant() -> None:
    environ = dict.fromkeys(OTHER_VARIABLES, "x") | {"DSPARK_KIND": "x", "HOME": "x", "DSPARK_MAX_STEP": "secret"}
    (warning,) = unknown_variables(["max_steps", "kind"], environ)
    assert warning == "DSPARK_MAX_STEP is set, which is no setting: expected DSPARK_MAX_STEPS"


@pytest.mark.parametrize("content", [b"a = ", b"a = '\xff'", b"a = 1\na = 2"])
def test_a_file_that_is_no_toml_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"x\.toml cannot be read as TOML: "):
        read_toml(path)
    with pytest.raises(UsageError, match=r"y\.toml cannot be read as TOML: .*No such file"):
        read_toml(tmp_path / "y.toml")


def test_a_key_that_is_no_setting_is_named_with_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("kind = 'b'\nzzz = 1\n")
    with pytest.raises(UsageError, match=r"x\.toml: unknown key zzz, expected one of max_steps, kind$"):
        read_flat_toml(path, ["max_steps", "kind"])
