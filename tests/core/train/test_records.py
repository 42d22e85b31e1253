"""JSONL files of prompts and answers: strict to read, safe to append to and to resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_core.errors import CheckpointError
from dspark_core.train.records import Prompt, append_record, read_lines, read_prompts, resume_records

SETTINGS: dict[str, Any] = {"target": "demo", "temperatures": (0.0, 1.0), "seed": 0}


def write(path: Path, *records: dict[str, Any]) -> None:
    with path.open("ab") as file:
        for record in records:
            append_record(file, record)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """An output file with two records."""
    path = tmp_path / "out" / "answers.jsonl"
    assert resume_records(path, SETTINGS) == []
    write(path, {"id": "a"}, {"id": "b"})
    return path


def test_what_was_written_is_there_on_resumption(begun: Path) -> None:
    assert resume_records(begun, SETTINGS) == [{"id": "a"}, {"id": "b"}]
    write(begun, {"id": "c"})
    assert [record["id"] for record in resume_records(begun, SETTINGS)] == ["a", "b", "c"]


def test_a_record_is_on_its_way_before_the_next_is_made(tmp_path: Path) -> None:
    """A kill costs at most the record in hand: nothing waits in a buffer of this process."""
    with (tmp_path / "a.jsonl").open("ab") as file:
        append_record(file, {"text": "é\u2028\n"})
        assert (tmp_path / "a.jsonl").read_bytes().count(b"\n") == 1, "a line break inside a text is escaped"
        assert [keys.values for keys in read_lines(tmp_path / "a.jsonl")] == [{"text": "é\u2028\n"}]


@pytest.mark.parametrize("torn", [b"{", b'{"id": "c"', b'{"id": "c"}', '{"id": "é'.encode()[:-1], b"\x00\x00"])
def test_a_last_line_without_its_end_is_dropped(torn: bytes, begun: Path) -> None:
    """Also one that happens to be whole: the next record would otherwise be put on the same line."""
    whole = begun.read_bytes()
    begun.write_bytes(whole + torn)
    assert resume_records(begun, SETTINGS) == [{"id": "a"}, {"id": "b"}]
    assert begun.read_bytes() == whole


def test_a_file_that_holds_nothing_but_a_torn_line_starts_anew(begun: Path) -> None:
    begun.write_bytes(b'{"id": "a')
    assert resume_records(begun, SETTINGS) == []
    assert begun.read_bytes() == b""


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("target", "other", "was begun with target 'demo', now it is 'other'"),
        ("temperatures", (0.0,), r"was begun with temperatures \[0.0, 1.0\], now it is \[0.0\]"),
        ("seed", 1, "was begun with seed 0, now it is 1"),
        ("top_p", 0.9, "was begun with top_p None, now it is 0.9"),
    ],
)
def test_other_settings_are_refused_with_both_values(name: str, value: Any, message: str, begun: Path) -> None:
    before = begun.read_bytes()
    with pytest.raises(CheckpointError, match=message) as caught:
        resume_records(begun, {**SETTINGS, name: value})
    assert str(begun) in str(caught.value)
    assert begun.read_bytes() == before


def test_an_empty_file_may_be_begun_with_other_settings(begun: Path) -> None:
    """Nothing is there that could be mixed: a first run may have been stopped before its first record."""
    begun.write_bytes(b"")
    assert resume_records(begun, {**SETTINGS, "seed": 1}) == []
    write(begun, {"id": "a"})
    assert resume_records(begun, {**SETTINGS, "seed": 1}) == [{"id": "a"}]


def test_a_file_of_somebody_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "theirs.jsonl"
    path.write_bytes(b'{"id": "a"}\n{"to')
    with pytest.raises(
        CheckpointError, match=r"theirs\.jsonl\.settings\.json is missing: .*theirs\.jsonl is not an output"
    ):
        resume_records(path, SETTINGS)
    assert path.read_bytes() == b'{"id": "a"}\n{"to'


def test_a_malformed_line_in_the_middle_is_not_taken_for_a_torn_one(begun: Path) -> None:
    begun.write_bytes(b'{"id": "a\n{"id": "b"}\n')
    with pytest.raises(CheckpointError, match=r"answers\.jsonl line 1 cannot be read as JSON"):
        resume_records(begun, SETTINGS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n\nnonsense\n', r"x\.jsonl line 3 cannot be read as JSON"),
        (b'{"a": 1}\n[1, 2]\n', r"x\.jsonl line 2 holds a list, expected a JSON object"),
        (b'{"a": 1}\n"text"\n', r"x\.jsonl line 2 holds a str, expected a JSON object"),
        (b'{"a": 1}\n{"a": 1} {"a": 2}\n', r"x\.jsonl line 2 cannot be read as JSON"),
        (b"[" * 100_000, r"x\.jsonl line 1 cannot be read as JSON"),
        (b'{"a": "\xff"}\n', r"x\.jsonl cannot be read"),
        (b'{"a": 1}\n{"a": ["\\ud800"]}\n', r"x\.jsonl line 2 holds half a surrogate pair, expected valid Unicode"),
        (b'{"\\udc00\\ud800": 1}\n', r"x\.jsonl line 1 holds half a surrogate pair"),
    ],
)
def test_a_malformed_line_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        list(read_lines(path))


def test_a_whole_pair_of_escapes_is_one_character(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"a": "\\ud83d\\ude00 \\u00e9 \\\\ud800"}\n')
    assert [keys.values for keys in read_lines(tmp_path / "x.jsonl")] == [{"a": "\U0001f600 \xe9 \\ud800"}]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read") as caught:
            list(read_lines(path))
        assert str(path) in str(caught.value)


def prompts_of(tmp_path: Path, *lines: dict[str, Any]) -> list[Prompt]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n\n" for line in lines))
    return read_prompts(path)


def test_prompts_are_conversations_with_a_domain(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    found = prompts_of(tmp_path, {"domain": "math", "prompt": "1 + 1?"}, {"messages": turns})
    assert found == [Prompt("math", [{"role": "user", "content": "1 + 1?"}]), Prompt("all", turns)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"domain": "a"}, "line 3: expected exactly one of 'prompt' and 'messages'"),
        ({"prompt": "p", "messages": [{}]}, "line 3: expected exactly one of 'prompt' and 'messages'"),
        ({"prompt": ["p"]}, r"line 3: key 'prompt' is \['p'\], expected str"),
        ({"messages": "m"}, "line 3: key 'messages' is 'm', expected list"),
        ({"messages": []}, "line 3: key 'messages' is empty, expected at least one message"),
        ({"prompt": "p", "messages": []}, "line 3: expected exactly one of 'prompt' and 'messages'"),
        ({"prompt": "p", "domain": 3}, "line 3: key 'domain' is 3, expected str"),
    ],
)
def test_a_prompt_that_is_none_is_named(line: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Line 3: empty lines do not count as prompts, and count as lines."""
    with pytest.raises(CheckpointError, match=message):
        prompts_of(tmp_path, {"prompt": "fine"}, line)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"prompts\.jsonl holds no prompt"):
        prompts_of(tmp_path)
