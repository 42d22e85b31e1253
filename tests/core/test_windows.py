"""Training windows: alignment with x[i] = i, supervision at the sequence's and the mask's ends, and who sees whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark_core.checkpoint.load import load_draft, load_target
from dspark_core.draft.backbone import DraftModel
from dspark_core.draft.packed_forward import forward_windows
from dspark_core.windows import Windows, make_windows
from tests.tiny import tiny_draft_folder, tiny_target_folder

K, LENGTH = 4, 40


def windows_at(anchors: list[int], loss_mask: Tensor | None = None, keep: list[bool] | None = None) -> Windows:
    """Windows of the sequence x[i] = i."""
    mask = torch.ones(LENGTH) if loss_mask is None else loss_mask
    kept = torch.tensor([keep or [True] * len(anchors)])
    return make_windows(torch.arange(LENGTH).unsqueeze(0), mask.unsqueeze(0), torch.tensor([anchors]), kept, K)


@pytest.fixture
def draft(tmp_path: Path) -> DraftModel:
    target_folder = tiny_target_folder(tmp_path)
    return load_draft(tiny_draft_folder(tmp_path, target_folder, "rnn", K), load_target(target_folder))


def test_indices_are_those_of_the_notation() -> None:
    windows = windows_at([0, 7, 35])
    slots = torch.tensor([0, 7, 35]).unsqueeze(-1) + torch.arange(K)
    assert torch.equal(windows.positions[0], slots), "rotary position p + s"
    assert torch.equal(windows.previous_ids[0], slots), "previous token x[p + s]"
    assert torch.equal(windows.target_ids[0], slots + 1), "label x[p + s + 1]"
    assert torch.equal(windows.target_rows[0], slots), "target distribution of the label: row p + s"
    assert windows.eval_mask.all()


def test_labels_past_the_end_are_not_supervised() -> None:
    windows = windows_at([36, 37, 38, 39])
    assert windows.eval_mask[0].int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    for index in (windows.target_ids, windows.target_rows, windows.previous_ids):
        assert ((index >= 0) & (index < LENGTH)).all(), "what is not supervised must still be a valid index"


def test_slots_are_gated_by_the_mask_of_the_token_they_predict() -> None:
    """Case W4: an answer from 8 to 39 and an anchor before its end."""
    mask = torch.zeros(60)
    mask[8:40] = 1
    ids = torch.arange(60).unsqueeze(0)
    anchors, keep = torch.tensor([[37, 6, 7, 39]]), torch.ones(1, 4).bool()
    windows = make_windows(ids, mask.unsqueeze(0), anchors, keep, K)
    assert windows.eval_mask[0].int().tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]


def test_supervision_is_a_prefix_of_the_block() -> None:
    """Case W7: after the first masked label nothing of the block counts, though the mask comes on again."""
    mask = torch.tensor([0, 0, 1, 1, 0, 1, 1, 1, 1, 1] + [1] * 30).float()
    windows = windows_at([1, 2, 4, 5], mask)
    assert windows.eval_mask[0].int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]


def test_dummy_anchors_are_not_supervised() -> None:
    windows = windows_at([3, 5], keep=[True, False])
    assert windows.eval_mask[0].int().tolist() == [[1, 1, 1, 1], [0, 0, 0, 0]]


def test_training_hands_the_heads_what_notation_says(draft: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Any]] = {"embed": [], "confidence": [], "ids": []}
    assert draft.markov_head is not None
    assert draft.confidence_head is not None

    def spy(owner: Any, method: str, name: str, argument: int) -> None:
        original = getattr(owner, method)

        def call(*arguments: Any) -> Any:
            seen[name].append(arguments[argument])
            return original(*arguments)

        monkeypatch.setattr(owner, method, call)

    spy(draft.markov_head, "embed", "embed", 0)
    spy(draft.confidence_head, "forward", "confidence", 1)
    spy(draft, "backbone", "ids", 0)
    anchors = [0, 7, 30]
    windows = windows_at(anchors)
    with torch.no_grad():
        forward_windows(draft, torch.randn(1, LENGTH, 64), windows, torch.tensor([anchors]))
    slots = torch.tensor([anchors]).unsqueeze(-1) + torch.arange(K)
    assert torch.equal(seen["embed"][0], slots)
    assert torch.equal(seen["confidence"][0], draft.markov_head.markov_w1.weight[slots])
    mask_id = draft.config.mask_token_id
    assert seen["ids"][0].tolist() == [[i for p in anchors for i in (p, *[mask_id] * (K - 1))]]


def run(draft: DraftModel, features: Tensor, anchors: list[list[int]], ids: Tensor) -> Tensor:
    positions = torch.tensor(anchors)
    windows = make_windows(ids, torch.ones(ids.shape), positions, torch.ones_like(positions).bool(), K)
    with torch.no_grad():
        return forward_windows(draft, features, windows, ids.gather(1, positions)).hidden


def test_a_window_sees_features_before_its_anchor_and_its_own_block(draft: DraftModel) -> None:
    ids = torch.randint(2, 250, (2, LENGTH))
    features, anchors = torch.randn(2, LENGTH, 64), [[5, 11, 20], [9, 10, 30]]
    whole = run(draft, features, anchors, ids)
    for position in range(0, LENGTH, 3):
        changed = features.clone()
        changed[0, position] += 1
        moved = (run(draft, changed, anchors, ids) - whole).abs().amax(-1) > 1e-6
        expected = torch.tensor([[[position < p] * K for p in anchors[0]], [[False] * K] * 3])
        assert torch.equal(moved, expected), f"features of position {position} of sequence 0"
    alone = run(draft, features[1:], [[10]], ids[1:])
    # Other sizes of one softmax: other orders of float32 sums.
    assert torch.allclose(alone[0, 0], whole[1, 1], atol=1e-5), "other windows and sequences do not matter"
