"""Building blocks shared by target decoders and draft backbones.

Parameter names equal those in the checkpoints of the Llama and Qwen families. Rows are flat: [N, D], no batch axis.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_core.config import DecoderConfig
from dspark_core.models.rope import rotate


def empty_embedding(count: int, size: int) -> nn.Embedding:
    """An embedding whose values are still to come. Drawing initial ones on the meta device imports 150 MB of code."""
    embedding: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(count, size), freeze=False)
    return embedding


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32 as the reference models do."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return self.weight * F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype)


class Attend(Protocol):
    """Stores a layer's keys and values and attends: (layer, q [N,H,d], k [N,KV,d], v [N,KV,d]) to [N,H,d]."""

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor: ...


class Attention(nn.Module):
    """Grouped-query attention; where keys are kept and who sees whom is the business of `attend`."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        queries = self._heads(self.q_proj, x)
        queries = rotate(queries if self.q_norm is None else self.q_norm(queries), rotary)
        out = attend(self.layer, queries, *self.context(x, rotary))
        return self.o_proj(out.flatten(-2))  # type: ignore[no-any-return]

    def context(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., KV, head_dim] of injected context rows (DFlash), which ask no queries."""
        keys, values = self._heads(self.k_proj, x), self._heads(self.v_proj, x)
        return rotate(keys if self.k_norm is None else self.k_norm(keys), rotary), values

    def _heads(self, projection: nn.Module, x: Tensor) -> Tensor:
        return projection(x).unflatten(-1, (-1, self.head_dim))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Gated feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        d, i = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, i, bias=config.mlp_bias)
        self.up_proj = nn.Linear(d, i, bias=config.mlp_bias)
        self.down_proj = nn.Linear(i, d, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]
