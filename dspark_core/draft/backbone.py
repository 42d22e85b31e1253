"""The draft model: DFlash backbone with injected context, sequential head, confidence head."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from dspark_core.config import DraftConfig
from dspark_core.draft.heads import ConfidenceHead, build_markov_head
from dspark_core.models.attention import FlatBatch
from dspark_core.models.kv_cache import KVPool
from dspark_core.models.layers import Attend, DecoderLayer, RMSNorm, empty_embedding
from dspark_core.models.linear import never_int4, pack_linear, pack_norm
from dspark_core.models.rope import Rotary
from dspark_core.models.runner import LayerRunner, make_runner
from dspark_core.settings import CpuWeights


class DraftModel(nn.Module):
    """A DSpark draft. Parameter names are DeepSpec's.

    The backbone reads [anchor, mask, mask, ...] in one pass; its attention sees the own block in both directions,
    and target features of the positions before the anchor as extra keys and values.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        decoder = config.decoder
        self.config = config
        self.embed_tokens = empty_embedding(decoder.vocab_size, decoder.hidden_size)
        self.fc: nn.Module = nn.Linear(
            len(config.target_layer_ids) * decoder.hidden_size, decoder.hidden_size, bias=False
        )
        self.hidden_norm: nn.Module = RMSNorm(decoder.hidden_size, decoder.norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(decoder, i) for i in range(decoder.num_layers))
        self.norm: nn.Module = RMSNorm(decoder.hidden_size, decoder.norm_eps)
        self.lm_head: nn.Module = nn.Linear(decoder.hidden_size, decoder.vocab_size, bias=False)
        self.markov_head = build_markov_head(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.runner: LayerRunner | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def prepare(
        self,
        *,
        max_positions: int,
        emit_vocab: int | None = None,
        lm_head: nn.Module | None = None,
        cpu_weights: CpuWeights = "exact",
    ) -> None:
        """Make ready for inference: rotary tables and packed weights. To be called once, after loading.

        Args:
            max_positions, emit_vocab: as for the target.
            lm_head: an already packed LM head to use in place of the own one (the target's, when they are equal).
            cpu_weights: as for the target; int4 is taken as int8, for a small draft loses more by it than it gains.
        """
        decoder = self.config.decoder
        weights = never_int4(cpu_weights)
        rotary = Rotary(decoder.rope, decoder.head_dim, max_positions, self.device)
        self.runner = make_runner(self.layers, decoder, rotary, weights, with_context=True)
        self.fc = pack_linear(self.fc, weights=weights)
        self.hidden_norm, self.norm = (pack_norm(cast(RMSNorm, norm)) for norm in (self.hidden_norm, self.norm))
        self.lm_head = lm_head or pack_linear(self.lm_head, rows=emit_vocab, weights=weights)
        if self.markov_head is not None:
            self.markov_head.pack(weights, emit_vocab=emit_vocab)

    def inject(self, features: Tensor) -> Tensor:
        """Context rows [..., D] from tapped target features [..., m * D]."""
        return self.hidden_norm(self.fc(features.to(self.dtype)))  # type: ignore[no-any-return]

    def block_ids(self, anchor_ids: Tensor, num_slots: int) -> Tensor:
        """Backbone input [..., K]: the anchor, then mask tokens."""
        ids = anchor_ids.unsqueeze(-1).repeat(*[1] * anchor_ids.dim(), num_slots)
        ids[..., 1:] = self.config.mask_token_id
        return ids

    def backbone(self, block_ids: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Hidden states [..., D] after the final norm, for block tokens [...]; the layers must not be packed."""
        x = self.embed_tokens(block_ids)
        for layer in self.layers:
            x = layer(x, rotary, attend)
        return self.norm(x)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def write_context(self, features: Tensor, positions: Tensor, slots: Tensor, pool: KVPool) -> None:
        """Store the draft's context keys and values of committed tokens.

        Args:
            features: [N, m * D] tapped target outputs of those tokens.
            positions, slots: [N] int64.
        """
        assert self.runner is not None, "call prepare() first"
        self.runner.write_context(self.inject(features), positions, slots, pool)

    @torch.inference_mode()
    def block_hidden(self, batch: FlatBatch, pool: KVPool) -> Tensor:
        """Backbone pass over the blocks of many requests, flat rows [N] to hidden states [N, D].

        The blocks' own keys and values go into the slots of the positions they predict from; they are dead after the
        round, when the features of the tokens committed there overwrite them.
        """
        assert self.runner is not None, "call prepare() first"
        x, _ = self.runner(self.embed_tokens(batch.token_ids), batch, pool)
        return self.norm(x)  # type: ignore[no-any-return]
