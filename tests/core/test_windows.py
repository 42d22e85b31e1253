"""Training windows: where they are placed, alignment with x[i] = i, supervision at the sequence's and the mask's ends,
and who sees whom, also with several sequences in a row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dspark_core.checkpoint.load import load_draft, load_target
from dspark_core.draft.backbone import DraftModel
from dspark_core.draft.packed_forward import DraftOutput, forward_windows
from dspark_core.losses import LossWeights, chunked_loss
from dspark_core.windows import Windows, make_windows, random_anchors, stride_anchors
from tests.reference_training import loss_inputs, supervised_weights
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


def run(
    draft: DraftModel, features: Tensor, anchors: list[list[int]], ids: Tensor, **given: Tensor
) -> tuple[Windows, DraftOutput]:
    places = torch.tensor(anchors)
    given = {"loss_mask": torch.ones(ids.shape), "keep": torch.ones_like(places).bool(), **given}
    windows = make_windows(ids, anchors=places, draft_len=K, **given)
    return windows, forward_windows(draft, features, windows, ids.gather(1, places), given.get("sequence_starts"))


def test_a_window_sees_features_before_its_anchor_and_its_own_block(draft: DraftModel) -> None:
    ids = torch.randint(2, 250, (2, LENGTH))
    features, anchors = torch.randn(2, LENGTH, 64), [[5, 11, 20], [9, 10, 30]]
    whole = run(draft, features, anchors, ids)[1].hidden
    for position in range(0, LENGTH, 3):
        changed = features.clone()
        changed[0, position] += 1
        moved = (run(draft, changed, anchors, ids)[1].hidden - whole).abs().amax(-1) > 1e-6
        expected = torch.tensor([[[position < p] * K for p in anchors[0]], [[False] * K] * 3])
        assert torch.equal(moved, expected), f"features of position {position} of sequence 0"
    alone = run(draft, features[1:], [[10]], ids[1:])[1].hidden
    # Other sizes of one softmax: other orders of float32 sums.
    assert torch.allclose(alone[0, 0], whole[1, 1], atol=1e-5), "other windows and sequences do not matter"


def test_stride_anchors_of_a_long_sequence() -> None:
    mask = torch.ones(512)
    anchors = stride_anchors(mask, 4, 16)
    assert anchors.tolist() == list(range(0, 481, 16)), "31 of them"
    ids, keep = torch.arange(512).unsqueeze(0), torch.ones(1, 31).bool()
    assert make_windows(ids, mask.unsqueeze(0), anchors.unsqueeze(0), keep, 4).eval_mask.sum() == 124


def test_stride_anchors_leave_out_what_is_masked_or_too_short() -> None:
    mask = torch.ones(LENGTH)
    mask[:9] = 0
    mask[17] = 0  # the first label of anchor 16
    assert stride_anchors(mask, K, 8).tolist() == [24]  # i < (40 - 5) // 8, so that 32 is none of them
    for length, count in ((0, 0), (1, 0), (K + 8, 0), (K + 9, 1), (K + 16, 1), (K + 17, 2)):
        assert stride_anchors(torch.ones(length), K, 8).tolist() == [0, 8][:count], f"{length} tokens"


def draw(mask: Tensor, count: int, seed: int) -> list[int]:
    return random_anchors(mask, count, torch.Generator().manual_seed(seed)).tolist()


def test_random_anchors_are_seeded_distinct_and_ascending() -> None:
    mask = torch.ones(LENGTH)
    anchors = draw(mask, 8, 1)
    assert anchors == draw(mask, 8, 1)
    assert anchors != draw(mask, 8, 2)
    assert len(anchors) == 8
    assert anchors == sorted(set(anchors))


def test_random_anchors_need_the_mask_at_the_anchor_and_its_first_label() -> None:
    mask = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1]).float()
    assert draw(mask, 99, 0) == [0, 6, 7], "all there are, and never the last token, which has no label"
    assert draw(torch.zeros(9), 4, 0) == draw(torch.ones(1), 4, 0) == draw(torch.ones(0), 4, 0) == []


def test_random_anchors_are_uniform_over_the_candidates() -> None:
    mask, draws = torch.ones(21), 400
    counts = torch.zeros(20)
    for seed in range(draws):
        counts[draw(mask, 5, seed)] += 1
    # Each is in a draw with chance 5 / 20; 4.5 standard deviations of such a count, for 20 of them.
    assert (counts - draws * 0.25).abs().max() < 4.5 * (draws * 0.25 * 0.75) ** 0.5


# Three sequences in one row: where they lie, and anchors from the start of each. Some windows reach past its end.
PARTS = (slice(0, 13), slice(13, 24), slice(24, LENGTH))
OWN = ([0, 5, 10], [2, 9, 10], [0, 8, 14])
STARTS = torch.tensor([[part.start for part in PARTS for _ in range(part.start, part.stop)]])
ROW = [[part.start + p for part, own in zip(PARTS, OWN, strict=True) for p in own]]


def outputs(output: DraftOutput, mask: Tensor) -> Tensor:
    """Everything that the draft says of the slots in `mask`, side by side."""
    assert output.latent is not None
    assert output.confidence_logits is not None
    return torch.cat((output.hidden, output.latent, output.confidence_logits.unsqueeze(-1)), -1)[mask]


def test_a_packed_row_equals_its_sequences_alone(draft: DraftModel) -> None:
    ids, features = torch.randint(2, 250, (1, LENGTH)), torch.randn(1, LENGTH, 64)
    windows, output = run(draft, features, ROW, ids, sequence_starts=STARTS)
    for number, (part, anchors) in enumerate(zip(PARTS, OWN, strict=True)):
        alone, expected = run(draft, features[:, part], [anchors], ids[:, part])
        mask, own = torch.zeros_like(windows.eval_mask), slice(3 * number, 3 * number + 3)
        mask[:, own] = alone.eval_mask
        assert not alone.eval_mask.all(), "labels end where the sequence does"
        assert torch.equal(windows.eval_mask[:, own], alone.eval_mask)
        for name, offset in (("positions", 0), ("previous_ids", 0), ("target_ids", 0), ("target_rows", part.start)):
            assert torch.equal(getattr(windows, name)[mask], getattr(alone, name)[alone.eval_mask] + offset), name
        # Other sizes of one softmax: other orders of float32 sums.
        assert torch.allclose(outputs(output, mask), outputs(expected, alone.eval_mask), atol=1e-5), f"part {number}"


def test_another_sequence_of_the_row_changes_nothing(draft: DraftModel) -> None:
    """Not one bit: a masked key has a weight of exactly 0. And no gradient goes there."""
    ids, features = torch.randint(2, 250, (1, LENGTH)), torch.randn(1, LENGTH, 64)
    windows, before = run(draft, features, ROW, ids, sequence_starts=STARTS)
    changed_ids, changed = ids.clone(), features.clone()
    changed_ids[:, PARTS[1]] = 251 - ids[:, PARTS[1]]
    changed[:, PARTS[1]] *= 100
    changed.requires_grad_()
    _, after = run(draft, changed, ROW, changed_ids, sequence_starts=STARTS)
    others = windows.eval_mask.clone()
    others[:, 3:6] = False
    assert torch.equal(outputs(after, others), outputs(before, others))
    moved = (after.hidden - before.hidden)[:, 3:6].abs().amax(-1)
    assert (moved > 1e-2).all(), "while the changed one's windows do move"
    (grad,) = torch.autograd.grad(outputs(after, others).square().sum(), changed)
    reached = (grad[0] != 0).any(-1).nonzero().squeeze(-1).tolist()
    assert reached == [*range(10), *range(24, 24 + 14)], "up to the last anchors of the first and the third"


def loss_and_gradients(draft: DraftModel, *windows_of: Any, **given: Tensor) -> list[Tensor]:
    """The paper's loss summed over slots, and its gradient for each parameter."""
    windows, output = run(draft, *windows_of, **given)
    assert outputs(output, torch.ones_like(windows.eval_mask)).isfinite().all(), "at dummies, too"
    target_hidden = torch.linspace(-2, 2, LENGTH * 32).view(1, LENGTH, 32).expand(len(windows.anchors), -1, -1)
    inputs = loss_inputs(draft, windows, output, target_hidden, supervised_weights(windows, 4.0))
    total, _ = chunked_loss(inputs, LossWeights())
    return [total, *torch.autograd.grad(total, [p for p in draft.parameters() if p.requires_grad])]


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_padding_and_dummy_windows_count_for_nothing(draft: DraftModel, backend: SDPBackend) -> None:
    """Cases W1 and W2: a short sequence beside a long one gives what each gives alone, and no label gives 0."""
    draft.requires_grad_(True).lm_head.requires_grad_(False)
    ids, features, mask = torch.randint(2, 250, (2, LENGTH)), torch.randn(2, LENGTH, 64), torch.ones(2, LENGTH)
    mask[1, 18:], features[1, 18:] = 0, 1e3
    anchors, keep = [[3, 20], [15, 0]], torch.tensor([[True, True], [True, False]])
    with sdpa_kernel(backend):
        together = loss_and_gradients(draft, features, anchors, ids, loss_mask=mask, keep=keep)
        long = loss_and_gradients(draft, features[:1], anchors[:1], ids[:1])
        short = loss_and_gradients(draft, features[1:, :18], [[15]], ids[1:, :18])
        nothing = loss_and_gradients(draft, features, anchors, ids, loss_mask=torch.zeros_like(mask), keep=keep)
    for found, *parts in zip(together, long, short, strict=True):
        # float32 sums in other orders, through two layers.
        assert (found - sum(parts)).norm() < 1e-5 * found.norm()
    assert not any(value.any() for value in nothing)
