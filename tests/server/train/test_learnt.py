"""From answers to a served draft: what training learns is what serving drafts, position for position (case W6)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_core.train.trainer import fit
from server.train.evaluate import evaluate
from server.train.generate import generate
from server.train.settings import EvalConfig, GenerateConfig
from tests.core.train.runs import settings
from tests.tiny import tiny_target_folder

TOKENS = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, one prompt, and its greedy answer."""
    folder = tmp_path_factory.mktemp("learnt")
    target = tiny_target_folder(folder)
    (folder / "prompts.jsonl").write_text('{"domain": "a", "prompt": "Say it again."}\n')
    generate(
        GenerateConfig(
            target=str(target),
            prompts=str(folder / "prompts.jsonl"),
            output=str(folder / "answers.jsonl"),
            temperatures=(0.0,),
            samples_per_prompt=1,
            max_tokens=TOKENS,
            max_prompt_tokens=100,
        )
    )
    return folder


def measured(folder: Path, draft: Path) -> dict[str, Any]:
    config = EvalConfig(
        ckpt=str(draft),
        target=str(folder / "target"),
        prompts=str(folder / "prompts.jsonl"),
        max_tokens=TOKENS,
        json=str(draft / "eval.json"),
    )
    found = evaluate(config)["a"]
    assert json.loads((draft / "eval.json").read_text())["a"] == found
    return found


def learn(folder: Path, name: str, **changes: Any) -> Path:
    values = {
        "anchor_stride": 1,
        "batch_size": 1,
        "holdout": 0.0,
        "save_every": 300,
        "log_every": 50,
        "max_length": 128,
        **changes,
    }
    return fit(settings(folder, name, max_steps=300, num_layers=2, **{"markov_rank": 16} | values))


@pytest.mark.parametrize("changes", [{}, {"markov_head_type": "rnn"}, {"markov_rank": 0}])
def test_a_learnt_answer_is_drafted_to_the_last_position(changes: dict[str, Any], folder: Path) -> None:
    head = "none" if changes.get("markov_rank") == 0 else changes.get("markov_head_type", "vanilla")
    found = measured(folder, learn(folder, head, **changes))
    assert found["acceptance_length"] > 4  # of 5: the last windows of an answer have no anchor in training
    assert all(share is not None and share > 0.8 for share in found["acceptance_by_position"])


def test_an_answer_that_was_not_learnt_is_not(folder: Path) -> None:
    """The control: the same draft after two steps."""
    found = measured(folder, fit(settings(folder, "fresh", max_steps=2, batch_size=1, holdout=0.0)))
    assert found["acceptance_length"] < 2
