"""Attention of a flat batch over paged keys and values.

Rows of many requests lie in one batch; each row sees the keys of its own request up to its own limit. A plan is
made once per step and used by every layer: it cuts the batch into calls of `scaled_dot_product_attention`.

A row's result must have the same bits whatever rows lie beside it (notation.md, exactness). On the CPU that
takes two precautions, both found by measurement (docs/LOG.md, 2026-11-29):

* the query rows of one call entry number a multiple of 8. The flash kernel lays per-thread buffers end to end, and
  with other counts a buffer's alignment, hence the order of a GEMM's sums, depends on which thread serves it;
* keys are padded with masked ones to whole pages, and never to a number whose remainder by 512 (the kernel's key
  block) lies between 192 and 384: there the GEMM halves its sums at a place that moves with the number of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_core.models.kv_cache import KVPool

MAX_TILE = 16  # query tokens of one call entry
KEY_BLOCK = 512
UNSTABLE_TAIL = (192, 384)
COPIED_KEYS = 256  # up to here requests share a call, which copies their keys


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


def padded_keys(num_keys: int, page_size: int) -> int:
    """Number of keys that a call reads for `num_keys` visible ones: whole pages, outside the unstable range."""
    padded = -(-num_keys // page_size) * page_size
    tail = padded % KEY_BLOCK
    low, high = UNSTABLE_TAIL
    return padded + high - tail if low < tail < high else padded


@dataclass
class _Call:
    """One attention call: B entries of T rows, all of the same bucket."""

    pages: slice | Tensor  # consecutive pages, or [B, P]
    rows: Tensor | None  # [B, T] row of the flat batch; None: the batch is these rows in this order
    mask: Tensor  # [B, 1, T * G padded to a multiple of 8, L], 0 or -inf
    entries: int
    tile: int


@dataclass
class AttentionPlan:
    """How one flat batch attends; made once, applied by every layer with the same head layout."""

    calls: list[_Call] = field(default_factory=list)
    inverse: Tensor | None = None  # [N] place of each row in the concatenated outputs

    def attend(self, queries: Tensor, pool: KVPool, layer: int) -> Tensor:
        """Attention outputs [N, H, head_dim] for `queries` [N, H, head_dim]."""
        outputs = [self._run(call, queries, *pool.read(layer, call.pages)) for call in self.calls]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined if self.inverse is None else joined.index_select(0, self.inverse)

    @staticmethod
    def _run(call: _Call, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        b, t, kv = call.entries, call.tile, keys.shape[1]
        heads, dim = queries.shape[1:]
        group = heads // kv
        rows = queries if call.rows is None else queries.index_select(0, call.rows.flatten())
        q = rows.view(b, t, kv, group, dim).transpose(1, 2).reshape(b, kv, t * group, dim)
        q = F.pad(q, (0, 0, 0, call.mask.shape[2] - t * group))
        if keys.shape[0] != b:
            keys, values = keys.expand(b, -1, -1, -1), values.expand(b, -1, -1, -1)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=call.mask)[:, :, : t * group]
        return out.reshape(b, kv, t, group, dim).transpose(1, 2).reshape(b * t, heads, dim)


def plan_attention(segments: Sequence[Segment], *, pool: KVPool, num_heads: int, dtype: torch.dtype) -> AttentionPlan:
    """Cut a flat batch into attention calls.

    Args:
        segments: cover the rows 0..N in order, without gaps.
        pool: whose pages the segments name.
        num_heads: query heads H.
        dtype: of the activations; the mask is added in it.
    """
    batches: dict[tuple[int, int], list[Segment]] = {}
    for number, segment in enumerate(segments):
        # The others share a call with requests of like length, so that padding at most doubles the work.
        own = number if _alone(segment, pool) else -1
        batches.setdefault((segment.last_limit.bit_length(), own), []).append(segment)
    builder = _PlanBuilder(pool, num_heads, dtype)
    calls, order = [], []
    for batch in batches.values():
        call, rows = builder.call(batch)
        calls.append(call)
        order.extend(rows)
    return builder.finish(calls, order)


def _alone(segment: Segment, pool: KVPool) -> bool:
    """Whether a segment gets a call of its own.

    More rows than a tile holds become several entries over one set of keys. And on a CPU many keys in consecutive
    pages are read where they lie: a call costs less than copying them.
    """
    if segment.count > MAX_TILE:
        return True
    num_keys = padded_keys(segment.last_limit + 1, pool.page_size)
    in_place = _consecutive(segment.pages, num_keys // pool.page_size)
    return pool.keys.device.type == "cpu" and num_keys > COPIED_KEYS and in_place


def _consecutive(pages: Sequence[int], num_pages: int) -> bool:
    """Whether the first `num_pages` pages of a table exist and follow one another."""
    return len(pages) >= num_pages and all(pages[i] == pages[0] + i for i in range(num_pages))


class _PlanBuilder:
    def __init__(self, pool: KVPool, num_heads: int, dtype: torch.dtype) -> None:
        self.page_size, self.device = pool.page_size, pool.keys.device
        self.group, self.dtype = num_heads // pool.keys.shape[2], dtype

    def call(self, parts: list[Segment]) -> tuple[_Call, list[int]]:
        """The call for some segments, and the flat row in each of its places (-1: padding)."""
        tile = min(MAX_TILE, max(part.count for part in parts))
        places: list[int] = []
        limits: list[int] = []
        for part in parts:
            padding = -part.count % tile
            places += [*range(part.start, part.start + part.count), *[-1] * padding]
            steps = range(part.count) if part.causal else [0] * part.count
            limits += [*(part.limit + i for i in steps), *[part.last_limit] * padding]
        entries = len(places) // tile
        num_keys = padded_keys(max(part.last_limit for part in parts) + 1, self.page_size)
        mask = self._mask(torch.tensor(limits).view(entries, tile), num_keys)
        rows = torch.tensor(places).clamp_min(0).view(entries, tile).to(self.device)
        return _Call(self._pages(parts, num_keys // self.page_size), rows, mask, entries, tile), places

    def _mask(self, limits: Tensor, num_keys: int) -> Tensor:
        visible = torch.arange(num_keys) <= limits.repeat_interleave(self.group, 1).unsqueeze(-1)
        visible = F.pad(visible, (0, 0, 0, -visible.shape[1] % 8), value=True)
        mask = torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(~visible, float("-inf"))
        return mask.unsqueeze(1).to(self.device)

    def _pages(self, parts: list[Segment], num_pages: int) -> slice | Tensor:
        if len(parts) == 1 and _consecutive(parts[0].pages, num_pages):
            return slice(parts[0].pages[0], parts[0].pages[0] + num_pages)
        # Padding reads the request's own first page, so that nobody's NaN reaches a neighbour (0 * NaN is NaN).
        table = [[*part.pages[:num_pages]] for part in parts]
        table = [pages + pages[:1] * (num_pages - len(pages)) for pages in table]
        return torch.tensor(table, device=self.device)

    def finish(self, calls: list[_Call], order: list[int]) -> AttentionPlan:
        """The plan, with the way back from places to rows unless they are the same."""
        if len(calls) == 1 and order == list(range(len(order))):
            calls[0].rows = None
            return AttentionPlan(calls)
        inverse = [0] * (max(order) + 1)
        for place, row in enumerate(order):
            if row >= 0:
                inverse[row] = place
        return AttentionPlan(calls, torch.tensor(inverse, device=self.device))


class PagedAttend:
    """Writes a layer's keys and values into the pool, then attends by the plan."""

    def __init__(self, plan: AttentionPlan, pool: KVPool, slots: Tensor) -> None:
        self.plan, self.pool, self.slots = plan, pool, slots

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.pool.write(layer, self.slots, keys, values)
        return self.plan.attend(queries, self.pool, layer)
