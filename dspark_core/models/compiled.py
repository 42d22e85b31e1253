"""Decoder layers in float32 on a CPU: packed weights, and a straight line of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from dspark_core.config import DecoderConfig
from dspark_core.devices import tensor_on
from dspark_core.kernels.launch import Program
from dspark_core.kernels.layers import ATTEND, COPY_COLUMNS, RMS_NORM, ROTATE_AND_STORE, SILU_MUL, row_tasks
from dspark_core.kernels.matmul import MATMUL, runs_of
from dspark_core.models.attention import FlatBatch, tiles_of
from dspark_core.models.kv_cache import KVPool
from dspark_core.models.layers import DecoderLayer
from dspark_core.models.linear import pack_linear
from dspark_core.models.packed import PackedLinear
from dspark_core.models.rope import Rotary
from dspark_core.settings import CpuWeights

# Where keys and values are kept, as the kernels are told; the layer's number follows.
POOL = ("page size", "value width", "keys", "values", "layers")


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
        self.norms = attention.q_norm, attention.k_norm

    @property
    def head_norms(self) -> tuple[int, int]:
        """Addresses of the weights of the norms of queries and keys, 0 for none."""
        q_norm, k_norm = (0 if norm is None else norm.weight.data_ptr() for norm in self.norms)
        return q_norm, k_norm


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
        self.eps, self.scale = torch.tensor([config.norm_eps]), torch.tensor([config.head_dim**-0.5])
        self.layers: list[_Layer] = []
        for number, original in enumerate(layers):
            self.layers.append(_Layer(cast(DecoderLayer, original), config, weights, with_context=with_context))
            layers[number] = nn.Identity()  # drops the weights before the next layer's are packed
        self.weight_bytes: dict[str, int] = {}
        for layer in self.layers:
            for part in (layer.qkv, layer.o, layer.gate_up, layer.down):
                self.weight_bytes[part.kind] = self.weight_bytes.get(part.kind, 0) + part.panels.data.nbytes
        self._programs: dict[tuple[int, ...], Program] = {}

    def __call__(
        self, x: Tensor, batch: FlatBatch, pool: KVPool, tap: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        config, rows = self.config, x.shape[0]
        tiles, pages = (tensor_on(x.device, part) for part in tiles_of(batch.segments, pool.page_size))
        features = x.new_empty(rows, len(tap) * config.hidden_size) if tap else None
        heads = config.num_heads * config.head_dim
        buffers = {
            "normed": torch.empty_like(x),
            "qkv": x.new_empty(rows, heads + 2 * config.num_kv_heads * config.head_dim),
            "attended": x.new_empty(rows, heads),
            "gate_up": x.new_empty(rows, 2 * config.intermediate_size),
            "gated": x.new_empty(rows, config.intermediate_size),
        }
        self._program(tuple(tap)).run(
            self._common(rows, batch.positions, batch.slots, pool)
            | {name: buffer.data_ptr() for name, buffer in buffers.items()}
            | {
                "x": x.data_ptr(),
                "features": 0 if features is None else features.data_ptr(),
                "tiles": tiles.data_ptr(),
                "page tables": pages.data_ptr(),
                "attention tasks": tiles.shape[0] * config.num_kv_heads,
            }
        )
        return x, features

    def write_context(self, x: Tensor, positions: Tensor, slots: Tensor, pool: KVPool) -> None:
        config, common = self.config, self._common(x.shape[0], positions, slots, pool)
        for number, layer in enumerate(self.layers):
            assert layer.context is not None, "prepared without context"
            rows = layer.context(x)
            q_norm, k_norm = layer.head_norms
            ROTATE_AND_STORE(
                common["row tasks"], rows.data_ptr(), *(table.data_ptr() for table in self.tables),
                common["positions"], common["slots"], common["rows"], 0, config.num_kv_heads, config.head_dim,
                *(common[name] for name in POOL), number, q_norm, k_norm, self.eps.data_ptr(),
            )  # fmt: skip

    def _common(self, rows: int, positions: Tensor, slots: Tensor, pool: KVPool) -> dict[str, int]:
        """Numbers that every program needs. Kernels trust them: what lies outside the tables is refused here."""
        last, slot = int(positions.max()), int(slots.max())
        if last >= len(self.tables[0]) or slot >= pool.num_pages * pool.page_size:
            raise IndexError(f"position {last} of {len(self.tables[0])}, slot {slot} of {pool.num_pages} pages")
        return {
            "rows": rows,
            "row tasks": row_tasks(rows),
            "positions": positions.data_ptr(),
            "slots": slots.data_ptr(),
            "page size": pool.page_size,
            "value width": pool.values.shape[-1],
            "keys": pool.keys.data_ptr(),
            "values": pool.values.data_ptr(),
            "layers": pool.keys.shape[1],
        }

    def _program(self, tap: tuple[int, ...]) -> Program:
        """The straight line: all layers, with copies of the tapped ones' outputs."""
        if tap not in self._programs:
            program = Program()
            self._add_copies(program, tap, -1)
            for number, layer in enumerate(self.layers):
                self._add_attention(program, number, layer)
                self._add_mlp(program, layer)
                self._add_copies(program, tap, number)
            program.freeze()
            self._programs[tap] = program
        return self._programs[tap]

    def _add_attention(self, program: Program, number: int, layer: _Layer) -> None:
        config, cache = self.config, (*POOL, number)
        heads, width = (config.num_heads, config.num_kv_heads, config.head_dim), layer.qkv.out_features * 4
        cos, sin = (table.data_ptr() for table in self.tables)
        self._add_norm(program, layer.attention_norm)
        _add_product(program, layer.qkv, "normed", "qkv")
        program.add(
            ROTATE_AND_STORE, "row tasks", "qkv", cos, sin, "positions", "slots", "rows", *heads, *cache,
            *layer.head_norms, self.eps.data_ptr(),
        )  # fmt: skip
        program.add(
            ATTEND, "attention tasks", "qkv", width, "attended", "tiles", "page tables", *heads, *cache,
            self.scale.data_ptr(),
        )  # fmt: skip
        _add_product(program, layer.o, "attended", "x", residual="x")

    def _add_mlp(self, program: Program, layer: _Layer) -> None:
        self._add_norm(program, layer.mlp_norm)
        _add_product(program, layer.gate_up, "normed", "gate_up")
        program.add(SILU_MUL, "row tasks", "gate_up", "gated", "rows", self.config.intermediate_size)
        _add_product(program, layer.down, "gated", "x", residual="x")

    def _add_norm(self, program: Program, weight: Tensor) -> None:
        size, eps = self.config.hidden_size, self.eps.data_ptr()
        program.add(RMS_NORM, "row tasks", "x", weight.data_ptr(), "normed", "rows", size, eps)

    def _add_copies(self, program: Program, tap: tuple[int, ...], layer: int) -> None:
        size = self.config.hidden_size
        for place, number in enumerate(tap):
            if number == layer:
                stride = len(tap) * size * 4
                program.add(COPY_COLUMNS, "row tasks", "x", "features", "rows", size, stride, place * size * 4)


def _add_product(program: Program, linear: PackedLinear, x: str, out: str, *, residual: str | int = 0) -> None:
    panels, bias = linear.panels, 0 if linear.bias is None else linear.bias.data_ptr()
    stride = panels.inputs * 4
    program.add(
        MATMUL[panels.kind], runs_of(panels), x, stride, panels.address, bias, residual, out, "rows", panels.inputs,
        panels.outputs,
    )  # fmt: skip
