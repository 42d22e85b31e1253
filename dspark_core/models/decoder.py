"""The target model: a decoder of the Llama or Qwen families over flat rows and paged KV memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from dspark_core.config import DecoderConfig
from dspark_core.models.attention import FlatBatch
from dspark_core.models.kv_cache import KVPool
from dspark_core.models.layers import DecoderLayer, RMSNorm, empty_embedding
from dspark_core.models.linear import never_int4, pack_linear, pack_norm, stored_as
from dspark_core.models.rope import Rotary
from dspark_core.models.runner import LayerRunner, make_runner
from dspark_core.settings import CpuWeights


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
        self.embed_tokens = empty_embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm: nn.Module = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.runner: LayerRunner | None = None

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Memory of the weights that a pass reads, LM head included, by the kind of number they are stored as."""
        assert self.runner is not None, "call prepare() first"
        sizes, (kind, size) = dict(self.runner.weight_bytes), stored_as(self.lm_head)
        return sizes | {kind: sizes.get(kind, 0) + size}

    def prepare(self, *, max_positions: int, emit_vocab: int | None = None, cpu_weights: CpuWeights = "exact") -> None:
        """Make ready for inference: rotary tables and packed weights. To be called once, after loading.

        Args:
            max_positions: rows of the rotary tables.
            emit_vocab: ids from here on are padding that no tokenizer knows; they get no logit.
            cpu_weights: kind of weights on a CPU; the LM head is never rounded to less than 8 bits.

        Raises:
            CheckpointError: this kind of weights cannot be had here.
        """
        rotary = Rotary(self.config.rope, self.config.head_dim, max_positions, self.device)
        self.runner = make_runner(self.layers, self.config, rotary, cpu_weights)
        self.norm = pack_norm(cast(RMSNorm, self.norm))
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
        assert self.runner is not None, "call prepare() first"
        x = self.embed_tokens(batch.token_ids)
        x, features = self.runner(x, batch, pool, tap)
        rows = x if logit_rows is None else x[logit_rows]
        return TargetOutput(self.lm_head(self.norm(rows)).float(), features)
