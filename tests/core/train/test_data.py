"""Training sequences: which tokens are supervised, what is refused or left out, and who is held out."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dspark_core.checkpoint.tokenizer import Tokenizer
from dspark_core.errors import CheckpointError
from dspark_core.train.data import Example, RewritingTemplateError, conversation, load_examples, split_holdout
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer, write_json

VOCAB = 259
QUESTION, ANSWER = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}
Load = Callable[..., list[Example]]


def tokenizer_with(folder: Path, template: str) -> Tokenizer:
    folder.mkdir()
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": template}
    write_json(folder / "tokenizer_config.json", names)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_with(tmp_path_factory.mktemp("tiny") / "model", CHAT_TEMPLATE)


@pytest.fixture
def load(tmp_path: Path, tokenizer: Tokenizer) -> Load:
    """Loads examples from lines of one file."""

    def load_lines(*lines: dict[str, Any], **options: Any) -> list[Example]:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        options = {"vocab_size": VOCAB, "max_length": 64, "min_supervised": 2} | options
        return load_examples([path], tokenizer, **options)

    return load_lines


def answer(name: str, prompt: list[int], response: list[int], **more: Any) -> dict[str, Any]:
    return {"id": name, "domain": "math", "prompt_ids": prompt, "response_ids": response, **more}


def supervised_text(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> tuple[str, str]:
    """The whole text, and it again with a dot for every token that is not supervised."""
    ids, supervised = conversation(tokenizer, messages)
    pieces = [tokenizer.token_bytes(i).decode() for i in ids]
    return "".join(pieces), "".join(p if on else "." for p, on in zip(pieces, supervised, strict=True))


def test_of_a_generated_record_the_response_alone_is_supervised(load: Load) -> None:
    (example,) = load(answer("a-0", [5, 6, 7], [8, 9], temperature=1.0, finish_reason="stop", messages=[QUESTION]))
    assert example == Example("a-0", "math", "5,6,7", [5, 6, 7, 8, 9], [False, False, False, True, True])


def test_an_answer_is_supervised_with_its_end_and_nothing_else_is(tokenizer: Tokenizer) -> None:
    """The opening of the turn is what the server puts there; its end is a token that the target said."""
    whole, supervised = supervised_text(tokenizer, [QUESTION, ANSWER])
    assert whole == "<|start|>user:ab<|end|><|start|>assistant:cd<|end|>"
    assert supervised == "." * len("?user:ab??assistant:") + "cd<|end|>"


def test_every_answer_of_a_conversation_is_supervised(tokenizer: Tokenizer) -> None:
    second = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yz"}]
    system = {"role": "system", "content": "s"}
    whole, supervised = supervised_text(tokenizer, [system, QUESTION, ANSWER, *second])
    assert whole.endswith("cd<|end|><|start|>user:x<|end|><|start|>assistant:yz<|end|>")
    assert re.findall(r"[^.]+", supervised) == ["cd<|end|>", "yz<|end|>"]
    assert not supervised.endswith(".")


def test_what_comes_after_the_last_answer_is_cut(tokenizer: Tokenizer) -> None:
    assert conversation(tokenizer, [QUESTION, ANSWER, QUESTION]) == conversation(tokenizer, [QUESTION, ANSWER])


def test_the_prompt_of_a_conversation_is_what_the_server_would_send(tokenizer: Tokenizer) -> None:
    ids, supervised = conversation(tokenizer, [QUESTION, ANSWER])
    prompt = tokenizer.encode_chat([QUESTION])
    assert ids[: len(prompt)] == prompt
    assert supervised.index(True) == len(prompt)


@pytest.mark.parametrize(
    "template",
    [
        # Thoughts of earlier turns are dropped, as Qwen3's template does.
        CHAT_TEMPLATE.replace("m['content']", "(m['content'] if loop.last else m['content'].split('/')[-1])"),
        "{{ messages | length }}" + CHAT_TEMPLATE,
        # The opening of the next answer is not how the answer then begins.
        CHAT_TEMPLATE.replace("<|start|>assistant:", "<|start|>assistant:think "),
    ],
    ids=["drops thoughts", "counts turns", "opens otherwise"],
)
def test_conversations_of_a_template_that_rewrites_earlier_turns_are_left_out(
    template: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tokenizer_with(tmp_path / "model", template)
    messages = [QUESTION, {"role": "assistant", "content": "thought/cd"}, QUESTION, ANSWER]
    with pytest.raises(RewritingTemplateError, match="the chat template rewrites earlier turns of a conversation"):
        conversation(tokenizer, messages)
    path, lines = tmp_path / "data.jsonl", [{"messages": messages}, answer("a", [2], [3, 4]), {"messages": messages}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with caplog.at_level(logging.WARNING):
        found = load_examples([path], tokenizer, vocab_size=VOCAB, max_length=64, min_supervised=2)
    assert [example.id for example in found] == ["a"]
    assert caplog.messages == ["2 sequences left out: the chat template rewrites earlier turns of a conversation"]


def test_what_a_template_writes_after_the_end_of_a_turn_is_not_supervised(tmp_path: Path) -> None:
    """Such as the line break that follows it in the templates of Qwen3: no target says it."""
    tokenizer = tokenizer_with(tmp_path / "model", CHAT_TEMPLATE.replace("<|end|>", "<|end|>\n"))
    whole, supervised = supervised_text(tokenizer, [QUESTION, ANSWER, QUESTION, ANSWER])
    assert whole.endswith("cd<|end|>\n<|start|>user:ab<|end|>\n<|start|>assistant:cd<|end|>\n")
    assert re.findall(r"[^.]+", supervised) == ["cd<|end|>"] * 2


def test_turns_without_an_end_are_supervised_to_where_the_next_begins(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path / "model", CHAT_TEMPLATE.replace("<|end|>", "/"))
    _, supervised = supervised_text(tokenizer, [QUESTION, ANSWER, QUESTION, ANSWER])
    assert re.findall(r"[^.]+", supervised) == ["cd/"] * 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": [QUESTION]}, "no assistant message"),
        ({"messages": []}, "no assistant message"),
        ({"messages": [ANSWER]}, "the conversation has an assistant message before any other, expected answers that "),
        ({"messages": [ANSWER, QUESTION, ANSWER]}, "the conversation has an assistant message before any other"),
        ({"messages": [QUESTION, "cd", ANSWER]}, r"messages\[1\] must be an object"),
        ({"messages": [{"role": "robot", "content": "x"}, ANSWER]}, r"messages\[0\].role is 'robot'"),
        ({"messages": "ab"}, "key 'messages' is 'ab', expected list"),
        ({"text": "ab"}, "expected 'prompt_ids' and 'response_ids', or 'messages'"),
        ({"response_ids": [5, 6]}, "key 'prompt_ids' is missing"),
        ({"prompt_ids": [5], "response_ids": [5.5, 6]}, "key 'response_ids' is not a list of token ids"),
        ({"prompt_ids": [True], "response_ids": [5, 6]}, "key 'prompt_ids' is not a list of token ids"),
        (answer("b", [5], [6, VOCAB]), f"token {VOCAB} is outside the vocabulary of {VOCAB}"),
        (answer("b", [-1], [6, 7]), "token -1 is outside the vocabulary"),
        (answer("a", [5], [6, 7]), "id 'a' came before, expected each once"),
        ({"id": 3, "messages": [QUESTION, ANSWER]}, "key 'id' is 3, expected str"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(line: dict[str, Any], message: str, load: Load) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load(answer("a", [2], [3, 4]), line)
    assert "data.jsonl line 2" in str(caught.value)


def test_too_short_sequences_are_counted_and_left_out(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    lines = [answer("a", [2], [3]), answer("b", [2], [3, 4]), answer("c", [2] * 9, [3, 4]), answer("d", [2], [])]
    with caplog.at_level(logging.WARNING):
        assert [example.id for example in load(*lines, max_length=10)] == ["b"]
    assert caplog.messages == ["3 sequences left out: fewer than 2 supervised tokens within 10"]


def test_nothing_left_is_an_error_that_names_the_files(load: Load) -> None:
    with pytest.raises(CheckpointError, match=r"data\.jsonl: no usable sequence"):
        load(answer("a", [2], [3]))
    with pytest.raises(CheckpointError, match=r"data\.jsonl: no usable sequence"):
        load()


def test_long_sequences_are_cut(load: Load) -> None:
    (example,) = load(answer("a", [2, 3], [4] * 20), max_length=5)
    assert example == Example("a", "math", "2,3", [2, 3, 4, 4, 4], [False, False, True, True, True])


def test_files_keep_their_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    paths = [tmp_path / "b.jsonl", tmp_path / "a.jsonl"]
    for path in paths:
        path.write_text("".join(json.dumps(answer(f"{path.stem}{k}", [2], [3, 4])) + "\n" for k in range(2)))
    found = load_examples(paths, tokenizer, vocab_size=VOCAB, max_length=64, min_supervised=2)
    assert [example.id for example in found] == ["b0", "b1", "a0", "a1"]


def test_lines_without_ids_get_different_ones(load: Load) -> None:
    examples = load({"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION, ANSWER]})
    assert [example.id.rpartition("/")[2] for example in examples] == ["data.jsonl line 1", "data.jsonl line 2"]
    assert [example.prompt for example in examples] == [example.id for example in examples]
    assert {example.domain for example in examples} == {"all"}


def test_lines_without_ids_of_two_files_of_one_name_get_different_ones(tmp_path: Path, tokenizer: Tokenizer) -> None:
    paths = [tmp_path / name / "data.jsonl" for name in ("math", "code")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(json.dumps({"messages": [QUESTION, ANSWER]}) + "\n")
    found = load_examples(paths, tokenizer, vocab_size=VOCAB, max_length=64, min_supervised=2)
    assert [example.id for example in found] == [f"{path} line 1" for path in paths]


def test_all_answers_to_one_prompt_are_on_one_side() -> None:
    examples = [Example(f"{k}-{n}", "a", f"p{n}", [], []) for n in range(200) for k in range(3)]
    training, validation = split_holdout(examples, 0.2, seed=0)
    assert sorted(training + validation) == list(range(600))
    sides = [{examples[i].prompt for i in side} for side in (training, validation)]
    assert not sides[0] & sides[1]
    # 200 draws with a chance of 0.2: 40 expected, three standard deviations of 5.7.
    assert 23 <= len(sides[1]) <= 57


def test_the_side_of_a_prompt_depends_on_its_name_and_the_seed_alone() -> None:
    """More data, or data in another order, moves nothing from training to validation."""
    examples = [Example(f"{n}-0", "a", str(n), [], []) for n in range(100)]
    held = {examples[i].id for i in split_holdout(examples, 0.3, seed=0)[1]}
    mixed = Random(0).sample(examples, 60)
    assert {mixed[i].id for i in split_holdout(mixed, 0.3, seed=0)[1]} == held & {e.id for e in mixed}
    assert {examples[i].id for i in split_holdout(examples, 0.3, seed=1)[1]} != held
    assert split_holdout(examples, 0.0, seed=0) == (list(range(100)), [])
