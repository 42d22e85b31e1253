"""Golden values of the published reference implementation, and the checker that reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.golden import compare
from tests.reference import main
from tests.tiny import edit_json, edit_weights

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
FOLDERS = sorted(path.name for path in GOLDEN.iterdir())
QUANTITIES = (
    "training draft_logits",
    "training confidence_logits",
    "eval_mask",
    "target_ids",
    "aligned_target_logits",
    "loss ce",
    "loss tv",
    "loss conf",
    "loss weight_sum",
    "loss total",
    "grad_norms names",
    "grad_norms",
    "target_logits",
    "target_features",
    "target_last_hidden",
    "serving draft_logits",
    "serving confidence_logits",
    "rollout verify_input_ids",
    "rollout accepted",
    "rollout next_token",
    "rollout confidence_logits",
    "rollout output_ids",
    "greedy_autoregressive_ids",
)


QUANTITIES_OF_LOSSES = tuple(name for name in QUANTITIES if name.startswith("loss "))


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(GOLDEN / "qwen3-rnn", tmp_path / "golden"))


def verdicts(output: str) -> dict[str, str]:
    """Quantity to ok or MISMATCH."""
    lines = [line.split(maxsplit=1) for line in output.splitlines() if line.startswith("  ")]
    return {rest[:32].strip(): verdict for verdict, rest in lines}


@pytest.mark.parametrize("name", FOLDERS)
def test_golden_folders_agree(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(GOLDEN / name)]) == 0
    found = verdicts(capsys.readouterr().out)
    assert set(QUANTITIES) <= found.keys()
    assert set(found.values()) == {"ok"}


def test_all_heads_are_covered() -> None:
    heads = {json.loads((GOLDEN / name / "expected.json").read_text())["head"] for name in FOLDERS}
    assert heads == {"vanilla", "gated", "rnn", "none"}


def change_train(name: str, change: Callable[[Tensor], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "train.safetensors")
        change(tensors[name])
        save_file(tensors, folder / "train.safetensors")

    return apply


def change_expected(part: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "expected.json"
        content = json.loads(path.read_text())
        change(content[part])
        path.write_text(json.dumps(content))

    return apply


def change_each_loss(losses: dict[str, Any]) -> None:
    """By twice the tolerance, another quantity in another weighting: none of them is skipped."""
    changes = {"paper": "ce", "deepspec": "tv", "ce_only": "conf", "no_decay": "weight_sum", "conf_only": "total"}
    for weighting, quantity in changes.items():
        losses[weighting][quantity] *= 1 + 2e-5


def change_weight(model: str, name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / model / "model.safetensors"
        edit_weights(path, **{name: load_file(path)[name] * 1.01})

    return apply


def put(index: tuple[int, ...], by: float) -> Callable[[Tensor], None]:
    """Move one value; a boolean is flipped."""

    def change(tensor: Tensor) -> None:
        tensor[index] = ~tensor[index] if tensor.dtype == torch.bool else tensor[index] + by

    return change


DAMAGE: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "draft_logits": (
        change_train("draft_logits", put((0, 1, 2, 3), 0.01)),
        ("training draft_logits", "serving draft_logits"),
    ),
    "a draft logit that is NaN": (
        change_train("draft_logits", put((0, 1, 2, 3), torch.nan)),
        ("training draft_logits", "serving draft_logits"),
    ),
    "confidence_logits": (
        change_train("confidence_logits", put((1, 0, 4), -0.01)),
        ("training confidence_logits", "serving confidence_logits"),
    ),
    "eval_mask": (change_train("eval_mask", put((0, 0, 4), 1)), ("eval_mask",)),
    "target_ids": (change_train("target_ids", put((0, 0, 1), 1)), ("target_ids",)),
    "aligned_target_logits": (
        change_train("aligned_target_logits", put((0, 0, 1, 5), 0.01)),
        ("aligned_target_logits",),
    ),
    "target_logits": (change_train("target_logits", put((1, 28, 82), 0.01)), ("target_logits",)),
    "target_last_hidden": (
        change_train("target_last_hidden", put((1, 3, 0), 0.1)),
        ("target_last_hidden", "aligned_target_logits", "loss tv", "loss conf", "loss total", "grad_norms"),
    ),
    "losses": (change_expected("losses", change_each_loss), QUANTITIES_OF_LOSSES),
    "a loss that is half the L1 distance": (
        change_expected("losses", lambda losses: losses["paper"].update(alpha_tv=0.45)),
        ("loss total", "grad_norms"),
    ),
    "loss decay": (
        change_expected("losses", lambda losses: losses["paper"].update(decay=4.0)),
        (*QUANTITIES_OF_LOSSES, "grad_norms"),
    ),
    "a gradient norm": (
        change_expected("grad_norms", lambda norms: norms.update({"fc.weight": norms["fc.weight"] * (1 + 2e-5)})),
        ("grad_norms",),
    ),
    "an embedding that is trained": (
        change_expected("grad_norms", lambda norms: norms.update({"embed_tokens.weight": 0.0})),
        ("grad_norms names",),
    ),
    "next_token": (
        change_expected("rollout", lambda r: r["rounds"][1].update(next_token=r["rounds"][1]["next_token"] ^ 1)),
        ("rollout next_token",),
    ),
    "accepted": (change_expected("rollout", lambda r: r["rounds"][0].update(accepted=3)), ("rollout accepted",)),
    "a round missing": (change_expected("rollout", lambda r: r["rounds"].pop()), ("rollout output_ids",)),
    "output": (change_expected("rollout", lambda r: r["output_ids"].append(1)), ("rollout output_ids",)),
    "plain output": (
        change_expected("rollout", lambda r: r["greedy_autoregressive_ids"].reverse()),
        ("greedy_autoregressive_ids",),
    ),
    "a draft weight": (
        change_weight("draft", "markov_head.joint_proj.weight"),
        ("training draft_logits", "loss ce", "loss tv", "loss conf", "grad_norms", "serving draft_logits"),
    ),
    "a target weight": (
        change_weight("target", "model.layers.2.mlp.up_proj.weight"),
        ("target_logits", "target_features", "target_last_hidden"),
    ),
    "block size": (lambda folder: edit_json(folder / "expected.json", block_size=4), ("block_size",)),
    "layers": (lambda folder: edit_json(folder / "expected.json", target_layer_ids=[0, 2, 3]), ("target_features",)),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found(what: str, golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Negative controls: each quantity can fail, and the status says so."""
    damage, quantities = DAMAGE[what]
    damage(golden)
    assert main([str(golden)]) == 1
    found = verdicts(capsys.readouterr().out)
    assert [found[name] for name in quantities] == ["MISMATCH"] * len(quantities)


def test_values_at_dummy_anchors_mean_nothing(golden: Path) -> None:
    """One window more in each row, all of it nonsense: the losses, too, are those without it."""
    tensors = load_file(golden / "train.safetensors")
    dummy: dict[str, Any] = {"block_keep_mask": False, "eval_mask": True, "anchor_positions": -1, "target_ids": -100}
    dummy |= dict.fromkeys(("draft_logits", "confidence_logits", "aligned_target_logits"), torch.nan)
    for name, value in dummy.items():
        tensors[name] = torch.cat((torch.full_like(tensors[name][:, :1], value), tensors[name]), 1)
    save_file(tensors, golden / "train.safetensors")
    assert main([str(golden)]) == 0


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "train.safetensors").unlink(), "missing train.safetensors"),
        (lambda folder: (folder / "draft" / "config.json").unlink(), "missing draft/config.json"),
        (lambda folder: (folder / "target" / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: edit_json(folder / "expected.json", family="gemma4"), "family is 'gemma4', expected 'qwen3'"),
        (lambda folder: edit_json(folder / "expected.json", family=None), "family is None, expected 'qwen3'"),
        (lambda folder: edit_json(folder / "expected.json", head="gated"), "head is 'gated'"),
        (lambda folder: (folder / "expected.json").write_text("{"), "JSONDecodeError"),
        (lambda folder: (folder / "train.safetensors").write_bytes(b"abcd"), "SafetensorError"),
    ],
)
def test_folders_of_another_form_are_reported(
    damage: Callable[[Path], None], said: str, golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(golden)
    assert main([str(golden)]) == 1
    output = capsys.readouterr().out
    assert said in output
    assert str(golden) in output


def test_folders_after_a_bad_one_are_still_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = str(tmp_path / "absent")
    assert main([absent, str(GOLDEN / FOLDERS[0])]) == 1
    output = capsys.readouterr().out
    assert f"MISMATCH {absent} cannot be checked" in output
    assert verdicts(output)["rollout output_ids"] == "ok"


def test_other_shapes_and_nothing_to_compare_are_mismatches() -> None:
    assert not compare("x", torch.zeros(3), torch.zeros(4)).ok
    assert not compare("x", torch.zeros(1, 3), torch.zeros(3)).ok
    assert not compare("x", torch.zeros(0), torch.zeros(0)).ok
    assert not compare("x", torch.zeros(1), torch.full((1,), torch.nan)).ok
    assert compare("x", [1, 2], torch.tensor([1, 2]), 0.0).ok
    assert not compare("x", [1, 2], [1, 3], 0.0).ok
