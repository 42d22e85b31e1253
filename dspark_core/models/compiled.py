"""Decoder layers in float32 on a CPU: packed weights, and a straight line of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from dspark_core.config import DecoderConfig
from dspark_core.kernels.attention import TILE_ROWS, attend
from dspark_core.kernels.matmul import matmul
from dspark_core.kernels.pointwise import rms_norm, rotate_and_store, silu_mul
from dspark_core.models.attention import Segment
from dspark_core.models.kv_cache import KVPool
from dspark_core.models.layers import DecoderLayer
from dspark_core.models.linear import pack_linear
from dspark_core.models.packed import PackedLinear
from dspark_core.models.rope import Rotary
from dspark_core.settings import CpuWeights


class _Layer:
    """One layer's packed weights."""

    def __init__(self, layer: DecoderLayer, config: DecoderConfig, weights: CpuWeights, *, with_context: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = _pack(attention.q_proj, attention.k_proj, attention.v_proj, weights=weights)
        self.context: PackedLinear | None = None
        if with_context:
            own = self.qkv.part(config.num_heads * config.head_dim)
            self.context = own or _pack(attention.k_proj, attention.v_proj, weights=weights)
        self.o = _pack(attention.o_proj, weights=weights)
        self.gate_up = _pack(mlp.gate_proj, mlp.up_proj, weights=weights)
        self.down = _pack(mlp.down_proj, weights=weights)
        self.attention_norm = layer.input_layernorm.weight.detach()
        self.mlp_norm = layer.post_attention_layernorm.weight.detach()
        self.head_norms: tuple[Tensor, Tensor] | None = None
        if attention.q_norm is not None and attention.k_norm is not None:
            self.head_norms = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()


def _pack(*linears: nn.Module, weights: CpuWeights) -> PackedLinear:
    return cast(PackedLinear, pack_linear(*linears, weights=weights))


class CompiledLayers:
    """Decoder layers in kernels (see `runner.LayerRunner`)."""

    exact = True

    def __init__(
        self,
        layers: nn.ModuleList,
        config: DecoderConfig,
        rotary: Rotary,
        weights: CpuWeights,
        *,
        with_context: bool = False,
    ) -> None:
        self.config, self.tables = config, (rotary.cos, rotary.sin)
        self.layers: list[_Layer] = []
        for number, original in enumerate(layers):
            self.layers.append(_Layer(cast(DecoderLayer, original), config, weights, with_context=with_context))
            layers[number] = nn.Identity()  # drops the weights before the next layer's are packed
        self.weight_bytes: dict[str, int] = {}
        for layer in self.layers:
            for part in (layer.qkv, layer.o, layer.gate_up, layer.down):
                self.weight_bytes[part.kind] = self.weight_bytes.get(part.kind, 0) + part.panels.data.nbytes
        self.eps = torch.tensor([config.norm_eps])
        self.scale = torch.tensor([config.head_dim**-0.5])

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        slots: Tensor,
        segments: Sequence[Segment],
        pool: KVPool,
        tap: Sequence[int] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        config, rows = self.config, len(x)
        tiles, pages = tiles_of(segments, pool.page_size)
        normed = torch.empty_like(x)
        qkv = x.new_empty(rows, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        attended = x.new_empty(rows, config.num_heads * config.head_dim)
        gate_up, gated = x.new_empty(rows, 2 * config.intermediate_size), x.new_empty(rows, config.intermediate_size)
        tapped = {-1: x.clone()} if -1 in tap else {}
        for number, layer in enumerate(self.layers):
            keys, values = pool.keys[number], pool.values[number]
            rms_norm(x, layer.attention_norm, self.eps, normed)
            matmul(layer.qkv.panels, normed, qkv, bias=layer.qkv.bias)
            rotate_and_store(qkv, self.tables, positions, slots, keys, values, layer.head_norms, self.eps)
            attend(qkv, keys, values, attended, tiles, pages, self.scale)
            matmul(layer.o.panels, attended, x, bias=layer.o.bias, residual=x)
            rms_norm(x, layer.mlp_norm, self.eps, normed)
            matmul(layer.gate_up.panels, normed, gate_up, bias=layer.gate_up.bias)
            silu_mul(gate_up, gated)
            matmul(layer.down.panels, gated, x, bias=layer.down.bias, residual=x)
            if number in tap:
                tapped[number] = x.clone()
        return x, tapped

    def write_context(self, x: Tensor, positions: Tensor, slots: Tensor, pool: KVPool) -> None:
        for number, layer in enumerate(self.layers):
            assert layer.context is not None, "prepared without context"
            rotate_and_store(
                layer.context(x), self.tables, positions, slots, pool.keys[number], pool.values[number],
                layer.head_norms, self.eps,
            )  # fmt: skip


def tiles_of(segments: Sequence[Segment], page_size: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Attention's work list, and the page tables one after the other."""
    tiles: list[tuple[int, int, int, int, int]] = []
    pages: list[int] = []
    for segment in segments:
        step, table = int(segment.causal), len(pages)
        for first in range(0, segment.count, TILE_ROWS):
            size = min(TILE_ROWS, segment.count - first)
            tiles.append((segment.start + first, size, segment.limit + step * first, step, table))
        pages += segment.pages[: segment.last_limit // page_size + 1]
    return np.array(tiles, np.int64), np.array(pages, np.int64)
