"""Training windows: which token, label and target row belong to which slot, and the packed teacher-forced forward.

Alignment (notation.md), for a sequence x[0..T) and an anchor at position p, slot s:
fed token x[p] for slot 0 and the mask token after it; rotary position p + s; previous token of the heads x[p + s];
label x[p + s + 1]; target row p + s; visible context: features of positions before p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_core.draft.backbone import DraftModel
from dspark_core.models.layers import DecoderLayer
from dspark_core.models.rope import Rotary


@dataclass(frozen=True)
class Windows:
    """Aligned tensors of N windows in each of B sequences, all [B, N, K].

    Attributes:
        positions: rotary positions p + s.
        previous_ids: what the sequential and confidence heads see as previous token.
        target_ids: labels.
        target_rows: position whose target logits are the label's distribution.
        eval_mask: supervised slots: label inside the sequence and the loss mask on for the whole prefix of the block.
    """

    positions: Tensor
    previous_ids: Tensor
    target_ids: Tensor
    target_rows: Tensor
    eval_mask: Tensor


def make_windows(input_ids: Tensor, loss_mask: Tensor, anchors: Tensor, keep: Tensor, draft_len: int) -> Windows:
    """Align windows.

    Args:
        input_ids, loss_mask: [B, T].
        anchors: [B, N] anchor positions.
        keep: [B, N] bool, false for dummy anchors.
        draft_len: K.
    """
    last = input_ids.shape[1] - 1
    positions = anchors.unsqueeze(-1) + torch.arange(draft_len, device=anchors.device)
    labels = positions + 1
    inside = labels <= last
    take = labels.clamp_max(last).flatten(1)
    target_ids = input_ids.gather(1, take).view_as(labels)
    supervised = loss_mask.gather(1, take).view_as(labels) > 0.5
    mask = (inside & supervised & keep.unsqueeze(-1)).cumprod(-1).bool()
    previous = input_ids.gather(1, positions.clamp_max(last).flatten(1)).view_as(labels)
    rows = labels.clamp_max(last) - 1
    return Windows(positions, previous, target_ids, rows, mask)


@dataclass(frozen=True)
class WindowOutput:
    """Teacher-forced draft outputs: logits [B, N, K, V] with the head's bias, confidence logits [B, N, K] or None."""

    draft_logits: Tensor
    confidence_logits: Tensor | None
    hidden: Tensor


def forward_windows(model: DraftModel, target_features: Tensor, windows: Windows, anchor_ids: Tensor) -> WindowOutput:
    """All windows of B sequences in one differentiable pass.

    Args:
        model: a draft whose layers are not packed.
        target_features: [B, T, m * D].
        anchor_ids: [B, N] tokens at the anchors.
    """
    hidden = _packed_backbone(model, target_features, windows, anchor_ids)
    logits, confidence = teacher_forced_heads(model, hidden, windows.previous_ids)
    return WindowOutput(logits, confidence, hidden)


def teacher_forced_heads(model: DraftModel, hidden: Tensor, previous_ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Heads over blocks [..., K, D] with given previous tokens [..., K]: logits [..., K, V] and confidence [..., K]."""
    logits = model.lm_head(hidden)
    head = model.markov_head
    embedded = None
    if head is not None:
        embedded = head.embed(previous_ids)
        flat_e, flat_h = embedded.flatten(0, -3), hidden.flatten(0, -3)
        state, biases = head.start(flat_e.shape[0]), []
        for slot in range(hidden.shape[-2]):
            bias, state = head.step(flat_e[:, slot], flat_h[:, slot], state)
            biases.append(bias)
        logits = logits + torch.stack(biases, 1).view_as(logits)
    confidence = None if model.confidence_head is None else model.confidence_head(hidden, embedded)
    return logits, confidence


def _packed_backbone(model: DraftModel, target_features: Tensor, windows: Windows, anchor_ids: Tensor) -> Tensor:
    """Hidden states [B, N, K, D]: every window of a sequence in one row, kept apart by the mask."""
    decoder = model.config.decoder
    b, n, k = windows.positions.shape
    t = target_features.shape[1]
    rotary = Rotary(decoder.rope, decoder.head_dim, t + k, model.device)
    flat = windows.positions.flatten(1)
    block_angles = rotary.at(flat, model.dtype)
    context_angles = rotary.at(torch.arange(t, device=flat.device).expand(b, t), model.dtype)
    context = model.inject(target_features)
    mask = _window_mask(windows.positions, t)
    ids = model.block_ids(anchor_ids, k).flatten(1)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        attention = cast(DecoderLayer, model.layers[layer]).self_attn
        context_keys, context_values = attention.context(context, context_angles)
        keys, values = torch.cat((context_keys, keys), 1), torch.cat((context_values, values), 1)
        out = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask,
            enable_gqa=True,
        )
        return out.transpose(1, 2)

    return model.backbone(ids, block_angles, attend).view(b, n, k, -1)


def _window_mask(positions: Tensor, num_context: int) -> Tensor:
    """[B, 1, N*K, T + N*K] bool: context strictly before the own anchor, and the whole own block."""
    b, n, k = positions.shape
    anchors = positions[..., :1].expand(b, n, k).reshape(b, n * k, 1)
    context = torch.arange(num_context, device=positions.device) < anchors
    window = torch.arange(n, device=positions.device).repeat_interleave(k)
    own = (window.unsqueeze(-1) == window).expand(b, -1, -1)
    return torch.cat((context, own), -1).unsqueeze(1)
