"""Decoder layers in torch operators: readable, on every device and in every dtype (see `runner.LayerRunner`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark_core.models.attention import FlatBatch, PagedAttend
from dspark_core.models.kv_cache import KVPool
from dspark_core.models.layers import Attend, DecoderLayer
from dspark_core.models.rope import Rotary


class EagerLayers:
    """Decoder layers as they stand, attention by the reference."""

    exact = False

    def __init__(self, layers: Sequence[DecoderLayer], rotary: Rotary) -> None:
        self.layers, self.rotary = list(layers), rotary
        kind = str(layers[0].self_attn.o_proj.weight.dtype).removeprefix("torch.")
        self.weight_bytes = {kind: sum(p.nbytes for layer in layers for p in layer.parameters())}

    def __call__(
        self, x: Tensor, batch: FlatBatch, pool: KVPool, tap: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        return self.run(x, batch.positions, PagedAttend(batch.segments, pool, batch.slots), tap)

    def run(self, x: Tensor, positions: Tensor, attend: Attend, tap: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """All layers, whatever attends."""
        rotary = self.rotary.at(positions, x.dtype)
        tapped = {-1: x} if -1 in tap else {}
        for number, layer in enumerate(self.layers):
            x = layer(x, rotary, attend)
            if number in tap:
                tapped[number] = x
        return x, torch.cat([tapped[i] for i in tap], -1) if tap else None

    def write_context(self, x: Tensor, positions: Tensor, slots: Tensor, pool: KVPool) -> None:
        rotary = self.rotary.at(positions, x.dtype)
        for number, layer in enumerate(self.layers):
            pool.write(number, slots, *layer.self_attn.context(x, rotary))
