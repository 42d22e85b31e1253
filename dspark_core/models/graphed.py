"""Decoder layers on CUDA: attention in Triton, and steps of few rows replayed as CUDA graphs.

A graph repeats exactly the same work on the same memory. So a step is padded to the next of a few row counts, and its
inputs are copied to where the graph reads them; nothing else changes from replay to replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_core.devices import tensor_on
from dspark_core.kernels import TILE_FIELDS
from dspark_core.models.attention import FlatBatch, Segment, tiles_of
from dspark_core.models.eager import EagerLayers
from dspark_core.models.kv_cache import KVPool
from dspark_core.models.triton_attention import attend as triton_attend

GRAPH_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # larger steps are no longer bound by launches
Replay = Callable[[], None]


class TritonAttend:
    """Writes a layer's keys and values into the pool, then attends by the Triton kernel."""

    def __init__(self, tiles: Tensor, tables: Tensor, pool: KVPool, slots: Tensor) -> None:
        self.tiles, self.tables, self.pool, self.slots = tiles, tables, pool, slots

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.pool.write(layer, self.slots, keys, values)
        return triton_attend(queries.contiguous(), self.pool, layer, self.tiles, self.tables)


@dataclass
class _Graph:
    """A recorded step: where it reads (rows, positions, slots, tiles, tables), how to run it again, where it writes."""

    inputs: list[Tensor]
    replay: Replay
    hidden: Tensor
    features: Tensor | None


def capture(step: Callable[[], tuple[Tensor, Tensor | None]]) -> tuple[Replay, Tensor, Tensor | None]:
    """Record a step as a CUDA graph. It runs once before, for what is compiled or allocated at a first call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden, features = step()
    return graph.replay, hidden, features


class GraphedLayers:
    """Decoder layers with graphs for few rows (see `runner.LayerRunner`).

    Args:
        layers: what a step runs.
        record: makes a step repeatable; `capture` on CUDA.
    """

    exact = False

    def __init__(self, layers: EagerLayers, record: Callable[..., tuple[Replay, Tensor, Tensor | None]] = capture):
        self.layers, self.record, self.weight_bytes = layers, record, layers.weight_bytes
        self._graphs: dict[tuple[object, ...], _Graph] = {}

    def __call__(
        self, x: Tensor, batch: FlatBatch, pool: KVPool, tap: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        rows, segments = x.shape[0], batch.segments
        size = next((count for count in GRAPH_ROWS if count >= rows), rows)
        if size > rows:
            # Rows like the last one, which write what it writes.
            last = segments[-1]
            segments = [*segments, Segment(rows, size - rows, last.last_limit, last.pages, causal=False)]
        tiles, tables = tiles_of(segments, pool.page_size)
        if rows > GRAPH_ROWS[-1]:
            attend = TritonAttend(tensor_on(x.device, tiles), tensor_on(x.device, tables), pool, batch.slots)
            return self.layers.run(x, batch.positions, attend, tap)
        # Every row may be a tile of its own; a tile of no rows does nothing.
        tiles += [[0] * TILE_FIELDS] * (size - len(tiles))
        tables += [0] * ((1 << (len(tables) - 1).bit_length()) - len(tables))
        inputs = [_padded(part, size) for part in (x, batch.positions, batch.slots)]
        inputs += [tensor_on(x.device, numbers) for numbers in (tiles, tables)]
        key = (size, len(tables), tuple(tap), pool.keys.data_ptr())
        if key not in self._graphs:
            self._graphs[key] = self._record([part.clone() for part in inputs], pool, tap)
        graph = self._graphs[key]
        for place, value in zip(graph.inputs, inputs, strict=True):
            place.copy_(value)
        graph.replay()
        return graph.hidden[:rows], None if graph.features is None else graph.features[:rows]

    def _record(self, inputs: list[Tensor], pool: KVPool, tap: Sequence[int]) -> _Graph:
        x, positions, slots, tiles, tables = inputs
        attend = TritonAttend(tiles, tables, pool, slots)
        return _Graph(inputs, *self.record(lambda: self.layers.run(x, positions, attend, tap)))

    def write_context(self, x: Tensor, positions: Tensor, slots: Tensor, pool: KVPool) -> None:
        self.layers.write_context(x, positions, slots, pool)


def _padded(rows: Tensor, size: int) -> Tensor:
    """Rows, the last one repeated up to `size`."""
    return torch.cat((rows, rows[-1:].expand(size - rows.shape[0], *rows.shape[1:]))) if size > len(rows) else rows
