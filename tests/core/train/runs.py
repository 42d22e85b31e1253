"""Tiny runs of the trainer: a random target, random answers, two layers, a handful of steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dspark_core.train.config import FitConfig
from dspark_core.train.log import FILE
from tests.tiny import tiny_target_folder

MASK_ID = 258  # the row of the tiny vocabulary that its tokenizer does not know
VOLATILE = {"tokens_per_s"}  # what a log says that depends on the clock


def write_answers(path: Path, count: int = 12, seed: int = 0, length: int = 24) -> Path:
    """Answers of random tokens; no two prompts alike."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        prompt = torch.randint(2, 200, (3 + number % 4,), generator=generator).tolist()
        response = torch.randint(2, 200, (length - number % 5,), generator=generator).tolist()
        rows.append({"id": f"p{number}-0", "domain": "a", "prompt_ids": prompt, "response_ids": response})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(folder: Path, name: str = "run", **changes: Any) -> FitConfig:
    """Settings of a run in `folder`, whose target and data are made on first use."""
    target, data = folder / "target", folder / "answers.jsonl"
    if not target.exists():
        tiny_target_folder(folder)
    if not data.exists():
        write_answers(data)
    values: dict[str, Any] = {
        "target": str(target),
        "data": (str(data),),
        "output": str(folder / name),
        "draft_len": 4,
        "num_layers": 1,
        "markov_rank": 6,
        "mask_token_id": MASK_ID,
        "num_anchors": 3,
        "max_length": 64,
        "lr": 1e-2,
        "max_steps": 12,
        "batch_size": 2,
        "holdout": 0.35,
        "log_every": 1,
        "eval_every": 6,
        "save_every": 4,
        **changes,
    }
    return FitConfig(**values)


def log_lines(folder: Path) -> list[dict[str, Any]]:
    """The log of a run without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in VOLATILE} for line in lines]
