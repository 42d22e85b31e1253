"""Distributions that tokens are drawn from: one function makes them; drafting and verification share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dspark_core.kernels import NO_CHOICE
from dspark_core.randomness import Purpose, gumbel
from dspark_core.sampling import Filters, argmax, filtered, in_kernels, probabilities


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


def distributions(logits: Tensor, filters: Filters) -> Distributions:
    """What is sampled from, of logits [N, V] (see `sampling.probabilities`). They must not be written to any more."""
    if in_kernels(logits):
        from dspark_core.kernels.logit_rows import LogitRows  # needs llvmlite

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
