"""Answers of the target: the same in any batch and after any interruption, and greedy ones are plain decoding."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dspark_core.checkpoint.files import locked
from dspark_core.checkpoint.load import load_target
from dspark_core.checkpoint.tokenizer import Tokenizer
from dspark_core.errors import CheckpointError
from dspark_core.train.data import load_examples
from server.engine import Engine
from server.train import cli
from server.train.generate import generate, make_samples
from server.train.settings import GenerateConfig
from tests.paged import greedy_ids
from tests.tiny import EOS_ID, tiny_target_folder

PROMPTS = [{"domain": "math" if n % 2 else "code", "prompt": f"question {n}" * (1 + n % 3)} for n in range(6)]
MAX_TOKENS = 16


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target_folder(tmp_path_factory.mktemp("generate"))


@pytest.fixture
def config(target: Path, tmp_path: Path) -> GenerateConfig:
    return GenerateConfig(
        target=str(target),
        prompts=str(write_prompts(tmp_path, PROMPTS)),
        output=str(tmp_path / "answers.jsonl"),
        max_tokens=MAX_TOKENS,
        max_prompt_tokens=100,
        max_num_seqs=4,
        kv_memory_fraction=0.01,
    )


def write_prompts(folder: Path, prompts: Sequence[dict[str, Any]], name: str = "prompts") -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return path


def changed(config: GenerateConfig, **changes: Any) -> GenerateConfig:
    return GenerateConfig(**config.model_dump() | changes)


def records(config: GenerateConfig) -> dict[str, dict[str, Any]]:
    """By id; every id must come once."""
    lines = [json.loads(line) for line in Path(config.output).read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["id"]: line for line in lines}


def answers(config: GenerateConfig) -> dict[str, dict[str, Any]]:
    generate(config)
    return records(config)


def test_every_prompt_is_answered_as_often_as_asked(config: GenerateConfig) -> None:
    assert generate(config) == 12
    found = records(config)
    assert Counter(record["domain"] for record in found.values()) == {"math": 6, "code": 6}
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt["prompt"]}]
        own = [record for record in found.values() if record["messages"] == messages]
        assert len(own) == 2
        assert len({record["id"].rpartition("-")[0] for record in own}) == 1, "answers to one prompt share its name"
    for record in found.values():
        size = len(record["response_ids"])
        assert record["finish_reason"] == ("stop" if record["response_ids"][-1] == EOS_ID else "length")
        assert 0 < size <= MAX_TOKENS
        assert size == MAX_TOKENS or record["finish_reason"] == "stop"


@pytest.mark.parametrize("max_num_seqs", [1, 64])
def test_answers_do_not_depend_on_how_many_are_made_at_once(
    max_num_seqs: int, config: GenerateConfig, tmp_path: Path
) -> None:
    other = changed(config, output=str(tmp_path / "o"), max_num_seqs=max_num_seqs, max_num_batched_tokens=33)
    assert answers(other) == answers(config)


def test_answers_depend_on_the_seed_and_not_on_the_place_of_the_prompt(config: GenerateConfig, tmp_path: Path) -> None:
    """A longer file of prompts changes no answer that is there already."""
    config = changed(config, temperatures=(1.0,))
    found = answers(config)
    mixed = write_prompts(tmp_path, [{"prompt": "another"}, *PROMPTS[::-1]], "mixed")
    more = answers(changed(config, prompts=str(mixed), output=str(tmp_path / "more")))
    assert len(more) == 14
    assert {name: more[name] for name in found} == found
    other = answers(changed(config, seed=1, output=str(tmp_path / "other")))
    assert all(other[name]["response_ids"] != record["response_ids"] for name, record in found.items())


def test_greedy_answers_are_plain_greedy_decoding(config: GenerateConfig, target: Path) -> None:
    model, tokenizer = load_target(target), Tokenizer.from_folder(target)
    model.prepare(max_positions=256, emit_vocab=tokenizer.vocab_size)
    found = answers(changed(config, temperatures=(0.0,), samples_per_prompt=1))
    for record in found.values():
        assert record["prompt_ids"] == tokenizer.encode_chat(record["messages"])
        expected = greedy_ids(model, record["prompt_ids"], MAX_TOKENS)
        end = expected.index(EOS_ID) + 1 if EOS_ID in expected else MAX_TOKENS
        assert record["response_ids"] == expected[:end]


def test_temperatures_take_turns(config: GenerateConfig) -> None:
    """Over the samples of a prompt, and over prompts where there are fewer samples than temperatures."""
    for count in (1, 2, 3, 4):
        samples = make_samples(changed(config, temperatures=(0.0, 0.5, 1.0), samples_per_prompt=count))
        assert set(Counter(sample.temperature for sample in samples).values()) == {2 * count}
    by_prompt: dict[str, set[float]] = {}
    for sample in make_samples(config):
        by_prompt.setdefault(sample.id.rpartition("-")[0], set()).add(sample.temperature)
    assert list(by_prompt.values()) == [{0.0, 1.0}] * len(PROMPTS)


def test_samples_come_in_an_order_mixed_by_the_seed(config: GenerateConfig) -> None:
    orders = [[sample.id for sample in make_samples(changed(config, seed=seed))] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def test_a_stopped_run_is_completed_to_the_same_answers(
    config: GenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, step, left = answers(changed(config, output=str(tmp_path / "straight"))), Engine.step, iter(range(25))

    def stopped(engine: Engine) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return step(engine)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", stopped)
        with pytest.raises(KeyboardInterrupt):
            generate(config)
    kept = records(config)
    assert 0 < len(kept) < 12
    assert generate(config) == 12 - len(kept)
    assert records(config) == straight


@pytest.mark.parametrize("torn", [1, 30])
def test_a_file_cut_in_the_middle_of_a_line_is_completed(torn: int, config: GenerateConfig) -> None:
    straight, path = answers(config), Path(config.output)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5]) + lines[5][:-torn])
    assert generate(config) == 7
    assert records(config) == straight
    assert path.read_bytes().startswith(b"".join(lines[:5])), "what was whole is not touched"


def test_a_second_run_writes_nothing(config: GenerateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    generate(config)
    before = Path(config.output).read_bytes()
    monkeypatch.setattr("server.train.generate.load_engine", None)  # nor does it load a model
    assert generate(config) == 0
    assert Path(config.output).read_bytes() == before


def test_other_settings_are_refused(config: GenerateConfig) -> None:
    generate(config)
    for change in ({"temperatures": (0.5,)}, {"seed": 1}, {"max_tokens": 9}, {"top_p": 0.5}, {"target": "other"}):
        with pytest.raises(CheckpointError, match=f"was begun with {next(iter(change))}"):
            generate(changed(config, **change))
    assert generate(changed(config, max_num_seqs=9, prompts=config.prompts)) == 0, "these do not matter"


def test_long_prompts_are_left_out_with_a_warning(config: GenerateConfig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert generate(changed(config, max_prompt_tokens=40)) == 8
    assert caplog.messages == ["4 answers left out: their prompts have more than 40 tokens (--max-prompt-tokens)"]


def test_repeated_prompts_are_answered_once(config: GenerateConfig, caplog: pytest.LogCaptureFixture) -> None:
    write_prompts(Path(config.prompts).parent, [*PROMPTS, PROMPTS[0]])
    assert len(make_samples(config)) == 12
    assert "2 samples of repeated prompts left out" in caplog.text


def test_answers_are_training_data(config: GenerateConfig, target: Path) -> None:
    found = answers(config)
    tokenizer = Tokenizer.from_folder(target)
    examples = load_examples([Path(config.output)], tokenizer, vocab_size=259, max_length=200, min_supervised=1)
    assert {example.id for example in examples} == found.keys()
    assert len({example.prompt for example in examples}) == len(PROMPTS), "answers to one prompt are held out together"
    for example in examples:
        response = [i for i, on in zip(example.token_ids, example.supervised, strict=True) if on]
        assert response == found[example.id]["response_ids"]


@pytest.mark.parametrize(
    "prompt",
    [
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": ["x"]},
        {"prompt": "half a pair: \ud800"},
        {"prompt": "x", "domain": "\ud800"},
    ],
)
def test_a_prompt_that_cannot_be_used_is_exit_code_1(
    prompt: dict[str, Any], config: GenerateConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """All prompts are looked at before the first answer: nobody waits for hours, and then for nothing."""
    write_prompts(Path(config.prompts).parent, [*PROMPTS, prompt])
    given = ["--prompts", config.prompts, "--output", config.output, "--target", config.target]
    assert cli.main(["generate", *given, "--max-prompt-tokens", "100", "--max-tokens", "4"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"dspark-train: error: {config.prompts}")
    assert not Path(config.output).exists() or Path(config.output).read_bytes() == b""


def test_a_prompt_outside_the_vocabulary_is_named(config: GenerateConfig, tmp_path: Path) -> None:
    """Of a tokenizer that knows more than the model has rows; so do some on the hub."""
    folder = tiny_target_folder(tmp_path, vocab_size=120, tokenizer_size=258)
    write_prompts(tmp_path, [{"prompt": "é"}])
    with pytest.raises(CheckpointError, match=r"prompts\.jsonl: a prompt cannot be used: .*vocabulary"):
        generate(changed(config, target=str(folder)))


def test_an_output_that_cannot_be_written_is_exit_code_1(
    config: GenerateConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that is a file; for `fit` as well."""
    for given in (["generate", "--prompts"], ["fit", "--data"]):
        assert cli.main([*given, config.prompts, "--output", f"{config.prompts}/o"]) == 1
        assert capsys.readouterr().err == f"dspark-train: error: {config.prompts}: File exists\n"


def test_two_processes_do_not_write_one_file(config: GenerateConfig) -> None:
    with (
        locked(Path(config.output)),
        pytest.raises(CheckpointError, match=r"answers\.jsonl is being written by another"),
    ):
        generate(config)
    assert generate(config) == 12
