"""What the trainer learns, logs, writes and refuses, on tiny models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspark_core.checkpoint.load import load_draft, load_target
from dspark_core.errors import CheckpointError
from dspark_core.train import trainer
from dspark_core.train.folder import TrainingError
from dspark_core.train.optimiser import learning_rate
from dspark_core.train.ranks import Ranks
from dspark_core.train.setup import prepare_run
from dspark_core.train.trainer import fit
from tests.core.train.runs import MASK_ID, log_lines, settings, write_answers
from tests.tiny import edit_weights

LOSSES = {"loss", "ce", "tv", "confidence_loss"}


def losses(folder: Path, kind: str = "train") -> list[float]:
    return [line["loss"] for line in log_lines(folder) if line["kind"] == kind]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"markov_head_type": "gated"},
        {"markov_head_type": "rnn", "anchor_stride": 2},
        {"markov_rank": 0, "enable_confidence_head": False},
        {"confidence_head_with_markov": False, "row_tokens": 64},
        {"init_layers": "target", "accumulation": 2, "batch_size": 1},
        {"precision": "bfloat16", "loss_vocab": 220, "loss_vocab_share": 0.5},
    ],
)
def test_the_loss_falls_and_the_draft_loads(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = fit(settings(tmp_path, max_steps=30, **changes))
    curve = losses(folder)
    assert sum(curve[-5:]) < 0.95 * sum(curve[:5])  # answers are random tokens: there is little to learn
    draft = load_draft(folder, load_target(tmp_path / "target"))
    assert draft.config.head_name == ("none" if changes.get("markov_rank") == 0 else draft.config.markov_head_type)
    assert draft.config.mask_token_id == MASK_ID


def test_the_log_has_every_term_and_the_quality_by_position(tmp_path: Path) -> None:
    folder = fit(settings(tmp_path))
    lines = log_lines(folder)
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 13))
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [6, 12]
    for line in lines:
        assert line.keys() >= LOSSES | {"confidence_bias", "expected_acceptance_length"}
        assert line["loss"] == pytest.approx(0.1 * line["ce"] + 0.9 * line["tv"] + line["confidence_loss"])
        assert len(line["acceptance_by_position"]) == 4
        assert 1 <= line["expected_acceptance_length"] <= 5
    assert any((folder / "tensorboard").iterdir())


def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = fit(settings(tmp_path, max_steps=4))
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    expected = [line["loss"] for line in log_lines(folder) if line["kind"] == "train"]
    assert [event.value for event in board.Scalars("train/loss")] == pytest.approx(expected)
    assert "train/acceptance_by_position/3" in board.Tags()["scalars"]


def test_only_the_draft_learns(tmp_path: Path) -> None:
    """Embedding and LM head are the target's, bit for bit, and everything else has moved."""
    config = settings(tmp_path, save_dtype="float32")
    first = {name: p.detach().clone() for name, p in prepare_run(config, alone()).objective.draft.named_parameters()}
    stored = load_file(fit(config) / "model.safetensors")
    target = load_file(tmp_path / "target" / "model.safetensors")
    assert torch.equal(stored["embed_tokens.weight"], target["model.embed_tokens.weight"])
    assert torch.equal(stored["lm_head.weight"], target["lm_head.weight"])
    still = [n for n in first if not n.startswith(("embed", "lm_head")) and torch.equal(first[n], stored[n])]
    assert still == []


def alone() -> Ranks:
    return Ranks(0, 1, torch.device("cpu"))


def test_the_feature_scale_is_folded_into_fc(tmp_path: Path) -> None:
    """The written draft reads raw features and computes what the trained one computed on scaled ones."""
    config = settings(tmp_path, max_steps=2, save_dtype="float32", lr=1e-9)
    run = prepare_run(config, alone())
    stored = load_draft(fit(config), load_target(tmp_path / "target"))
    features = 5 * torch.randn(3, run.scale.numel())
    with torch.no_grad():
        expected = run.objective.draft.inject(features / run.scale)
        assert torch.allclose(stored.inject(features), expected, atol=1e-4)  # float32, and two steps of 1e-9
    assert run.scale.std() > 0


def test_starting_from_a_draft_continues_it(tmp_path: Path) -> None:
    first = fit(settings(tmp_path, "first", save_dtype="float32", max_steps=30))
    config = settings(tmp_path, "second", init=str(first), max_steps=2, lr=1e-9, save_dtype="float32")
    a, b = load_file(first / "model.safetensors"), load_file(fit(config) / "model.safetensors")
    assert all(torch.allclose(a[name], b[name], atol=1e-6) for name in a)
    assert losses(tmp_path / "second")[0] < losses(first)[0]


def test_embeddings_may_be_left_out(tmp_path: Path) -> None:
    folder = fit(settings(tmp_path, save_embeddings=False))
    assert not load_file(folder / "model.safetensors").keys() & {"embed_tokens.weight", "lm_head.weight"}
    load_draft(folder, load_target(tmp_path / "target"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_with_the_batch_saved(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path)
    original, calls = trainer._batch, 0

    def poisoned(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        batch = original(*arguments)
        if calls >= 6:
            batch.last_hidden[:] = value
        return batch

    monkeypatch.setattr(trainer, "_batch", poisoned)
    with pytest.raises(TrainingError, match="step 6: the loss is nan"):
        fit(config)
    saved = torch.load(Path(config.output) / "non-finite-step-6-rank-0.pt", weights_only=True)
    assert saved["names"]
    assert not saved["last_hidden"].isfinite().any()
    assert [line["step"] for line in log_lines(Path(config.output))][-1] == 5


def test_a_step_without_supervised_tokens_changes_no_weight(tmp_path: Path) -> None:
    """Case W2, with every window masked: gradients are zero, not NaN."""
    run = prepare_run(settings(tmp_path), alone())
    before = [p.detach().clone() for p in run.objective.draft.parameters()]
    run.source.examples[:] = [  # type: ignore[index]
        replace(example, supervised=[False] * len(example.token_ids)) for example in run.source.examples
    ]
    tally, norm = trainer._step(run, 0, tmp_path)
    assert norm == 0
    assert float(tally.slots[:, 0].sum()) == 0
    assert all(torch.equal(a, b) for a, b in zip(before, run.objective.draft.parameters(), strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": 259}, "mask_token_id is 259, expected an id of the target, 0 to 258"),
        ({"mask_token_id": 50}, r"mask_token_id 50 occurs in the data \(p\d+-0\)"),
        ({"target_layer_ids": (0, 3)}, r"target_layer_ids is \[0, 3\], expected different layer outputs from -1 to 2"),
        ({"holdout": 0.999999}, "leaves no sequence of 12 to train on"),
        ({"data": ("nowhere.jsonl",)}, r"nowhere\.jsonl cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        fit(settings(tmp_path, **changes))


def test_data_without_a_window_is_refused(tmp_path: Path) -> None:
    """Case W3: a run that would learn nothing does not report a loss of 0."""
    with pytest.raises(CheckpointError, match=r"none of 8 sequences has a window: .* at multiples of 500"):
        fit(settings(tmp_path, anchor_stride=500))


def test_an_initial_draft_with_another_head_is_refused(tmp_path: Path) -> None:
    first = fit(settings(tmp_path, "first", max_steps=1, save_dtype="float32"))
    head = load_file(first / "model.safetensors")["lm_head.weight"]
    edit_weights(first / "model.safetensors", **{"lm_head.weight": head * 1.1})
    with pytest.raises(CheckpointError, match="its embedding or LM head is not the target's"):
        fit(settings(tmp_path, "second", init=str(first)))


def test_an_initial_draft_of_another_shape_is_refused(tmp_path: Path) -> None:
    first = fit(settings(tmp_path, "first", max_steps=1))
    with pytest.raises(CheckpointError, match="markov_rank is 6, the settings say 8"):
        fit(settings(tmp_path, "second", init=str(first), markov_rank=8))


def test_the_mask_token_defaults_to_the_first_id_past_the_tokenizer(tmp_path: Path) -> None:
    folder = fit(settings(tmp_path, mask_token_id=None, max_steps=1))
    assert json.loads((folder / "config.json").read_text())["mask_token_id"] == MASK_ID


def test_the_rate_rises_then_falls_along_a_cosine(tmp_path: Path) -> None:
    config = settings(tmp_path, lr=1.0, warmup_ratio=0.1, min_lr_ratio=0.1)
    rates = [learning_rate(step, 101, config) for step in range(101)]
    assert rates[:11] == pytest.approx([(k + 1) / 11 for k in range(11)])
    assert rates[11] == 1.0
    assert rates[56] == pytest.approx(0.55, abs=0.01)  # half way down
    assert rates[100] == pytest.approx(0.1)


def test_epochs_make_the_number_of_steps(tmp_path: Path) -> None:
    write_answers(tmp_path / "answers.jsonl", count=20)
    config = settings(tmp_path, max_steps=None, epochs=3, batch_size=2, accumulation=2, holdout=0.0)
    assert prepare_run(config, alone()).num_steps == 15


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_training_on_cuda(compiled: bool, tmp_path: Path) -> None:
    """bfloat16 by default there; the loss falls as on a CPU, the draft is written, and the run resumes."""
    config = settings(tmp_path, "cuda", device="cuda", compile=compiled, max_steps=30, save_every=15)
    folder = fit(config)
    cpu = fit(settings(tmp_path, "cpu", max_steps=30, save_every=15))
    assert losses(folder)[-1] == pytest.approx(losses(cpu)[-1], rel=0.1)  # bfloat16 takes another path
    (folder / "state" / "step-00000030.pt").unlink()
    fit(config)
    load_draft(folder, load_target(tmp_path / "target"))
