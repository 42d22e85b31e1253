"""Building blocks shared by target decoders and draft backbones.

Parameter names equal those in the checkpoints of the Llama and Qwen families. Rows are flat: [N, D], no batch axis.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_core.config import DecoderConfig
from dspark_core.models.packed import pack_linear
from dspark_core.models.rope import rotate
from dspark_core.settings import CpuWeights


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
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj: nn.Module = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj: nn.Module = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.v_proj: nn.Module = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.o_proj: nn.Module = nn.Linear(width, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.qkv_packed: nn.Module | None = None
        self.kv_packed: nn.Module | None = None

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        queries, keys, values = self.project(x)
        if self.q_norm is None or self.k_norm is None:
            queries, keys = rotate(torch.cat((queries, keys), -2), rotary).split(
                (self.num_heads, self.num_kv_heads), -2
            )
        else:
            queries, keys = rotate(self.q_norm(queries), rotary), rotate(self.k_norm(keys), rotary)
        out = attend(self.layer, queries, keys, values)
        return self.o_proj(out.flatten(-2))  # type: ignore[no-any-return]

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of hidden rows, [..., heads, head_dim] each, before norm and rotation."""
        if self.qkv_packed is not None:
            heads = self.qkv_packed(x).unflatten(-1, (-1, self.head_dim))
            q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), -2)
            return q, k, v
        shape = (-1, self.head_dim)
        return (
            self.q_proj(x).unflatten(-1, shape),
            self.k_proj(x).unflatten(-1, shape),
            self.v_proj(x).unflatten(-1, shape),
        )

    def context(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., KV, head_dim] of injected context rows (DFlash), which ask no queries."""
        if self.kv_packed is not None:
            keys, values = self.kv_packed(x).unflatten(-1, (-1, self.head_dim)).chunk(2, -2)
        else:
            keys, values = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.k_proj, self.v_proj))
        return rotate(keys if self.k_norm is None else self.k_norm(keys), rotary), values

    def pack(self, weights: CpuWeights, *, with_context: bool) -> None:
        """Replace the projections by packed ones for inference; the originals are dropped."""
        self.qkv_packed = pack_linear(self.q_proj, self.k_proj, self.v_proj, weights=weights)
        self.kv_packed = pack_linear(self.k_proj, self.v_proj, weights=weights) if with_context else None
        self.o_proj = pack_linear(self.o_proj, weights=weights)
        self.q_proj = self.k_proj = self.v_proj = nn.Identity()


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), with the same bits wherever an element lies.

    `F.silu` is split among threads at element counts, and the ends of the parts, which may fall inside a row, take
    another exponential than the rest. `torch.exp` has one for all, and the other operations are exactly rounded.
    """
    if x.requires_grad or x.dtype != torch.float32:
        return x / (1 + torch.exp(-x))
    divisor = x.neg().exp_().add_(1)  # in place: fresh memory for every step costs more than the arithmetic
    return torch.div(x, divisor, out=divisor)


class MLP(nn.Module):
    """Gated feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        d, i = config.hidden_size, config.intermediate_size
        self.gate_proj: nn.Module = nn.Linear(d, i, bias=config.mlp_bias)
        self.up_proj: nn.Module = nn.Linear(d, i, bias=config.mlp_bias)
        self.down_proj: nn.Module = nn.Linear(i, d, bias=config.mlp_bias)
        self.gate_up_packed: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_up_packed is not None:
            gate, up = self.gate_up_packed(x).chunk(2, -1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        active = silu(gate)
        return self.down_proj(active * up if active.requires_grad else active.mul_(up))  # type: ignore[no-any-return]

    def pack(self, weights: CpuWeights) -> None:
        """Replace the projections by packed ones for inference; the originals are dropped."""
        self.gate_up_packed = pack_linear(self.gate_proj, self.up_proj, weights=weights)
        self.down_proj = pack_linear(self.down_proj, weights=weights)
        self.gate_proj = self.up_proj = nn.Identity()


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

    def pack(self, weights: CpuWeights, *, with_context: bool = False) -> None:
        """Pack for inference; `with_context` keeps a key-value projection for injected context (drafts)."""
        self.self_attn.pack(weights, with_context=with_context)
        self.mlp.pack(weights)
