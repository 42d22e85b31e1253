"""Training windows: where blocks are placed, and which token, label and target row belong to which slot.

Alignment (notation.md), for a sequence x[0..T) and an anchor at position p, slot s:
fed token x[p] for slot 0 and the mask token after it; rotary position p + s; previous token of the heads x[p + s];
label x[p + s + 1]; target row p + s; visible context: features of positions before p.

A row may hold several sequences end to end. B rows of T tokens, N windows a row, K slots a window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Windows:
    """Aligned tensors of N windows in each of B rows, [B, N, K] unless said otherwise.

    Attributes:
        positions: rotary positions p + s, counted from the start of the window's sequence.
        previous_ids: what the sequential and confidence heads see as previous token.
        target_ids: labels.
        target_rows: index in the row whose target logits are the label's distribution.
        eval_mask: supervised slots: label inside the sequence and the loss mask on for the whole prefix of the block.
        anchors, starts: [B, N] index in the row of the anchor, and of the first token of its sequence.
    """

    positions: Tensor
    previous_ids: Tensor
    target_ids: Tensor
    target_rows: Tensor
    eval_mask: Tensor
    anchors: Tensor
    starts: Tensor


def make_windows(
    input_ids: Tensor,
    loss_mask: Tensor,
    anchors: Tensor,
    keep: Tensor,
    draft_len: int,
    sequence_starts: Tensor | None = None,
) -> Windows:
    """Align windows.

    Args:
        input_ids, loss_mask: [B, T].
        anchors: [B, N] index of each anchor in its row.
        keep: [B, N] bool, false for dummy anchors.
        draft_len: K.
        sequence_starts: [B, T] index of the first token of each token's sequence; one sequence a row by default.
    """
    last = input_ids.shape[1] - 1
    starts_of = torch.zeros_like(input_ids) if sequence_starts is None else sequence_starts
    rows = anchors.unsqueeze(-1) + torch.arange(draft_len, device=anchors.device)
    labels = rows + 1
    take = labels.clamp_max(last).flatten(1)
    starts = starts_of.gather(1, anchors)
    same_sequence = starts_of.gather(1, take).view_as(labels) == starts.unsqueeze(-1)
    supervised = loss_mask.gather(1, take).view_as(labels) > 0.5
    mask = (labels <= last) & same_sequence & supervised & keep.unsqueeze(-1)
    return Windows(
        positions=rows - starts.unsqueeze(-1),
        previous_ids=input_ids.gather(1, rows.clamp_max(last).flatten(1)).view_as(labels),
        target_ids=input_ids.gather(1, take).view_as(labels),
        target_rows=labels.clamp_max(last) - 1,
        eval_mask=mask.cumprod(-1).bool(),
        anchors=anchors,
        starts=starts,
    )


def anchor_candidates(loss_mask: Tensor) -> Tensor:
    """Positions of one sequence [T] where a window may start: anchor and first label count in the loss mask."""
    on = loss_mask > 0.5
    return (on[:-1] & on[1:]).nonzero().squeeze(-1)


def random_anchors(loss_mask: Tensor, num_anchors: int, generator: torch.Generator) -> Tensor:
    """Up to `num_anchors` different anchors of one sequence [T], uniform among the candidates, ascending (§3.3)."""
    candidates = anchor_candidates(loss_mask)
    order = torch.randperm(len(candidates), generator=generator)
    return candidates[order[:num_anchors]].sort().values


def stride_anchors(loss_mask: Tensor, draft_len: int, anchor_stride: int) -> Tensor:
    """Anchors p = i * stride, i < (T - K - 1) // stride, as far as they are candidates: the same in every run."""
    count = max(0, (len(loss_mask) - draft_len - 1) // anchor_stride)
    anchors = torch.arange(count) * anchor_stride
    return anchors[torch.isin(anchors, anchor_candidates(loss_mask))]


def window_mask(windows: Windows, num_context: int) -> Tensor:
    """Who sees whom, [B, 1, N*K, T + N*K] bool: of the own sequence what lies before the anchor, and the own block."""
    b, n, k = windows.positions.shape
    context = torch.arange(num_context, device=windows.anchors.device)
    visible = (context >= windows.starts.unsqueeze(-1)) & (context < windows.anchors.unsqueeze(-1))
    visible = visible.unsqueeze(2).expand(b, n, k, num_context).reshape(b, n * k, num_context)
    window = torch.arange(n, device=context.device).repeat_interleave(k)
    own = (window.unsqueeze(-1) == window).expand(b, -1, -1)
    return torch.cat((visible, own), -1).unsqueeze(1)
