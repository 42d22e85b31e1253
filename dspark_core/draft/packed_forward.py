"""The training forward: every window of every sequence in one differentiable pass, teacher forced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_core.draft.backbone import DraftModel
from dspark_core.models.layers import DecoderLayer
from dspark_core.models.rope import Rotary
from dspark_core.windows import Windows, window_mask


@dataclass(frozen=True)
class DraftOutput:
    """What a draft says of the slots of some blocks; leading axes are the blocks'.

    The draft's logits are `lm_head(hidden) + markov_head.bias(latent)`: too wide to be kept for a whole batch.

    Attributes:
        hidden: [..., K, D] after the final norm.
        latent: [..., K, r] of the sequential head, or None without one.
        confidence_logits: [..., K] float32, or None without that head.
    """

    hidden: Tensor
    latent: Tensor | None
    confidence_logits: Tensor | None

    def logits(self, model: DraftModel) -> Tensor:
        """All logits at once [..., K, V]: for tests and small vocabularies."""
        base: Tensor = model.lm_head(self.hidden)
        return base if self.latent is None or model.markov_head is None else base + model.markov_head.bias(self.latent)


def forward_windows(
    model: DraftModel,
    target_features: Tensor,
    windows: Windows,
    anchor_ids: Tensor,
    sequence_starts: Tensor | None = None,
) -> DraftOutput:
    """All windows of B rows in one differentiable pass.

    Args:
        model: a draft whose layers are not packed.
        target_features: [B, T, m * D].
        anchor_ids: [B, N] tokens at the anchors.
        sequence_starts: [B, T], the same as the windows were made with.
    """
    context = model.inject(target_features)
    hidden = _backbone(model, context, windows, anchor_ids, sequence_starts)
    return teacher_forced_heads(model, hidden, windows.previous_ids)


def teacher_forced_heads(model: DraftModel, hidden: Tensor, previous_ids: Tensor) -> DraftOutput:
    """Heads over blocks [..., K, D] with given previous tokens [..., K]."""
    head = model.markov_head
    embedded = latent = None
    if head is not None:
        embedded = head.embed(previous_ids)
        flat_e, flat_h = embedded.flatten(0, -3), hidden.flatten(0, -3)
        state, latents = head.start(flat_e.shape[0]), []
        for slot in range(hidden.shape[-2]):
            out, state = head.step(flat_e[:, slot], flat_h[:, slot], state)
            latents.append(out)
        latent = torch.stack(latents, 1).view_as(embedded)
    confidence = None
    if model.confidence_head is not None:
        with torch.autocast(hidden.device.type, enabled=False):  # a probability wants float32, whatever the rest is in
            confidence = model.confidence_head(hidden, embedded)
    return DraftOutput(hidden, latent, confidence)


def _backbone(
    model: DraftModel, context: Tensor, windows: Windows, anchor_ids: Tensor, sequence_starts: Tensor | None
) -> Tensor:
    """Hidden states [B, N, K, D] over injected context rows [B, T, D], windows kept apart by the mask."""
    decoder = model.config.decoder
    b, n, k = windows.positions.shape
    t = context.shape[1]
    rotary = Rotary(decoder.rope, decoder.head_dim, t + k, model.device)
    places = torch.arange(t, device=model.device).expand(b, t)
    context_angles = rotary.at(places if sequence_starts is None else places - sequence_starts, model.dtype)
    block_angles = rotary.at(windows.positions.flatten(1), model.dtype)
    mask = window_mask(windows, t)
    ids = model.block_ids(anchor_ids, k).flatten(1)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        attention = cast(DecoderLayer, model.layers[layer]).self_attn
        context_keys, context_values = attention.context(context, context_angles)
        keys, values = torch.cat((context_keys, keys), 1), torch.cat((context_values, values), 1)
        if queries.is_cuda:  # its fast kernels take a mask or grouped heads, not both
            keys, values = (x.repeat_interleave(decoder.num_heads // decoder.num_kv_heads, 2) for x in (keys, values))
        q, k, v = (x.transpose(1, 2) for x in (queries, keys, values))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    return model.backbone(ids, block_angles, attend).view(b, n, k, -1)
