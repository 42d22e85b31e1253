"""Settings written once, as fields of a pydantic model: flags, help, configuration files and errors come from them."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
PAGE_SIZES = (16, 32, 64, 128)  # token positions; whole vectors of keys
CpuWeights = Literal["exact", "float32", "float16", "int8", "int4"]
_LONGEST_QUOTE = 80


class UsageError(ValueError):
    """What the user typed cannot be used; the message names the flag or key, what was found, what was expected."""


class Settings(BaseModel):
    """Base of every program's settings. Unknown names and values out of range raise ValidationError.

    A list may be given as text with commas, as flags give it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _split_lists(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known = public_fields(cls)
        return {
            name: value.split(",") if isinstance(value, str) and _is_list(known.get(name)) else value
            for name, value in values.items()
        }


AnySettings = TypeVar("AnySettings", bound=Settings)


def public_fields(settings: type[Settings]) -> dict[str, FieldInfo]:
    """The fields by the names that users type: a field's alias where it has one."""
    return {field.alias or name: field for name, field in settings.model_fields.items()}


def setting(default: Any, group: str, description: str, **limits: Any) -> Any:
    """A field of Settings: its default (... when it must be given), group in the help, description and limits.

    With repr=False it is a secret: no error and no repr shows its value.
    """
    return Field(default, description=description, json_schema_extra={"group": group}, **limits)


def secrets(settings: type[Settings]) -> set[str]:
    """The names of the fields whose values are never shown."""
    return {name for name, field in public_fields(settings).items() if not field.repr}


def _is_list(field: FieldInfo | None) -> bool:
    return field is not None and any(get_origin(kind) is tuple for kind in _kinds(field.annotation))


def _kinds(annotation: Any) -> list[Any]:
    """What an annotation allows besides None."""
    union = get_origin(annotation) in (Union, UnionType)
    return [kind for kind in (get_args(annotation) if union else (annotation,)) if kind is not NoneType]


class Parser(argparse.ArgumentParser):
    """Hands on text; only the settings convert and check. Raises UsageError instead of ending the program."""

    def __init__(self, prog: str, *, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog,
            usage=f"{prog} [FLAGS]",
            description=description,
            epilog=epilog,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        self._secrets: set[str] = set()

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def add_settings(self, settings: type[Settings], titles: Mapping[str, str]) -> None:
        """One flag per field, in the groups of `titles` (name to title); that of a boolean may stand alone."""
        self._secrets |= secrets(settings)
        groups = {name: self.add_argument_group(title) for name, title in titles.items()}
        for name, field in public_fields(settings).items():
            assert isinstance(field.json_schema_extra, dict)
            given = field.default in (None, ()) or field.is_required()
            text = f"{field.description}{'' if given else f' (default: {as_typed(field.default)})'}".replace("%", "%%")
            group = groups[str(field.json_schema_extra["group"])]
            alone: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
            group.add_argument(flag(name), help=text, metavar=_metavar(field.annotation), **alone)

    def parse_known(self, argv: Sequence[str], known: Iterable[str]) -> dict[str, str]:
        """Values by field; UsageError for an argument that is no flag of `known`."""
        flags = [flag(name) for name in known]
        found, unknown = self.parse_known_args(list(_joined(argv, flags)))
        if unknown and not unknown[0].startswith("-") and (hidden := self._secrets & vars(found).keys()):
            # What stands alone may be one more secret.
            raise UsageError(f"{flag(min(hidden))}: found several arguments, expected one, with commas and no spaces")
        if unknown:
            raise UsageError(unknown_argument(unknown[0], flags))
        return dict(vars(found))


def _joined(argv: Sequence[str], flags: Sequence[str]) -> Iterator[str]:
    """Write `--flag -1,3` as `--flag=-1,3`: argparse takes a list that begins with a minus for a flag."""
    rest = iter(argv)
    for argument in rest:
        value = next(rest, None) if argument in flags else None
        if value is not None and re.match(r"-\d", value):
            yield f"{argument}={value}"
        else:
            yield argument
            if value is not None:
                yield from _joined([value, *rest], flags)


def unknown_argument(argument: str, flags: Sequence[str]) -> str:
    """The message for an argument that is none of `flags`. It leaves out a value, which may be a secret."""
    name = argument.split("=", maxsplit=1)[0]
    return f"unknown argument {name}, expected {nearest(name, flags, ' ')}"


def nearest(name: str, known: Sequence[str], separator: str = ", ") -> str:
    """What was probably meant by a name that is not known, else all there are."""
    near = difflib.get_close_matches(name, known, 1)
    return near[0] if near else f"one of {separator.join(known)}"


def flag(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"


def _metavar(annotation: Any) -> str:
    kind = _kinds(annotation)[0]
    if get_origin(kind) is tuple:
        return f"{_metavar(get_args(kind)[0])},..."
    if choices := get_args(kind):
        return "{" + ",".join(choices) + "}"
    return {int: "N", float: "X", str: "TEXT", bool: "{true,false}"}[kind]


def as_typed(value: Any) -> str:
    """A value as one would type it after its flag."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def build(
    settings: type[AnySettings], values: Mapping[str, Any], where: Mapping[str, str] | None = None
) -> AnySettings:
    """Settings from values; UsageError names the flag, or what `where` calls the field (a key of a file)."""
    try:
        return settings(**values)
    except ValidationError as error:
        path, complaint = explain(error, public_fields(settings), secrets(settings))
        name = re.split(r"[.\[]", path)[0]
        place = (where or {}).get(name, flag(path)) if path else ""
        raise UsageError(f"{place}: {complaint}" if place else complaint) from None


def explain(error: ValidationError, known: Iterable[str], hidden: Container[str] = ()) -> tuple[str, str]:
    """Word the first complaint of a pydantic error for the person who typed the value.

    Args:
        error: what validation raised.
        known: the names that would have been accepted at the top level.
        hidden: those whose values are not quoted.

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
    found = "a value that is not shown" if first["loc"][:1] and first["loc"][0] in hidden else quote(first["input"])
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
