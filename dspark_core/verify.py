"""Exact verification: how much of a draft block stands, and the token after it.

Rows: the target's row j of a request is the distribution of the token at its slot j; a request with `verify_lens` l
has l + 1 rows, flat, starting at `row_start`. All three rules return what was accepted and the one token that the
target adds (corrected at the first rejection, else the bonus). Where a row's scores are no numbers nothing stands,
and the token is `distributions.NO_CHOICE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from dspark_core.distributions import Distributions, Probabilities
from dspark_core.kernels import NO_CHOICE
from dspark_core.sampling import argmax, in_kernels

if TYPE_CHECKING:
    from dspark_core.kernels.logit_rows import LogitRows


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
    same = choices[_rows(row_start, verify_lens, draft_ids.shape[1])] == draft_ids
    num_accepted = _leading(same, verify_lens)
    return Verified(num_accepted, choices[row_start + num_accepted])


def greedy_choices(logits: Tensor) -> Tensor:
    """[N, V] to [N]: the most likely token, the lowest id on a tie."""
    if in_kernels(logits):
        from dspark_core.kernels.logit_rows import most_likely  # needs llvmlite

        return most_likely(logits.contiguous())
    ids = argmax(logits)
    return torch.where(logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1).isfinite(), ids, NO_CHOICE)


def verify_ratio(
    target: Distributions,
    draft_ids: Tensor,
    drafts: Sequence[Distributions],
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
        target: of sum(l + 1) rows.
        draft_ids: [R, K]; `drafts`, of R rows for each slot, are the very distributions that drew them.
        accept_u: [R, K] float64 in [0, 1); `residual_u`: [R]. From streams independent of the draft's.
    """
    if not isinstance(target, Probabilities):  # the same in a kernel
        return Verified(
            *cast("LogitRows", target).verify(
                draft_ids, cast("Sequence[LogitRows]", drafts), row_start, verify_lens, accept_u, residual_u
            )
        )
    draft_probs = [draft.probs for draft in cast("Sequence[Probabilities]", drafts)]
    num_slots = draft_ids.shape[1]
    p_target = target.probs[_rows(row_start, verify_lens, num_slots), draft_ids]
    p_draft = torch.cat([p.gather(-1, draft_ids[:, k : k + 1]) for k, p in enumerate(draft_probs)], -1)
    num_accepted = _leading(accept_u * p_draft < p_target, verify_lens)
    last = target.probs[row_start + num_accepted]
    slots, requests = num_accepted.clamp_max(num_slots - 1), torch.arange(len(draft_ids), device=draft_ids.device)
    residual = (last - torch.stack(draft_probs)[slots, requests]).clamp_min_(0)
    rejected = (num_accepted < verify_lens) & (residual.sum(-1) > 0)
    weights = torch.where(rejected.unsqueeze(-1), residual, last)
    return Verified(num_accepted, Probabilities(weights).draw(residual_u))
