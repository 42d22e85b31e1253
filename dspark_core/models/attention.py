"""Attention of a flat batch over paged keys and values: what it means, in torch operators.

Rows of many requests lie in one batch; each row sees the keys of its own request up to its own limit. This is the
reference, and what runs where no faster path is. On a CPU the kernel in `dspark_core.kernels.source.attention` does the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_core.kernels import TILE_ROWS
from dspark_core.models.kv_cache import KVPool


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of one request.

    Attributes:
        start, count: rows [start, start + count) of the flat batch.
        limit: last key position that the first row sees; row i sees `limit + i` if causal, else `limit`.
        pages: the request's page table; page j holds positions [j * page_size, (j + 1) * page_size).
    """

    start: int
    count: int
    limit: int
    pages: Sequence[int]
    causal: bool = True

    @property
    def last_limit(self) -> int:
        return self.limit + self.count - 1 if self.causal else self.limit

    def used_pages(self, page_size: int) -> Sequence[int]:
        """Pages of the positions that its rows see.

        Raises:
            IndexError: it has fewer. Kernels trust the tables, and would read what is no page.
        """
        used = self.last_limit // page_size + 1
        if used > len(self.pages):
            raise IndexError(f"rows see position {self.last_limit}, in page {used} of {len(self.pages)}")
        return self.pages[:used]


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


class PagedAttend:
    """Writes a layer's keys and values into the pool, then attends: request by request, over a copy of its pages."""

    def __init__(self, segments: Sequence[Segment], pool: KVPool, slots: Tensor) -> None:
        self.pool, self.slots = pool, slots
        self.parts = [(segment, *_pages_and_mask(segment, pool)) for segment in segments]

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Outputs [N, H, head_dim] for queries [N, H, head_dim] and the rows' own keys and values [N, KV, head_dim]."""
        self.pool.write(layer, self.slots, keys, values)
        return self.attend(layer, queries)

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """Outputs [N, H, head_dim] over what the pool holds."""
        out = torch.empty_like(queries)
        for segment, pages, mask in self.parts:
            rows = slice(segment.start, segment.start + segment.count)
            k, v = self.pool.read(layer, pages)
            own = queries[rows].transpose(0, 1)
            out[rows] = F.scaled_dot_product_attention(own, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)
        return out


def _pages_and_mask(segment: Segment, pool: KVPool) -> tuple[Tensor, Tensor]:
    """The pages [P] that a segment sees, and which of their keys each row sees [count, P * page_size]."""
    device = pool.keys.device
    pages = segment.used_pages(pool.page_size)
    limits = segment.limit + torch.arange(segment.count, device=device) * int(segment.causal)
    visible = torch.arange(len(pages) * pool.page_size, device=device) <= limits.unsqueeze(-1)
    return torch.tensor([*pages], device=device), visible


def tiles_of(segments: Sequence[Segment], page_size: int) -> tuple[list[list[int]], list[int]]:
    """Work list of the attention kernels, tiles of TILE_FIELDS numbers, and the page tables one after the other."""
    tiles: list[list[int]] = []
    pages: list[int] = []
    for segment in segments:
        step, table = int(segment.causal), len(pages)
        for first in range(0, segment.count, TILE_ROWS):
            size = min(TILE_ROWS, segment.count - first)
            tiles.append([segment.start + first, size, segment.limit + step * first, step, table])
        pages += segment.used_pages(page_size)
    return tiles, pages
