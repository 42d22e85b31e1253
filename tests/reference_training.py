"""The training part of `tests.reference`: the teacher-forced forward, the losses, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dspark_core.draft.backbone import DraftModel
from dspark_core.draft.packed_forward import DraftOutput, forward_windows
from dspark_core.losses import LossInputs, LossWeights, SlotTerms, chunked_loss, slot_weights
from dspark_core.windows import Windows
from tests.golden import EXACT, BadFolderError, Check, Golden, compare

# Losses and norms are sums of thousands of float32 terms, here in another order than the reference's, which leaves
# some 1e-6 of them. What could be wrong shows as more: a decay of 4 in place of 5 moves the cross-entropy by 1e-4.
RELATIVE = 1e-5
CHUNK = 16  # several chunks a folder, the last one shorter
LOSSES = ("ce", "tv", "conf", "weight_sum", "total")


@torch.no_grad()
def check_training(golden: Golden, draft: DraftModel) -> Iterator[Check]:
    """The teacher-forced forward, and what the losses are made from. Dummy anchors mean nothing and are left out."""
    train, keep = golden.train, golden.keep
    windows = golden.windows(draft.config.draft_len)
    anchor_ids = train["input_ids"].gather(1, golden.anchors)
    output = forward_windows(draft, train["target_features"], windows, anchor_ids)
    yield compare("training draft_logits", output.logits(draft)[keep], train["draft_logits"][keep])
    if (output.confidence_logits is None) == ("confidence_logits" in train):
        raise BadFolderError("there is a confidence head without confidence_logits, or the reverse")
    if output.confidence_logits is not None:
        expected = train["confidence_logits"][keep]
        yield compare("training confidence_logits", output.confidence_logits[keep], expected)
    yield compare("eval_mask", windows.eval_mask[keep], train["eval_mask"][keep], EXACT)
    supervised = train["eval_mask"].bool() & keep.unsqueeze(-1)
    yield compare("target_ids", windows.target_ids[supervised], train["target_ids"][supervised], EXACT)
    rows = windows.target_rows.flatten(1).unsqueeze(-1)
    scores = draft.lm_head(train["target_last_hidden"])
    aligned = scores.gather(1, rows.expand(-1, -1, scores.shape[-1])).view_as(train["aligned_target_logits"])
    yield compare("aligned_target_logits", aligned[supervised], train["aligned_target_logits"][supervised])


def loss_inputs(
    draft: DraftModel, windows: Windows, output: DraftOutput, target_hidden: Tensor, weights: Tensor
) -> LossInputs:
    """What the losses read, at supervised slots alone.

    Args:
        target_hidden: [B, T, D] last hidden states of the target.
        weights: [M] of the supervised slots, already divided by the normaliser.
    """
    mask, head = windows.eval_mask, draft.markov_head
    batch = mask.nonzero()[:, 0]
    return LossInputs(
        hidden=output.hidden[mask],
        latent=None if output.latent is None else output.latent[mask],
        confidence_logits=None if output.confidence_logits is None else output.confidence_logits[mask],
        target_hidden=target_hidden[batch, windows.target_rows[mask]],
        target_ids=windows.target_ids[mask],
        weights=weights,
        draft_head=draft.lm_head.get_parameter("weight"),
        target_head=draft.lm_head.get_parameter("weight"),
        markov_w2=None if head is None else head.markov_w2.get_parameter("weight"),
    )


def supervised_weights(windows: Windows, loss_decay: float | None) -> Tensor:
    """w_k of the supervised slots [M], not yet divided by their sum."""
    mask = windows.eval_mask
    return slot_weights(mask.shape[-1], loss_decay).expand_as(mask)[mask]


def loss_weights(expected: dict[str, Any]) -> LossWeights:
    """The weights of one weighting of expected.json."""
    return LossWeights(expected["alpha_ce"], expected["alpha_tv"], expected["alpha_conf"])


def loss_values(parts: SlotTerms, weights: Tensor, total: Tensor) -> dict[str, float]:
    """What expected.json holds of one weighting; `weights` [M] not divided by their sum."""
    means = [(weights * part).sum() / weights.sum() for part in (parts.ce, parts.tv, parts.confidence)]
    return {name: value.item() for name, value in zip(LOSSES, (*means, weights.sum(), total), strict=True)}


def compare_losses(found: list[dict[str, float]], expected: list[dict[str, Any]]) -> Iterator[Check]:
    """Each quantity in all weightings."""
    for name in LOSSES:
        yield relative(f"loss {name}", [values[name] for values in found], [values[name] for values in expected])


def relative(name: str, found: list[float], expected: list[float]) -> Check:
    return compare(name, found, expected, RELATIVE, floor=1e-9)


def check_losses(golden: Golden, draft: DraftModel) -> Iterator[Check]:
    """Every weighting's losses through the training path, and the gradient norms of the paper's.

    The embedding and the LM head are the target's and frozen; all other parameters are trained.
    """
    frozen = ("embed_tokens.", "lm_head.")
    trained = {name: p for name, p in draft.named_parameters() if not name.startswith(frozen)}
    for parameter in trained.values():
        parameter.requires_grad_(True)
    try:
        found, norms = losses_and_norms(golden, draft, trained)
    finally:
        draft.requires_grad_(False)  # what follows is inference
    yield from compare_losses(found, list(golden.expected["losses"].values()))
    expected = golden.expected["grad_norms"]
    yield compare("grad_norms names", len(norms.keys() ^ expected.keys()), 0, EXACT)
    both = sorted(norms.keys() & expected.keys())
    yield relative("grad_norms", [norms[name] for name in both], [expected[name] for name in both])


def losses_and_norms(
    golden: Golden, draft: DraftModel, trained: dict[str, torch.nn.Parameter]
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """`loss_values` of each weighting, and per parameter that the paper's loss reaches the norm of its gradient."""
    train, windows = golden.train, golden.windows(draft.config.draft_len)
    anchor_ids = train["input_ids"].gather(1, golden.anchors)
    output = forward_windows(draft, train["target_features"], windows, anchor_ids)
    found, norms = [], dict[str, float]()
    for name, expected in golden.expected["losses"].items():
        weights = supervised_weights(windows, expected["decay"])
        inputs = loss_inputs(draft, windows, output, train["target_last_hidden"], weights / weights.sum())
        total, parts = chunked_loss(inputs, loss_weights(expected), CHUNK)
        found.append(loss_values(parts, weights, total))
        if name == "paper":
            grads = torch.autograd.grad(total, list(trained.values()), retain_graph=True, allow_unused=True)
            norms = {n: g.norm().item() for n, g in zip(trained, grads, strict=True) if g is not None}
    return found, norms
