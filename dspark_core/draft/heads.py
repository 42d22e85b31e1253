"""Sequential heads (Eq 4-6) and the confidence head (Eq 7).

A sequential head turns the previous token and the backbone's hidden state into a latent [..., r], whose projection
W2 is the bias on the base logits. `step` serves one slot while sampling left to right; training feeds it slot by slot
with teacher-forced tokens, so both paths are one code. The projection is apart from it because it is wide: training
does it in chunks.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_core.config import DraftConfig
from dspark_core.models.layers import empty_embedding
from dspark_core.models.linear import pack_linear
from dspark_core.settings import CpuWeights


class MarkovHead(nn.Module):
    """Vanilla head (Eq 5): bias = W2 W1[previous token]. Base of the other two."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        vocab, rank = config.decoder.vocab_size, config.markov_rank
        self.rank = rank
        self.markov_w1 = empty_embedding(vocab, rank)
        self.markov_w2: nn.Module = nn.Linear(rank, vocab, bias=False)

    def start(self, rows: int) -> Tensor | None:
        """State before slot 0, or None for heads without one."""
        return None

    def embed(self, previous_ids: Tensor) -> Tensor:
        """e = W1[previous token], [..., r]; the confidence head reads it too."""
        return self.markov_w1(previous_ids)  # type: ignore[no-any-return]

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Latent [..., r] of one slot and the state after it.

        Args:
            embedded: [..., r], of the previous token.
            hidden: [..., D], backbone output at this slot.
        """
        return embedded, state

    def bias(self, latent: Tensor) -> Tensor:
        """Bias [..., V] on the base logits, from a latent [..., r]."""
        return self.markov_w2(latent)  # type: ignore[no-any-return]

    def add_bias_(self, logits: Tensor, latent: Tensor) -> None:
        """Add the bias of latents [R, r] to base logits [R, V] float32."""
        if isinstance(self.markov_w2, nn.Linear):
            logits.add_(self.bias(latent))
        else:
            cast(Any, self.markov_w2).add_to_(logits, latent)

    def pack(self, weights: CpuWeights, *, emit_vocab: int | None = None) -> None:
        """Pack the wide output projection for inference, for the first `emit_vocab` ids."""
        self.markov_w2 = pack_linear(self.markov_w2, rows=emit_vocab, weights=weights)


class GatedHead(MarkovHead):
    """Gated head: bias = W2 (sigmoid(W [h; e]) * e)."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.decoder.hidden_size + self.rank, self.rank)

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        gate = torch.sigmoid(self.gate_proj(torch.cat((hidden, embedded), -1)))
        return gate * embedded, state


class RNNHead(MarkovHead):
    """Recurrent head (Eq 6) with state s, s0 = 0."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * self.rank + config.decoder.hidden_size, 3 * self.rank)

    def start(self, rows: int) -> Tensor:
        return torch.zeros(rows, self.rank, dtype=self.markov_w1.weight.dtype, device=self.markov_w1.weight.device)

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert state is not None
        joint = self.joint_proj(torch.cat((state, embedded, hidden), -1))
        gate, candidate, output = joint.chunk(3, -1)
        keep = torch.sigmoid(gate)
        state = keep * state + (1 - keep) * torch.tanh(candidate)
        return torch.tanh(output), state


_HEADS = {"vanilla": MarkovHead, "gated": GatedHead, "rnn": RNNHead}


def build_markov_head(config: DraftConfig) -> MarkovHead | None:
    """The sequential head that the checkpoint asks for; None for rank 0 (DFlash)."""
    return _HEADS[config.markov_head_type](config) if config.markov_rank else None


class ConfidenceHead(nn.Module):
    """Logit of P(token k survives, given that those before it did), Eq 7."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_with_markov
        self.width = config.confidence_width
        self.proj = nn.Linear(self.width, 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """Confidence logits [...] float32.

        Args:
            hidden: [..., D].
            embedded: [..., r] of the previous token; used when the checkpoint's head was built with it.
        """
        features = hidden
        if self.with_markov:
            assert embedded is not None, "this confidence head needs the sequential head's embedding"
            features = torch.cat((hidden, embedded), -1)
        assert features.shape[-1] == self.width == self.proj.in_features, "confidence head width"
        # One output: a dot product in float32, whatever the model's dtype.
        return F.linear(features.float(), self.proj.weight.float(), self.proj.bias.float()).squeeze(-1)
