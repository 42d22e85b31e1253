"""Exact verification: how much of a draft block stands, and the token after it.

Rows: the target's row j of a request is the distribution of the token at its slot j; a request with `verify_lens` l
has l + 1 rows, flat, starting at `row_start`. All three rules return what was accepted and the one token that the
target adds (corrected at the first rejection, else the bonus). Where a row's scores are no numbers nothing stands,
and the token is `distributions.NO_CHOICE`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dspark_core.kernels import NO_CHOICE
from dspark_core.sampling import argmax, in_kernels


class Verified(NamedTuple):
    """Per request: accepted draft tokens (bonus excluded) and the token that follows them, [R] int64 each."""

    num_accepted: Tensor
    next_ids: Tensor


def leading(accepted: Tensor, verify_lens: Tensor) -> Tensor:
    """Length of the leading run of true within the admitted part of each row of `accepted` [R, K]."""
    slots = torch.arange(accepted.shape[1], device=accepted.device)
    return (accepted & (slots < verify_lens.unsqueeze(-1))).int().cumprod(-1).sum(-1)


def rows_of(row_start: Tensor, verify_lens: Tensor, num_slots: int) -> Tensor:
    """[R, K] flat row of each slot, clamped to the request's own rows."""
    slots = torch.arange(num_slots, device=row_start.device)
    return row_start.unsqueeze(-1) + torch.minimum(slots, verify_lens.unsqueeze(-1))


def verify_choices(choices: Tensor, draft_ids: Tensor, row_start: Tensor, verify_lens: Tensor) -> Verified:
    """Greedy and coupled rules: the target's own choice at each row is emitted; a draft stands while it equals it.

    Args:
        choices: [sum(l + 1)] the target's choice at each flat row.
        draft_ids: [R, K].
    """
    same = choices[rows_of(row_start, verify_lens, draft_ids.shape[1])] == draft_ids
    num_accepted = leading(same, verify_lens)
    return Verified(num_accepted, choices[row_start + num_accepted])


def greedy_choices(logits: Tensor) -> Tensor:
    """[N, V] to [N]: the most likely token, the lowest id on a tie."""
    if in_kernels(logits):
        from dspark_core.kernels.rows import most_likely  # needs llvmlite

        return most_likely(logits.contiguous())
    return torch.where(logits.amax(-1).isfinite(), argmax(logits), NO_CHOICE)
