"""lm-eval's own client of completions, on a task in a local file: what it adds up must be the model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from server.engine import Engine
from tests.server.engines import target_logits
from tests.server.openai.conftest import MODEL
from tests.tiny import tiny_target_folder

QUESTIONS = [
    {"question": "2 + 2 =", "choices": [" 4", " five"], "answer": 0},
    {"question": "The sky is", "choices": [" blue", " a fish", " 7"], "answer": 0},
    {"question": "Once upon", "choices": [" a time", " the"], "answer": 1},
]


def log_likelihood(engine: Engine, context: str, continuation: str) -> float:
    """Of a continuation, from one plain pass over everything."""
    size, ids = len(engine.tokenizer.encode(context)), engine.tokenizer.encode(context + continuation)
    scores = target_logits(ids).log_softmax(-1)[size - 1 : -1]
    return float(scores.gather(-1, torch.tensor(ids[size:]).unsqueeze(-1)).sum())


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("task")
    (folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


@pytest.mark.filterwarnings("default")  # theirs, not ours
@pytest.mark.parametrize("batch_size", [1, 4])
def test_local_completions_finds_the_models_log_likelihoods(
    url: str, engine: Engine, task: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    model = {
        "model": MODEL,
        "base_url": f"{url}/v1/completions",
        "tokenizer": str(tiny_target_folder(tmp_path)),
        "tokenizer_backend": "huggingface",
        "max_length": engine.max_model_len,
        "num_concurrent": 1,
    }
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=model,
        tasks=[task],
        batch_size=batch_size,
        log_samples=True,
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    assert results is not None
    best = []
    for sample in results["samples"]["sums"]:
        question = QUESTIONS[sample["doc_id"]]
        expected = [log_likelihood(engine, str(question["question"]), choice) for choice in question["choices"]]
        found = [float(response[0][0]) for response in sample["resps"]]
        assert found == pytest.approx(expected, abs=1e-3)
        assert {str(response[0][1]) for response in sample["resps"]} == {"False"}  # a random model guesses none of them
        best.append(int(expected.index(max(expected)) == question["answer"]))
    assert results["results"]["sums"]["acc,none"] == pytest.approx(sum(best) / len(best))
