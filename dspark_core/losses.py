"""The losses of a draft (Eq 8-12), and the same in chunks of positions so that a wide vocabulary fits in memory.

Per supervised slot, with p^d and p^t the draft's and the target's probabilities at temperature 1:

    ce   = -log p^d(label)                                  Eq 9
    tv   = sum_v |p^d(v) - p^t(v)|                          Eq 10, the full L1 distance, of probabilities
    conf = BCE(confidence logit, c*),  c* = 1 - tv / 2      Eq 11, c* detached

Each term is the mean over supervised slots with weight w_k = exp(-k / loss_decay), k counted from 0 (Eq 8), and the
total is their weighted sum (Eq 12). The normaliser is the sum of weights over everything that one optimiser step
sees, on all ranks; it is known from the masks before any forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_core.sampling import argmax

# Positions whose logits exist at once. Beyond some 128 rows matrix products get no faster.
CHUNK = 128


@dataclass(frozen=True)
class LossWeights:
    """Weights of the three terms; the paper's by default."""

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0


def slot_weights(draft_len: int, loss_decay: float | None) -> Tensor:
    """w_k of each slot [K] float32 (Eq 8); None weighs all slots alike."""
    slots = torch.arange(draft_len, dtype=torch.float32)
    return torch.ones_like(slots) if loss_decay is None else torch.exp(-slots / loss_decay)


@dataclass(frozen=True)
class SlotTerms:
    """Losses and quality of M slots, unweighted, [M] float32.

    Attributes:
        ce, tv: Eq 9 and 10; differentiable where `slot_terms` made them.
        confidence: Eq 11, zeros without a confidence head.
        acceptance: c*, detached: the chance that the ratio rule accepts the slot's token at temperature 1.
        agreement: 1 where draft and target have the same most likely token: what greedy decoding accepts.
    """

    ce: Tensor
    tv: Tensor
    confidence: Tensor
    acceptance: Tensor
    agreement: Tensor

    def total(self, weights: Tensor, loss: LossWeights) -> Tensor:
        """Eq 12: the weighted sum over slots; `weights` [M] are already divided by the normaliser."""
        terms = loss.ce * self.ce + loss.tv * self.tv + loss.confidence * self.confidence
        return (weights * terms).sum()


def slot_terms(
    draft_logits: Tensor, target_logits: Tensor, target_ids: Tensor, confidence_logits: Tensor | None
) -> SlotTerms:
    """The losses written out, for differentiation by torch: the reference of `chunked_loss`.

    Args:
        draft_logits, target_logits: [M, V]; the target's get no gradient.
        target_ids: [M].
        confidence_logits: [M] or None.
    """
    draft_probs = draft_logits.float().softmax(-1)
    target_probs = target_logits.detach().float().softmax(-1)
    ce = F.cross_entropy(draft_logits.float(), target_ids, reduction="none")
    tv = (draft_probs - target_probs).abs().sum(-1)
    acceptance = (1 - tv.detach() / 2).clamp(0, 1)
    agreement = (draft_logits.argmax(-1) == target_logits.argmax(-1)).float()
    return SlotTerms(ce, tv, confidence_loss(confidence_logits, acceptance), acceptance, agreement)


def confidence_loss(confidence_logits: Tensor | None, acceptance: Tensor) -> Tensor:
    """Eq 11 from logits, in float32: bounded by the logit's size, also where c* is exactly 0 or 1."""
    if confidence_logits is None:
        return torch.zeros_like(acceptance)
    return F.binary_cross_entropy_with_logits(confidence_logits.float(), acceptance, reduction="none")


@dataclass(frozen=True)
class LossInputs:
    """What the losses of M supervised slots are computed from.

    Attributes:
        hidden, latent, confidence_logits: the draft's, [M, D], [M, r] or None, [M] or None.
        target_hidden: [M, D] the target's last hidden states, after its final norm.
        target_ids: [M].
        weights: [M] w_k / normaliser.
        draft_head, target_head: [V, D] LM heads, frozen. Logits are computed in their dtype.
        markov_w2: [V, r] or None.
    """

    hidden: Tensor
    latent: Tensor | None
    confidence_logits: Tensor | None
    target_hidden: Tensor
    target_ids: Tensor
    weights: Tensor
    draft_head: Tensor
    target_head: Tensor
    markov_w2: Tensor | None


def chunked_loss(inputs: LossInputs, loss: LossWeights, chunk: int = CHUNK) -> tuple[Tensor, SlotTerms]:
    """Eq 12 and its parts; equals `slot_terms(...).total(...)` with memory for the logits of `chunk` slots only.

    Gradients go to hidden, latent, confidence_logits and markov_w2. They are computed together with the loss, so that
    the wide logits are made once.

    Returns:
        The total, attached to the graph also when there is no slot (it is then 0), and the parts, detached.
    """
    if not torch.is_grad_enabled():
        parts = inputs.hidden.new_zeros(5, len(inputs.hidden), dtype=torch.float32)
        for rows in _slices(len(inputs.hidden), chunk):
            _chunk(inputs, loss, rows, parts, None)
        terms = _terms(parts, inputs.confidence_logits)
        return terms.total(inputs.weights, loss), terms
    total, *values = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        inputs.hidden, inputs.latent, inputs.confidence_logits, inputs.markov_w2, inputs, loss, chunk
    )
    return total, SlotTerms(*values)


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _terms(parts: Tensor, confidence_logits: Tensor | None) -> SlotTerms:
    """From what `_chunk` left: ce, tv, nothing, c*, agreement."""
    return SlotTerms(parts[0], parts[1], confidence_loss(confidence_logits, parts[3]), parts[3], parts[4])


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        latent: Tensor | None,
        confidence_logits: Tensor | None,
        markov_w2: Tensor | None,
        inputs: LossInputs,
        loss: LossWeights,
        chunk: int,
    ) -> tuple[Tensor, ...]:
        parts = hidden.new_zeros(5, len(hidden), dtype=torch.float32)
        grads = _Gradients.like(hidden, latent, markov_w2)
        for rows in _slices(len(hidden), chunk):
            _chunk(inputs, loss, rows, parts, grads)
        terms = _terms(parts, confidence_logits)
        grad_confidence = None
        if confidence_logits is not None:
            grad_confidence = (
                loss.confidence * inputs.weights * (confidence_logits.float().sigmoid() - terms.acceptance)
            )
        ctx.grads = (grads.hidden, grads.latent, grad_confidence, grads.markov_w2)
        outputs = (terms.ce, terms.tv, terms.confidence, terms.acceptance, terms.agreement)
        ctx.mark_non_differentiable(*outputs)
        return terms.total(inputs.weights, loss), *outputs

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if grad is None else grad * grad_total for grad in ctx.grads), None, None, None


@dataclass
class _Gradients:
    hidden: Tensor
    latent: Tensor | None
    markov_w2: Tensor | None

    @classmethod
    def like(cls, hidden: Tensor, latent: Tensor | None, markov_w2: Tensor | None) -> _Gradients:
        return cls(
            torch.zeros_like(hidden),
            None if latent is None else torch.zeros_like(latent),
            None if markov_w2 is None else torch.zeros_like(markov_w2),
        )


def _chunk(inputs: LossInputs, loss: LossWeights, rows: slice, parts: Tensor, grads: _Gradients | None) -> None:
    """Losses of some slots, and their gradients if wanted.

    With z the draft's logits, p its probabilities and s = sign(p - p^t): d ce / dz = p - onehot(label) and
    d tv / dz = p * (s - sum(p * s)).
    """
    dtype = inputs.draft_head.dtype
    hidden = inputs.hidden[rows].to(dtype)
    logits = (hidden @ inputs.draft_head.T).float()
    latent = None if inputs.latent is None else inputs.latent[rows].to(dtype)
    w2 = None if inputs.markov_w2 is None else inputs.markov_w2.detach().to(dtype)
    if latent is not None and w2 is not None:
        logits += latent @ w2.T
    target_logits = (inputs.target_hidden[rows].to(inputs.target_head.dtype) @ inputs.target_head.T).float()
    labels = inputs.target_ids[rows].unsqueeze(-1)
    agreement = argmax(logits) == argmax(target_logits)
    log_probs = logits.log_softmax(-1)
    ce = -log_probs.gather(-1, labels).squeeze(-1)
    probs = log_probs.exp_()
    gap = probs - target_logits.log_softmax(-1).exp_()  # the same operations: equal logits have no gap at all
    tv = gap.abs().sum(-1)
    sign = gap.sign_()
    for part, value in zip(parts, (ce, tv, None, (1 - tv / 2).clamp(0, 1), agreement), strict=True):
        if value is not None:
            part[rows] = value
    if grads is None:
        return
    # d total / d logits, written over `sign`
    mean_sign = (probs * sign).sum(-1, keepdim=True)
    slope = sign.sub_(mean_sign).mul_(loss.tv).add_(loss.ce).mul_(probs)
    slope.scatter_add_(-1, labels, torch.full_like(labels, -loss.ce, dtype=slope.dtype))
    slope = slope.mul_(inputs.weights[rows].unsqueeze(-1)).to(dtype)
    grads.hidden[rows] = (slope @ inputs.draft_head).to(grads.hidden.dtype)
    if latent is not None and w2 is not None and grads.latent is not None and grads.markov_w2 is not None:
        grads.latent[rows] = (slope @ w2).to(grads.latent.dtype)
        grads.markov_w2 += slope.T @ latent
