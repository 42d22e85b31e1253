"""Distributions that tokens are drawn from: one function makes them; drafting and verification share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from dspark_core.kernels import NO_CHOICE
from dspark_core.randomness import Purpose, gumbel
from dspark_core.sampling import Filters, argmax, filtered, in_kernels, probabilities
from dspark_core.verify import Verified, leading, rows_of


class Distributions(Protocol):
    """N distributions over V tokens."""

    def draw(self, u: Tensor) -> Tensor:
        """One token of each, by inverting the cumulative sum; one of probability 0 is never returned. [N] int64.

        Args:
            u: [N] float64 uniform in [0, 1).
        """

    def couple(self, keys: Tensor, positions: Tensor) -> Tensor:
        """One token of each by the Gumbel-max rule: arg-max of log-probability plus noise of the position. [N] int64.

        Draft and target share the noise of an absolute position, so they often agree, and the target's choice does not
        depend on the draft at all (Daliri, Musco, Suresh 2024). Filtered tokens are never chosen.

        Args:
            keys, positions: [N] int64, of the requests and of the tokens that are chosen.
        """

    def verify(
        self,
        draft_ids: Tensor,
        drafts: Sequence[Self],
        row_start: Tensor,
        verify_lens: Tensor,
        *,
        accept_u: Tensor,
        residual_u: Tensor,
    ) -> Verified:
        """Speculative rejection sampling (Leviathan et al. 2023; Chen et al. 2023), of the target's distributions.

        Token x stands when u * p_draft(x) < p_target(x); at the first rejection the next token comes from the positive
        part of p_target - p_draft, after a full pass from p_target of the last row.

        Args:
            draft_ids: [R, K]; `drafts`, of R rows for each slot, are the very distributions that drew them.
            row_start, verify_lens: [R], first row and admitted drafts l of each request; these are sum(l + 1) rows.
            accept_u: [R, K] float64 in [0, 1); `residual_u`: [R]. From streams independent of the draft's.
        """


def distributions(logits: Tensor, filters: Filters) -> Distributions:
    """What is sampled from, of logits [N, V] (see `sampling.probabilities`). They must not be written to any more."""
    if in_kernels(logits):
        from dspark_core.logit_rows import LogitRows  # needs llvmlite

        return LogitRows(filtered(logits, filters), filters.temperature)
    return Probabilities(probabilities(logits, filters))


@dataclass(frozen=True)
class Probabilities:
    """Distributions by their probabilities [N, V] float32; rows need not sum to 1."""

    probs: Tensor

    def draw(self, u: Tensor) -> Tensor:
        cumulative = self.probs.double().cumsum(-1)
        total = cumulative[:, -1:]
        point = torch.minimum(u.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
        ids = torch.searchsorted(cumulative, point, right=True).clamp_max(self.probs.shape[-1] - 1)
        return torch.where(total > 0, ids, NO_CHOICE).squeeze(-1)

    def couple(self, keys: Tensor, positions: Tensor) -> Tensor:
        tokens = torch.arange(self.probs.shape[-1], device=self.probs.device)
        noise = gumbel(keys.unsqueeze(-1), int(Purpose.NOISE), positions.unsqueeze(-1), tokens)
        return torch.where(self.probs.amax(-1) > 0, argmax(self.probs.double().log() + noise), NO_CHOICE)

    def verify(
        self,
        draft_ids: Tensor,
        drafts: Sequence[Self],
        row_start: Tensor,
        verify_lens: Tensor,
        *,
        accept_u: Tensor,
        residual_u: Tensor,
    ) -> Verified:
        draft_probs, num_slots = torch.stack([draft.probs for draft in drafts], 1), draft_ids.shape[1]
        p_target = self.probs[rows_of(row_start, verify_lens, num_slots), draft_ids]
        p_draft = draft_probs.gather(-1, draft_ids.unsqueeze(-1)).squeeze(-1)
        num_accepted = leading(accept_u * p_draft < p_target, verify_lens)
        last = self.probs[row_start + num_accepted]
        slots, requests = num_accepted.clamp_max(num_slots - 1), torch.arange(len(draft_ids), device=draft_ids.device)
        residual = (last - draft_probs[requests, slots]).clamp_min_(0)
        rejected = (num_accepted < verify_lens) & (residual.sum(-1) > 0)
        weights = torch.where(rejected.unsqueeze(-1), residual, last)
        return Verified(num_accepted, Probabilities(weights).draw(residual_u))
