"""The demo, trained a little: every command of `dspark-train` as a newcomer types it, on the real target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.train.cli import main

pytestmark = pytest.mark.demo
PROMPTS = [
    {"domain": "chat", "prompt": "Name a colour."},
    {"domain": "math", "prompt": "What is 3 plus 4?"},
]


def test_from_prompts_to_a_measured_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, answers, features, draft, figures = (
        str(tmp_path / name) for name in ("prompts.jsonl", "answers.jsonl", "features", "draft", "figures.json")
    )
    Path(prompts).write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    demo = ("--preset", "demo")
    assert main(["generate", *demo, "--prompts", prompts, "--output", answers, "--max-tokens", "16"]) == 0
    assert main(["features", *demo, "--data", answers, "--output", features]) == 0
    fit = ["fit", *demo, "--features", features, "--output", draft, "--max-steps", "2", "--precision", "float32"]
    assert main([*fit, "--holdout", "0"]) == 0
    measure = [
        "eval",
        "--ckpt",
        draft,
        "--target",
        "demo",
        "--prompts",
        prompts,
        "--max-tokens",
        "8",
        "--json",
        figures,
    ]
    assert main(measure) == 0
    assert "mean of domains" in capsys.readouterr().out
    found = json.loads(Path(figures).read_text())
    assert found.keys() == {"chat", "math"}
    assert all(row["tokens"] >= 2 and row["acceptance_length"] >= 1 for row in found.values())
