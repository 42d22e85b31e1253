"""Tests of the training path that cannot be fooled: each would fail on the bug that it is named after.

The alignment gate with x[i] = i, Eq 6 by hand, the confidence head's width, total variation at its two ends and where
probabilities and logits disagree, and what the losses send no gradient to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_core.checkpoint.load import load_draft, load_target
from dspark_core.draft.backbone import DraftModel
from dspark_core.draft.packed_forward import forward_windows, teacher_forced_heads
from dspark_core.losses import LossInputs, LossWeights, SlotTerms, chunked_loss, slot_terms
from dspark_core.windows import Windows, make_windows
from tests.reference_training import loss_inputs
from tests.tiny import tiny_draft_folder, tiny_target_folder

K, LENGTH, WIDTH = 4, 40, 64
SURE = 128.0  # a logit that leaves nothing to the others: in float32 exp(-128) is 0
ANCHORS = torch.tensor([[0, 7, 30, 37]])


def draft_of(tmp_path: Path, head: str, **overrides: Any) -> DraftModel:
    target = tiny_target_folder(tmp_path, hidden_size=WIDTH)
    return load_draft(tiny_draft_folder(tmp_path, target, head, K, **overrides), load_target(target))


@pytest.fixture
def counting(tmp_path: Path) -> tuple[DraftModel, Tensor]:
    """A draft that says `previous token + 1` whatever its backbone says, and one-hot hidden states for its target."""
    draft = draft_of(tmp_path, "vanilla", markov_rank=WIDTH)
    names = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "lm_head.weight")
    w1, w2, _ = (draft.get_parameter(name).zero_() for name in names)
    w1[:WIDTH] = SURE * torch.eye(WIDTH)
    w2[1 : WIDTH + 1] = torch.eye(WIDTH)
    return draft, SURE * torch.eye(WIDTH)[:LENGTH].unsqueeze(0)


def losses_of(draft: DraftModel, target_hidden: Tensor, windows: Windows) -> tuple[LossInputs, SlotTerms]:
    """The training path over windows of x[i] = i; the target's hidden state at row i says i + 1."""
    output = forward_windows(draft, torch.randn(1, LENGTH, 2 * WIDTH), windows, ANCHORS)
    mask = windows.eval_mask
    inputs = loss_inputs(draft, windows, output, target_hidden, torch.full((int(mask.sum()),), 1 / int(mask.sum())))
    target_head = F.pad(torch.eye(WIDTH), (0, 0, 1, draft.config.decoder.vocab_size - WIDTH - 1))
    inputs = replace(inputs, target_head=target_head)
    return inputs, chunked_loss(inputs, LossWeights(), 5)[1]


def count_windows() -> Windows:
    ids = torch.arange(LENGTH).unsqueeze(0)
    return make_windows(ids, torch.ones(1, LENGTH), ANCHORS, torch.ones_like(ANCHORS).bool(), K)


def test_what_arrives_at_heads_and_losses(counting: tuple[DraftModel, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    draft, target_hidden = counting
    assert draft.markov_head is not None
    seen: list[Tensor] = []
    embed = draft.markov_head.embed
    monkeypatch.setattr(draft.markov_head, "embed", lambda ids: seen.append(ids) or embed(ids))
    inputs, parts = losses_of(draft, target_hidden, count_windows())
    slots = ANCHORS.unsqueeze(-1) + torch.arange(K)
    supervised = slots[slots + 1 < LENGTH]
    assert torch.equal(seen[0][slots + 1 < LENGTH], supervised), "previous token x[p + s]"
    assert inputs.latent is not None
    assert torch.equal(inputs.latent.argmax(-1), supervised), "which is the one that the bias is made from"
    assert torch.equal(inputs.target_ids, supervised + 1), "label x[p + s + 1]"
    assert torch.equal(inputs.target_hidden.argmax(-1), supervised), "target row p + s"
    # Both then say the label and nothing else.
    for found, value in ((parts.ce, 0), (parts.tv, 0), (parts.acceptance, 1), (parts.agreement, 1)):
        assert torch.equal(found, torch.full_like(found, value))


@pytest.mark.parametrize(
    ("name", "by", "ce", "acceptance"),
    [
        ("previous_ids", -1, SURE, 0),
        ("previous_ids", 1, SURE, 0),
        ("target_ids", -1, SURE, 1),
        ("target_ids", 1, SURE, 1),
        ("target_rows", -1, 0, 0),
        ("target_rows", 1, 0, 0),
    ],
)
def test_a_shift_by_one_is_loud(
    name: str, by: int, ce: float, acceptance: float, counting: tuple[DraftModel, Tensor]
) -> None:
    """Negative control of the gate: each of the three indices, shifted alone, spoils every slot."""
    windows = count_windows()
    rows = windows.target_rows + by
    inside = windows.eval_mask & (rows >= 0) & (rows < LENGTH)
    shifted = {name: (getattr(windows, name) + by).clamp_min(0)}
    _, parts = losses_of(*counting, replace(windows, eval_mask=inside, **shifted))
    assert len(parts.ce) >= 13
    assert torch.equal(parts.ce, torch.full_like(parts.ce, ce))
    assert torch.equal(parts.acceptance, torch.full_like(parts.acceptance, acceptance))


def rnn_by_hand(draft: DraftModel, hidden: np.ndarray, previous: list[int], order: tuple[int, ...], s0: float) -> Any:
    """Eq 6 of one block, slot by slot in float64. `order` says which third is gate, candidate and output."""
    weights = {n: p.double().numpy() for n, p in draft.named_parameters() if n.startswith("markov_head.")}
    joint, bias = weights["markov_head.joint_proj.weight"], weights["markov_head.joint_proj.bias"]
    rank = len(bias) // 3
    state, logits = [s0] * rank, []
    for h, token in zip(hidden, previous, strict=True):
        e = weights["markov_head.markov_w1.weight"][token]
        z = [*state, *e, *h]
        out = [sum(w * x for w, x in zip(row, z, strict=True)) + b for row, b in zip(joint, bias, strict=True)]
        gate, candidate, output = (out[third * rank : (third + 1) * rank] for third in order)
        keep = [1 / (1 + math.exp(-g)) for g in gate]
        state = [k * s + (1 - k) * math.tanh(c) for k, s, c in zip(keep, state, candidate, strict=True)]
        logits.append(weights["markov_head.markov_w2.weight"] @ np.tanh(output))
    return np.array(logits)


def test_rnn_head_is_equation_6_slot_by_slot(tmp_path: Path) -> None:
    draft = draft_of(tmp_path, "rnn")
    assert draft.markov_head is not None
    hidden, previous = torch.randn(2, 2, 3, WIDTH), torch.randint(0, 250, (2, 2, 3))
    latent = teacher_forced_heads(draft, hidden, previous).latent
    assert latent is not None
    found = draft.markov_head.bias(latent).double().numpy()
    blocks = list(np.ndindex(2, 2))

    def deviation(order: tuple[int, ...], s0: float = 0.0) -> float:
        by_hand = [rnn_by_hand(draft, hidden[i].double().numpy(), previous[i].tolist(), order, s0) for i in blocks]
        return max(float(np.abs(found[i] - expected).max()) for i, expected in zip(blocks, by_hand, strict=True))

    assert deviation((0, 1, 2)) < 1e-5  # float32 against float64: sums of 76 terms of size 1
    for order in list(permutations(range(3)))[1:]:
        assert deviation(order) > 0.1, "another split would be noticed"
    assert deviation((0, 1, 2), s0=0.1) > 0.01, "and another first state"


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_reads_hidden_and_embedding(
    with_markov: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D + r wide on the training path; what reaches the product is looked at, not what the head was given."""
    draft = draft_of(tmp_path, "gated", confidence_head_with_markov=with_markov)
    proj, seen, linear = draft.get_parameter("confidence_head.proj.weight"), list[Tensor](), F.linear

    def spy(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.shape == proj.shape:
            seen.append(x)
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", spy)
    windows = count_windows()
    output = forward_windows(draft, torch.randn(1, LENGTH, 2 * WIDTH), windows, ANCHORS)
    embedded = draft.get_parameter("markov_head.markov_w1.weight")[windows.previous_ids]
    expected = torch.cat((output.hidden, embedded), -1) if with_markov else output.hidden
    assert proj.shape[-1] == expected.shape[-1] == WIDTH + 6 * with_markov
    assert len(seen) == 1
    assert torch.equal(seen[0], expected)


def in_chunks(draft_logits: Tensor, target_logits: Tensor, ids: Tensor, confidence: Tensor | None) -> SlotTerms:
    """`slot_terms` by `chunked_loss`: with the identity as head, hidden states are logits."""
    head, weights = torch.eye(draft_logits.shape[-1]), torch.ones(len(ids))
    inputs = LossInputs(draft_logits, None, confidence, target_logits, ids, weights, head, head, None)
    return chunked_loss(inputs, LossWeights(), 2)[1]


Terms = Callable[[Tensor, Tensor, Tensor, Tensor | None], SlotTerms]
ROUNDING = 1e-6  # of float32 probabilities that add up to 1
both_ways = pytest.mark.parametrize("terms", [slot_terms, in_chunks])


@both_ways
def test_equal_distributions(terms: Terms) -> None:
    """Also where logits differ by a constant: their own L1 distance is then large."""
    logits = torch.randint(-3, 4, (3, 50)).float()
    for shift in (0, 64):
        found = terms(logits, logits + shift, torch.tensor([1, 2, 3]), None)
        assert found.tv.abs().max() <= (0 if terms is slot_terms else ROUNDING)  # exp(log softmax) against softmax
        assert (1 - found.acceptance).abs().max() <= ROUNDING
        assert found.agreement.tolist() == [1, 1, 1]


@both_ways
def test_disjoint_distributions(terms: Terms) -> None:
    draft = torch.zeros(3, 50)
    draft[:, :25] = SURE
    found = terms(draft, draft.flip(-1), torch.tensor([1, 2, 3]), None)
    assert (2 - found.tv).abs().max() <= ROUNDING
    assert found.acceptance.abs().max() <= ROUNDING
    assert not found.agreement.any()


@both_ways
def test_tv_is_the_whole_l1_distance_of_probabilities(terms: Terms) -> None:
    """By hand, and against logits: a small difference at likely tokens counts, a huge one at unlikely ones does not."""
    draft = torch.tensor([[math.log(3), 0, -SURE], [1, 0, -60], [0.5, -0.5, -SURE]])
    target = torch.tensor([[0, math.log(3), -SURE], [1, 0, -99], [-0.5, 0.5, -SURE]])
    found = terms(draft, target, torch.tensor([0, 0, 0]), None).tv
    third = 2 * math.tanh(0.5)  # both sides of two tokens: 2 |sigmoid(1) - sigmoid(-1)|
    assert found.tolist() == pytest.approx([1.0, 0.0, third], abs=ROUNDING)
    assert (draft - target).abs().sum(-1).tolist() == pytest.approx([2 * math.log(3), 39, 2])
    assert terms(draft, target, torch.tensor([0, 0, 0]), None).acceptance.tolist() == pytest.approx(
        [0.5, 1, 1 - third / 2], abs=ROUNDING
    )


def total_of(
    terms: Terms, draft: Tensor, target: Tensor, head: Tensor, confidence: Tensor, loss: LossWeights
) -> Tensor:
    ids, weights = torch.tensor([1, 2, 3]), torch.full((3,), 1 / 3)
    if terms is slot_terms:
        return slot_terms(draft, target @ head, ids, confidence).total(weights, loss)
    return chunked_loss(LossInputs(draft, None, confidence, target, ids, weights, head, head, None), loss, 2)[0]


@both_ways
@pytest.mark.parametrize("loss", [LossWeights(0, 0, 1), LossWeights()])
def test_no_gradient_through_c_star_nor_to_the_target(terms: Terms, loss: LossWeights) -> None:
    """c* is a label: from the confidence term only the confidence logits learn. The target never does, though asked."""
    draft, target, confidence = (torch.randn(shape, requires_grad=True) for shape in ((3, 50), (3, 50), 3))
    head = torch.eye(50, requires_grad=True)
    total_of(terms, draft, target, head, confidence, loss).backward()
    assert target.grad is None
    assert head.grad is None
    assert draft.grad is not None
    assert draft.grad.any() == bool(loss.tv)
    acceptance = 1 - (draft.softmax(-1) - target.softmax(-1)).abs().sum(-1) / 2
    assert confidence.grad is not None
    assert torch.allclose(confidence.grad, (confidence.sigmoid() - acceptance) / 3, atol=ROUNDING)


@both_ways
def test_a_perfect_draft_is_left_alone(terms: Terms) -> None:
    """Two ways to the same probabilities would differ in the last bit, whose sign would be a gradient of full size."""
    draft = torch.randn(3, 50, requires_grad=True)
    total_of(terms, draft, draft.detach(), torch.eye(50), torch.zeros(3), LossWeights(0, 1, 0)).backward()
    assert draft.grad is not None
    assert draft.grad.abs().max() < ROUNDING
