"""The target model: a decoder of the Llama or Qwen families over flat rows and paged KV memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from dspark_core.config import DecoderConfig
from dspark_core.models.attention import PagedAttend, Segment, plan_attention
from dspark_core.models.kv_cache import KVPool
from dspark_core.models.layers import DecoderLayer, RMSNorm
from dspark_core.models.packed import never_int4, pack_linear
from dspark_core.models.rope import Rotary
from dspark_core.settings import CpuWeights


@dataclass(frozen=True)
class FlatBatch:
    """Tokens of many requests in one row, each with its place.

    Attributes:
        token_ids, positions, slots: [N] int64; `slots` are where the rows' keys and values go in the pool.
        segments: which rows belong together and what they see; they cover 0..N in order.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    segments: Sequence[Segment]


@dataclass(frozen=True)
class TargetOutput:
    """Scores [M, V] float32 of the rows asked for, and tapped features [N, m * D] or None."""

    logits: Tensor
    features: Tensor | None


class TargetModel(nn.Module):
    """Decoder with an LM head. Parameter names are the checkpoint's without the leading `model.`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary: Rotary | None = None

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def prepare(
        self, *, max_positions: int, emit_vocab: int | None = None, cpu_weights: CpuWeights = "float32"
    ) -> None:
        """Make ready for inference: rotary tables and packed weights. To be called once, after loading.

        Args:
            max_positions: rows of the rotary tables.
            emit_vocab: ids from here on are padding that no tokenizer knows; they get no logit.
            cpu_weights: kind of weights of the layers. The LM head has float16 with int4: its kernel's outputs are
                bfloat16, too coarse to tell likely tokens apart.

        Raises:
            CheckpointError: this kind of weights cannot be had here.
        """
        self.rotary = Rotary(self.config.rope, self.config.head_dim, max_positions, self.device)
        for layer in self.layers:
            cast(DecoderLayer, layer).pack(cpu_weights)
        self.lm_head = pack_linear(self.lm_head, rows=emit_vocab, weights=never_int4(cpu_weights))

    @torch.inference_mode()
    def forward(
        self, batch: FlatBatch, pool: KVPool, *, logit_rows: Tensor | None = None, tap: Sequence[int] = ()
    ) -> TargetOutput:
        """One pass over a flat batch, writing its keys and values.

        Args:
            logit_rows: [M] rows whose logits are wanted; None for all rows.
            tap: layer ids whose outputs are concatenated into `features`; -1 is the embedding output.
        """
        assert self.rotary is not None, "call prepare() first"
        plan = plan_attention(batch.segments, pool=pool, num_heads=self.config.num_heads, dtype=self.dtype)
        attend = PagedAttend(plan, pool, batch.slots)
        rotary = self.rotary.at(batch.positions, self.dtype)
        x = self.embed_tokens(batch.token_ids)
        tapped = {-1: x} if -1 in tap else {}
        for number, layer in enumerate(self.layers):
            x = layer(x, rotary, attend)
            if number in tap:
                tapped[number] = x
        features = torch.cat([tapped[i] for i in tap], -1) if tap else None
        rows = x if logit_rows is None else x[logit_rows]
        return TargetOutput(self.lm_head(self.norm(rows)).float(), features)
