"""Prompts to ids and ids to text: encoding, decoding, and streaming without half a character."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_core.checkpoint.tokenizer import Tokenizer
from dspark_core.errors import CheckpointError, RequestError
from tests.core.checkpoint import tiny_tokenizers as tiny

EMOJI = ["\U0001fae0", "\u9f9c", "\U0001f600", "é"]
PIECES = sorted(
    {c.encode()[i:j] for c in EMOJI for i in range(3) for j in range(i + 2, len(c.encode()) + 1)} | {"\ufffd".encode()}
)
BYTE_LEVEL = Tokenizer(tiny.byte_level(PIECES))
BYTE_FALLBACK = Tokenizer(tiny.byte_fallback())


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text of every step, then that of the flush."""
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.step(token_id) for token_id in ids), detokenizer.flush()]


def piece_id(piece: bytes) -> int:
    return 2 + piece[0] if len(piece) == 1 else 2 + 256 + PIECES.index(piece)


def splits(data: bytes) -> Iterator[list[bytes]]:
    """Every way to cut `data` into pieces."""
    for cuts in range(2 ** (len(data) - 1)):
        places = [0, *(i for i in range(1, len(data)) if cuts >> (i - 1) & 1), len(data)]
        yield [data[a:b] for a, b in pairwise(places)]


@pytest.mark.parametrize("character", EMOJI)
def test_a_character_comes_whole_however_it_is_split(character: str) -> None:
    """Cases G1 and G5."""
    for pieces in splits(character.encode()):
        ids = [piece_id(piece) for piece in pieces]
        assert stream(BYTE_LEVEL, [*ids, piece_id(b"!")]) == [""] * (len(ids) - 1) + [character, "!", ""]
        assert BYTE_LEVEL.decode(ids) == character


def test_a_literal_replacement_character_is_delivered_at_once() -> None:
    """Case G3."""
    ids = [piece_id(b"a"), piece_id("\ufffd".encode()), piece_id(b"b")]
    assert stream(BYTE_LEVEL, ids) == ["a", "\ufffd", "b", ""]


def test_unfinished_bytes_at_the_end_become_a_replacement_character() -> None:
    """Case G2."""
    ids = [piece_id(b"a"), piece_id(EMOJI[0].encode()[:3])]
    assert stream(BYTE_LEVEL, ids) == ["a", "", "\ufffd"]
    assert BYTE_LEVEL.decode(ids) == "a\ufffd"


def test_special_tokens_give_no_text_even_inside_a_character() -> None:
    first, rest = EMOJI[2].encode()[:2], EMOJI[2].encode()[2:]
    ids = [0, piece_id(first), 1, piece_id(rest), 1]
    assert stream(BYTE_LEVEL, ids) == ["", "", "", EMOJI[2], "", ""]


def test_added_tokens_that_are_not_special_are_text() -> None:
    think = BYTE_LEVEL.vocab_size - 1
    assert stream(BYTE_LEVEL, [think]) == ["<think>", ""]
    assert BYTE_LEVEL.token_bytes(think) == b"<think>"


@tiny.SEEDED
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 1)))
def test_streamed_byte_level_text_equals_the_decoded_one(ids: list[int]) -> None:
    expected = tiny.byte_level(PIECES).decode(ids, skip_special_tokens=True)
    assert BYTE_LEVEL.decode(ids) == expected
    assert "".join(stream(BYTE_LEVEL, ids)) == expected


@tiny.SEEDED
@given(st.text())
def test_streamed_byte_fallback_text_equals_the_decoded_one(text: str) -> None:
    backend = tiny.byte_fallback()
    ids = [id_ for id_ in backend.encode(text).ids if id_ > 0]
    expected = backend.decode(ids, skip_special_tokens=True)
    assert BYTE_FALLBACK.decode(ids) == expected
    assert "".join(stream(BYTE_FALLBACK, ids)) == expected


@tiny.SEEDED
@given(st.lists(st.integers(0, BYTE_FALLBACK.vocab_size)))
def test_streamed_equals_decoded_for_any_byte_fallback_ids(ids: list[int]) -> None:
    assert "".join(stream(BYTE_FALLBACK, ids)) == BYTE_FALLBACK.decode(ids)


@tiny.SEEDED
@given(st.lists(st.integers(3 + 256, BYTE_FALLBACK.vocab_size - 1)))
def test_only_the_first_space_of_all_is_dropped(ids: list[int]) -> None:
    assert BYTE_FALLBACK.decode(ids) == tiny.byte_fallback().decode(ids)


def test_byte_fallback_drops_one_leading_space_and_holds_bytes() -> None:
    backend = tiny.byte_fallback()
    ids = backend.encode("a 龜", add_special_tokens=False).ids
    assert stream(BYTE_FALLBACK, ids) == ["a", " ", "", "", "龜", ""]
    assert [BYTE_FALLBACK.token_bytes(i) for i in ids] == [b" a", b" ", b"\xe9", b"\xbe", b"\x9c"]


@pytest.mark.parametrize("kind", ["metaspace", "words"])
def test_other_decoders_stream_what_they_decode(kind: str) -> None:
    backend = tiny.KINDS[kind]()
    tokenizer = Tokenizer(backend)
    for seed in range(20):
        ids = [(seed * 7 + i * i * 3) % backend.get_vocab_size() for i in range(seed)]
        assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=True)
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@tiny.SEEDED
@given(st.text())
def test_bytes_of_the_tokens_join_to_the_text(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert b"".join(map(BYTE_LEVEL.token_bytes, ids)) == text.encode()


def test_bytes_of_special_and_unknown_ids() -> None:
    assert BYTE_LEVEL.token_bytes(1) == b"<|end|>"
    assert BYTE_LEVEL.token_bytes(10**6) == b""
    assert stream(BYTE_LEVEL, [10**6]) == ["", ""]


def test_raw_prompts_get_the_bos_of_the_tokenizer_and_parse_special_tokens() -> None:
    """Case O2."""
    assert BYTE_LEVEL.encode("a<|end|>") == [2 + ord("a"), 1]
    assert BYTE_LEVEL.encode("") == []
    with_bos = Tokenizer(tiny.byte_level_outside())
    assert with_bos.encode("a<|end|>") == [257, ord("a"), 258]


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path) -> None:
    backend = tiny.byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    assert len(Tokenizer.from_folder(tiny.write_folder(tmp_path, backend)).encode("abcde")) == 5


def test_half_a_surrogate_pair_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="surrogate pair at character 2") as caught:
        BYTE_LEVEL.encode("ab\ud83d")
    assert caught.value.field == "prompt"


def test_vocabulary_size_counts_added_tokens() -> None:
    assert Tokenizer(tiny.byte_level()).vocab_size == 2 + 256 + 2 + 1
    assert Tokenizer(tiny.byte_level_outside()).vocab_size == 259


def test_end_of_text_is_what_both_files_name(tmp_path: Path) -> None:
    folder = tiny.write_folder(
        tmp_path,
        tiny.byte_level(),
        tokenizer_config={"eos_token": {"content": "<|end|>"}, "bos_token": None},
        special_tokens_map={"eos_token": "<think>"},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == {1, tokenizer.vocab_size - 1}
    # An end-of-text token is special even where tokenizer.json does not say so.
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == ""


def test_no_end_of_text_is_an_empty_set(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tiny.write_folder(tmp_path, tiny.byte_level())).eos_token_ids == frozenset()


def test_end_of_text_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    tiny.write_folder(tmp_path, tiny.byte_level(), tokenizer_config={"eos_token": "</s>"})
    with pytest.raises(CheckpointError, match="no token '</s>'"):
        Tokenizer.from_folder(tmp_path)


def test_missing_or_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not found"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a readable tokenizer"):
        Tokenizer.from_folder(tmp_path)
    tiny.write_folder(tmp_path, tiny.byte_level(), tokenizer_config=["eos_token"])
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json .*expected a JSON object"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.demo
@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "  two  spaces\n\n\ttab",
        "1234 5.67",
        "naïve 龜 🫠 😀",
        "def f(x):\n    return x**2\n",
        "\ufffd",
    ],
)
def test_demo_tokenizer_agrees_with_transformers(demo: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = demo
    ids = ours.encode(text)
    assert ids == theirs(text).input_ids
    assert ours.decode(ids) == text
    assert "".join(stream(ours, ids)) == text
    assert b"".join(map(ours.token_bytes, ids)).decode() == text


@pytest.mark.demo
def test_demo_tokenizer_facts(demo: tuple[Tokenizer, Any]) -> None:
    ours, _ = demo
    assert (ours.vocab_size, ours.eos_token_ids) == (49152, {2})
    assert ours.encode("1234 a") == ours.encode("1") + ours.encode("2") + ours.encode("3") + ours.encode("4 a")
