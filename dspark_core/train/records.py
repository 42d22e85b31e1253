"""JSONL files of prompts and of the target's answers: strict to read, safe to append to and to resume."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dspark_core.checkpoint.files import write_atomically
from dspark_core.errors import CheckpointError
from dspark_core.keys import Keys


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for its next answer, and the domain it is counted under."""

    domain: str
    messages: list[dict[str, Any]]


def read_lines(path: Path) -> Iterator[Keys]:
    """The JSON objects of a file, one a line; empty lines are skipped. Errors name file and line."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path} line {number}"
                try:
                    values = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise CheckpointError(f"{where} cannot be read as JSON: {error}") from None
                if not isinstance(values, dict):
                    raise CheckpointError(f"{where} holds a {type(values).__name__}, expected a JSON object")
                _check_unicode(line, values, where)
                yield Keys(values, where)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _check_unicode(line: str, values: dict[str, Any], where: str) -> None:
    """JSON can spell half a UTF-16 pair; no tokenizer and no file can hold it."""
    if "\\u" not in line:
        return
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{where} holds half a surrogate pair, expected valid Unicode") from None


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file, a line {"domain", "prompt"} (one user turn) or {"domain", "messages"} each.

    Raises:
        CheckpointError: the file cannot be read, a line is malformed, or there is none.
    """
    prompts = []
    for keys in read_lines(path):
        if ("prompt" in keys.values) == ("messages" in keys.values):
            raise CheckpointError(f"{keys.where}: expected exactly one of 'prompt' and 'messages'")
        if "messages" in keys.values:
            messages = keys.get("messages", list)
        else:
            messages = [{"role": "user", "content": keys.get("prompt", str)}]
        if not messages:
            raise CheckpointError(f"{keys.where}: key 'messages' is empty, expected at least one message")
        prompts.append(Prompt(keys.get("domain", str, "all"), messages))
    if not prompts:
        raise CheckpointError(f"{path} holds no prompt")
    return prompts


def resume_records(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What an output file already holds, ready to be appended to; starts a new one where there is none.

    The settings it was begun with lie beside it (`.settings.json`); others than those are refused, so that one file
    never mixes two kinds. A last line that a kill cut short is dropped.

    Raises:
        CheckpointError: other settings, or a file that is not ours.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".settings.json")
    wanted = json.loads(json.dumps(settings))
    if not path.exists() or not path.stat().st_size:
        write_atomically(beside, lambda file: file.write(json.dumps(wanted, indent=1).encode()))
        path.touch()
        return []
    if not beside.exists():
        raise CheckpointError(f"{beside} is missing: {path} is not an output of this command, or has lost its settings")
    begun = Keys.of_file(beside).values
    if different := [name for name in wanted if begun.get(name) != wanted[name]]:
        name = different[0]
        raise CheckpointError(
            f"{path} was begun with {name} {begun.get(name)!r}, now it is {wanted[name]!r}; "
            "expected the same settings, or another output file"
        )
    _drop_torn_line(path)
    return [keys.values for keys in read_lines(path)]


def append_record(file: BinaryIO, record: Mapping[str, Any]) -> None:
    """One line, handed to the system at once, so that a kill costs at most this record."""
    file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    file.flush()


def _drop_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
            file.flush()
            os.fsync(file.fileno())
