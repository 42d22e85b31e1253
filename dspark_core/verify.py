"""Exact verification: how much of a draft block stands, and the token after it.

Rows: the target's row j of a request is the distribution of the token at its slot j; a request with `verify_lens` l
has l + 1 rows, flat, starting at `row_start`. All three rules return what was accepted and the one token that the
target adds (corrected at the first rejection, else the bonus).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dspark_core.sampling import argmax, draw


class Verified(NamedTuple):
    """Per request: accepted draft tokens (bonus excluded) and the token that follows them, [R] int64 each."""

    num_accepted: Tensor
    next_ids: Tensor


def _leading(accepted: Tensor, verify_lens: Tensor) -> Tensor:
    """Length of the leading run of true within the admitted part of each row of `accepted` [R, K]."""
    slots = torch.arange(accepted.shape[1], device=accepted.device)
    return (accepted & (slots < verify_lens.unsqueeze(-1))).int().cumprod(-1).sum(-1)


def _rows(row_start: Tensor, verify_lens: Tensor, num_slots: int) -> Tensor:
    """[R, K] flat row of each slot, clamped to the request's own rows."""
    slots = torch.arange(num_slots, device=row_start.device)
    return row_start.unsqueeze(-1) + torch.minimum(slots, verify_lens.unsqueeze(-1))


def verify_choices(choices: Tensor, draft_ids: Tensor, row_start: Tensor, verify_lens: Tensor) -> Verified:
    """Greedy and coupled rules: the target's own choice at each row is emitted; a draft stands while it equals it.

    Args:
        choices: [sum(l + 1)] the target's choice at each flat row.
        draft_ids: [R, K].
    """
    if draft_ids.shape[1] == 0:
        return Verified(torch.zeros_like(row_start), choices[row_start])
    same = choices[_rows(row_start, verify_lens, draft_ids.shape[1])] == draft_ids
    num_accepted = _leading(same, verify_lens)
    return Verified(num_accepted, choices[row_start + num_accepted])


def greedy_choices(logits: Tensor) -> Tensor:
    """[N, V] to [N]: the most likely token."""
    return argmax(logits)


def coupled_choices(probs: Tensor, noise: Tensor) -> Tensor:
    """Gumbel-max: arg-max of log-probability plus noise, in float64.

    Draft and target share the noise of an absolute position, so they often agree, and the target's choice does not
    depend on the draft at all (Daliri, Musco, Suresh 2024).

    Args:
        probs: [N, V] float32; filtered tokens have probability 0 and are never chosen.
        noise: [N, V] float64.
    """
    return argmax(probs.double().log() + noise)


def verify_ratio(
    target_probs: Tensor,
    draft_ids: Tensor,
    draft_probs: Sequence[Tensor],
    row_start: Tensor,
    verify_lens: Tensor,
    *,
    accept_u: Tensor,
    residual_u: Tensor,
) -> Verified:
    """Speculative rejection sampling (Leviathan et al. 2023; Chen et al. 2023).

    Token x stands when u * p_draft(x) < p_target(x); at the first rejection the next token comes from the positive
    part of p_target - p_draft, after a full pass from p_target of the last row.

    Args:
        target_probs: [sum(l + 1), V] float32.
        draft_ids: [R, K]; `draft_probs`, [R, V] of each slot, are the very distributions they were drawn from.
        accept_u: [R, K] float64 in [0, 1); `residual_u`: [R]. From streams independent of the draft's.
    """
    num_slots = draft_ids.shape[1]
    if num_slots == 0:
        return Verified(torch.zeros_like(row_start), draw(target_probs, residual_u))  # one row each
    p_target = target_probs[_rows(row_start, verify_lens, num_slots), draft_ids]
    p_draft = torch.cat([p.gather(-1, draft_ids[:, k : k + 1]) for k, p in enumerate(draft_probs)], -1)
    num_accepted = _leading(accept_u * p_draft < p_target, verify_lens)
    last = target_probs[row_start + num_accepted]
    residual = (last - _at_slots(draft_probs, num_accepted.clamp_max(num_slots - 1))).clamp_min_(0)
    rejected = (num_accepted < verify_lens) & (residual.sum(-1) > 0)
    weights = torch.where(rejected.unsqueeze(-1), residual, last)
    return Verified(num_accepted, draw(weights, residual_u))


def _at_slots(draft_probs: Sequence[Tensor], slots: Tensor) -> Tensor:
    """[R, V]: each request's distribution at its own slot."""
    if slots.device.type == "cpu":  # all slots side by side would be a copy of many megabytes
        return torch.stack([draft_probs[slot][request] for request, slot in enumerate(slots.tolist())])
    return torch.stack(list(draft_probs))[slots, torch.arange(len(slots), device=slots.device)]
