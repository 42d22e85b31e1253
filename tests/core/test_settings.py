"""Settings: flags, help and errors come from the fields, whichever way a value was given."""

from __future__ import annotations

import re
from typing import Any, Literal

import pytest
from pydantic import ValidationError, field_validator, model_validator

from dspark_core.settings import Parser, Settings, UsageError, build, flag, public_fields, quote, setting

TITLES = {"files": "where things are", "sizes": "how large things are"}


class Example(Settings):
    """One field of every kind that the programs use."""

    output: str = setting(..., "files", "folder to write", min_length=1)
    data: tuple[str, ...] = setting((), "files", "files to read")
    json_file: str | None = setting(None, "files", "file of figures", alias="json")
    layers: tuple[int, ...] = setting((1, 2), "sizes", "100 % of the layers", min_length=1)
    temperatures: tuple[float, ...] = setting((0.0, 0.5), "sizes", "temperatures")
    steps: int | None = setting(None, "sizes", "steps to take", ge=1)
    share: float = setting(0.5, "sizes", "share of it", ge=0, le=1)
    kind: Literal["big", "small"] = setting("big", "sizes", "kind of thing")
    compile: bool = setting(False, "sizes", "whether to compile")
    key: tuple[str, ...] = setting((), "files", "passwords", repr=False)

    @field_validator("key")
    @classmethod
    def _no_spaces(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(" " in key for key in value):
            raise ValueError("found a key with a space, expected none")
        return value

    @field_validator("steps")
    @classmethod
    def _even(cls, value: int | None) -> int | None:
        if value is not None and value % 2:
            raise ValueError(f"found {value}, expected an even number")
        return value


class Pair(Settings):
    """Fields that must agree, so that no single one is at fault."""

    low: int = setting(0, "sizes", "lowest")
    high: int = setting(1, "sizes", "highest")

    @model_validator(mode="after")
    def _ascending(self) -> Pair:
        if self.low > self.high:
            raise ValueError("expected low to be at most high")
        return self


def parse(*argv: str) -> Example:
    parser = Parser("example", description="Does nothing.")
    parser.add_settings(Example, TITLES)
    return build(Example, parser.parse_known(argv, public_fields(Example)))


def complaint(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(*argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_flags_fill_the_fields() -> None:
    given = ["--output", "o", "--data=a,b", "--json", "f", "--layers", "3,4,5", "--temperatures=0.5"]
    given += ["--steps", "8", "--share=0.25", "--kind", "small", "--compile", "true"]
    assert parse(*given).model_dump() == {
        "output": "o",
        "data": ("a", "b"),
        "json_file": "f",
        "layers": (3, 4, 5),
        "temperatures": (0.5,),
        "steps": 8,
        "share": 0.25,
        "kind": "small",
        "compile": True,
        "key": (),
    }


def test_what_is_not_given_has_its_default() -> None:
    assert parse("--output", "o") == Example(output="o")
    assert parse("--output", "o", "--compile", "false").compile is False


def test_a_list_may_come_as_a_list() -> None:
    """Files give lists, flags give text with commas; both end the same."""
    assert build(Example, {"output": "o", "layers": [3, 4]}) == parse("--output", "o", "--layers", "3,4")


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--compile"], True),
        (["--compile", "--steps", "2"], True),
        (["--compile=true"], True),
        (["--compile", "false"], False),
    ],
)
def test_the_flag_of_a_boolean_may_stand_alone(argv: list[str], value: bool) -> None:
    assert parse("--output", "o", *argv).compile is value


@pytest.mark.parametrize(
    "argv",
    [
        ["--key", "secret 1"],
        ["--key", "secret,", "secret2"],
        ["--keys=secret"],
        ["--key", "ok", "--steps", "-1"],
    ],
)
def test_a_secret_is_in_no_complaint(argv: list[str]) -> None:
    assert "secret" not in complaint("--output", "o", *argv)


def test_a_secret_of_another_kind_is_in_no_complaint_and_a_good_one_in_no_repr() -> None:
    with pytest.raises(UsageError) as caught:
        build(Example, {"output": "o", "key": [31337]}, {"key": "a.toml: key"})
    assert str(caught.value) == "a.toml: key: found a value that is not shown, expected a valid string"
    found = parse("--output", "o", "--key", "secret,other")
    assert found.key == ("secret", "other")
    assert "secret" not in f"{found} {found!r}"


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        parse("--output", "o").output = "p"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "8"], "--output: missing, expected a value"),
        (["--output", ""], '--output: found "", expected at least 1 character'),
        (["--output", "o", "--steps", "x"], '--steps: found "x", expected a valid integer'),
        (["--output", "o", "--steps", "0"], '--steps: found "0", expected greater than or equal to 1'),
        (["--output", "o", "--steps", "3"], "--steps: found 3, expected an even number"),
        (["--output", "o", "--share", "1.5"], '--share: found "1.5", expected less than or equal to 1'),
        (["--output", "o", "--share", "inf"], '--share: found "inf", expected a finite number'),
        (["--output", "o", "--kind", "huge"], "--kind: found \"huge\", expected 'big' or 'small'"),
        (["--output", "o", "--compile", "maybe"], '--compile: found "maybe", expected a valid boolean'),
        (["--output", "o", "--layers", "1,x"], '--layers[1]: found "x", expected a valid integer'),
        (["--output", "o", "--layers", ""], '--layers[0]: found "", expected a valid integer'),
        (["--output", "o", "--steps"], "argument --steps: expected one argument"),
        (["--output", "o", "--json-file", "f"], "unknown argument --json-file, expected "),
        (["--outputs", "o"], "unknown argument --outputs, expected --output"),
        (["--out", "o"], "unknown argument --out, expected --output"),
        (["--qqqqq=1"], "unknown argument --qqqqq, expected one of --output --data --json --layers "),
        (["word"], "unknown argument word, expected one of --output --data --json --layers "),
    ],
)
def test_a_complaint_names_the_flag_what_was_found_and_what_was_expected(argv: list[str], message: str) -> None:
    assert complaint(*argv).startswith(message)


def test_a_value_of_a_file_is_complained_about_under_its_name_there() -> None:
    where = {"share": "a.toml: share", "json": "a.toml: json"}
    with pytest.raises(UsageError, match=r"^a\.toml: share: found 3, expected less"):
        build(Example, {"output": "o", "share": 3}, where)
    with pytest.raises(UsageError, match=r"^a\.toml: json: found 7, expected a valid string"):
        build(Example, {"output": "o", "json": 7}, where)
    with pytest.raises(UsageError, match=r"^--output: missing"):
        build(Example, {}, where)


def test_a_complaint_about_several_fields_names_no_flag() -> None:
    with pytest.raises(UsageError) as caught:
        build(Pair, {"low": 5})
    assert str(caught.value) == "expected low to be at most high"


@pytest.mark.parametrize("text", ["-1,3", "-1", "-2,-1"])
def test_a_list_that_begins_with_a_negative_number_is_a_value(text: str) -> None:
    """argparse takes "-1,3" for a flag, and would say that --layers lacks its argument."""
    expected = tuple(map(int, text.split(",")))
    for argv in (["--layers", text], [f"--layers={text}"]):
        assert parse(*argv, "--output", "o").layers == expected
        assert parse("--output", "o", *argv).layers == expected
    assert complaint("--output", "--layers", text).startswith("argument --output: expected one argument")


def test_help_tells_every_field_its_kind_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for line in (
        "where things are: --output TEXT folder to write --data TEXT,... files to read",
        "--json TEXT file of figures --key TEXT,... passwords how large things are:",
        "--layers N,... 100 % of the layers (default: 1,2)",
        "--temperatures X,... temperatures (default: 0.0,0.5) --steps N steps to take --share X share of it",
        "--kind {big,small} kind of thing (default: big)",
        "--compile [{true,false}] whether to compile (default: false)",
    ):
        assert line in text, line


def test_an_alias_is_the_name_that_users_type() -> None:
    assert list(public_fields(Example))[:3] == ["output", "data", "json"]
    assert flag("max_steps") == "--max-steps"
    assert build(Example, {"output": "o", "json": "f"}).json_file == "f"
    with pytest.raises(UsageError, match=re.escape("unknown field")):
        build(Example, {"output": "o", "json_file": "f"})


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a", '"a"'),
        ([1, None], "[1, null]"),
        (b"x", "\"b'x'\""),
        ("x" * 100, '"' + "x" * 76 + "..."),
    ],
)
def test_quotes_are_json_and_short(value: Any, shown: str) -> None:
    assert quote(value) == shown


def test_quoting_survives_depth() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert quote(deep) == "a deeply nested value"
    while deep:  # taken apart by hand: a recursive end could exhaust the stack
        deep = deep.pop()
