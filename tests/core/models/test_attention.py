"""Attention over pages against a softmax written out row by row; and the KV pool."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dspark_core.kernels.layers import ATTEND
from dspark_core.models.attention import PagedAttend, Segment, tiles_of
from dspark_core.models.kv_cache import KVPool, bytes_per_page
from dspark_core.models.triton_attention import attend as triton_attend

HEADS, DIM = 6, 16
Path = Callable[..., Tensor]
TOLERANCE = 1e-5  # float32 sums of up to 600 weighted values of size 1


def random_pool(
    num_pages: int,
    page_size: int = 16,
    kv_heads: int = 2,
    num_layers: int = 1,
    head_dim: int = DIM,
    dtype: torch.dtype = torch.float32,
) -> KVPool:
    pool = KVPool(
        num_layers=num_layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    pool.keys.normal_()
    pool.values.normal_()
    return pool


def attend(segments: Sequence[Segment], queries: Tensor, pool: KVPool, layer: int = 0) -> Tensor:
    """By the kernel."""
    rows = torch.cat((queries.flatten(1), torch.full((len(queries), 20), torch.nan)), 1)  # keys and values follow
    out, scale = torch.empty(len(queries), queries[0].numel()), torch.tensor([queries.shape[-1] ** -0.5])
    tiles, tables = (torch.tensor(part) for part in tiles_of(segments, pool.page_size))
    kv_heads = pool.keys.shape[2]
    ATTEND(
        len(tiles) * kv_heads, rows.data_ptr(), rows.stride(0) * 4, out.data_ptr(), tiles.data_ptr(), tables.data_ptr(),
        HEADS, kv_heads, pool.head_dim, pool.page_size, pool.values.shape[-1], pool.keys.data_ptr(),
        pool.values.data_ptr(), pool.keys.shape[1], layer, scale.data_ptr(),
    )  # fmt: skip
    return out.view_as(queries)


def readable(segments: Sequence[Segment], queries: Tensor, pool: KVPool, layer: int = 0) -> Tensor:
    """By torch operators."""
    return PagedAttend(segments, pool, torch.empty(0)).attend(layer, queries)


def interpreted(segments: Sequence[Segment], queries: Tensor, pool: KVPool, layer: int = 0) -> Tensor:
    """By the CUDA kernel, which Triton interprets."""
    return triton_attend(queries, pool, layer, *map(torch.tensor, tiles_of(segments, pool.page_size)))


def reference(segments: Sequence[Segment], queries: Tensor, pool: KVPool, layer: int = 0) -> Tensor:
    """One softmax for each row and head, in float64."""
    out = torch.empty(queries.shape, dtype=torch.float64)
    kv_heads = pool.keys.shape[2]
    size, group = pool.page_size, HEADS // kv_heads
    for segment in segments:
        for i in range(segment.count):
            last = segment.limit + i if segment.causal else segment.limit
            pages = torch.tensor([segment.pages[p // size] for p in range(last + 1)])
            places = torch.arange(last + 1) % size
            for head in range(HEADS):
                keys = pool.keys[pages, layer, head // group, :, places].double()
                values = pool.values[pages, layer, head // group, places, : queries.shape[-1]].double()
                scores = keys @ queries[segment.start + i, head].double() / queries.shape[-1] ** 0.5
                out[segment.start + i, head] = torch.softmax(scores, 0) @ values
    return out


PATHS = [attend, readable, interpreted]


def largest(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("page_size", [16, 64])
def test_random_mixes_equal_the_reference(page_size: int, kv_heads: int, path: Path) -> None:
    source = random.Random(page_size + kv_heads)
    per_request = 320 // page_size
    pool = random_pool(6 * per_request, page_size, kv_heads)
    for _ in range(6):
        pages = source.sample(range(pool.num_pages), pool.num_pages)
        segments, start = [], 0
        for number in range(source.randint(1, 5)):
            count = source.choice((1, 1, 3, 8, 16, 17, 40))
            limit = source.randrange(0, 270)
            table = pages[number * per_request : (number + 1) * per_request]
            segments.append(Segment(start, count, limit, table, causal=source.random() < 0.6))
            start += count
        queries = torch.randn(start, HEADS, DIM)
        assert largest(path(segments, queries, pool), reference(segments, queries, pool)) < TOLERANCE


def test_a_segment_that_is_not_causal_sees_its_limit_from_every_row() -> None:
    pool, queries = random_pool(4), torch.randn(5, HEADS, DIM)
    both_ways = Segment(0, 5, 20, [2, 0], causal=False)
    found = attend([both_ways], queries, pool)
    assert largest(found, reference([both_ways], queries, pool)) < TOLERANCE
    alone = [attend([Segment(0, 1, 20, [2, 0])], queries[i : i + 1], pool) for i in range(5)]
    assert torch.equal(found, torch.cat(alone))
    assert largest(found, attend([Segment(0, 5, 20, [2, 0, 1])], queries, pool)) > 0.01, "causal rows see more"


def test_each_layer_attends_over_its_own_keys() -> None:
    pool, queries = random_pool(2, num_layers=3), torch.randn(4, HEADS, DIM)
    segments = [Segment(0, 4, 11, [1])]
    for layer in range(3):
        for path in PATHS:
            found = path(segments, queries, pool, layer)
            assert largest(found, reference(segments, queries, pool, layer)) < TOLERANCE


@pytest.mark.parametrize("dim", [10, 16, 40, 64, 80])
def test_heads_of_any_width(dim: int) -> None:
    pool = random_pool(12, head_dim=dim)
    queries, segments = torch.randn(9, HEADS, dim), [Segment(0, 9, 100, [3, 1, 2, 7, 0, 11, 4])]
    for path in PATHS:
        assert largest(path(segments, queries, pool), reference(segments, queries, pool)) < TOLERANCE


def test_the_cuda_kernel_in_16_bits() -> None:
    """In float16, for Triton's interpreter gets products of bfloat16 wrong."""
    pool, queries = random_pool(12, dtype=torch.float16), torch.randn(20, HEADS, DIM).half()
    segments = [Segment(0, 3, 100, [3, 1, 2, 7, 0, 11, 4]), Segment(3, 17, 20, [5, 6, 8])]
    found, expected = interpreted(segments, queries, pool), reference(segments, queries, pool)
    assert found.dtype == torch.float16
    assert largest(found, expected) < 2e-3


def test_scores_of_any_size() -> None:
    """The running softmax never overflows, and one key may get all the weight."""
    pool = random_pool(4)
    segments, queries = [Segment(0, 3, 50, [2, 0, 3, 1])], torch.randn(3, HEADS, DIM)
    for factor in (1e-4, 30.0, 1e4):
        expected = reference(segments, queries * factor, pool)
        assert largest(attend(segments, queries * factor, pool), expected) < TOLERANCE * max(1, factor / 10)


@pytest.mark.parametrize("length", [10, 64, 70, 200, 300, 520])
def test_consecutive_and_scattered_pages_give_the_same_bits(length: int) -> None:
    pool = random_pool(96)
    in_a_row = list(range(40))
    scattered = random.Random(length).sample(range(40, 96), 40)
    for here, there in zip(in_a_row, scattered, strict=True):
        for memory in (pool.keys, pool.values):
            memory[there] = memory[here]
    own = -(-length // 16)
    for count in (1, 5, 30):
        if count > length:
            continue
        queries = torch.randn(count, HEADS, DIM)
        first = attend([Segment(0, count, length - count, in_a_row[:own])], queries, pool)
        second = attend([Segment(0, count, length - count, scattered[:own])], queries, pool)
        assert torch.equal(first, second), f"{count} rows"


def poison(pool: KVPool, pages: Sequence[int]) -> None:
    for memory in (pool.keys, pool.values):
        memory[list(pages)] = torch.nan


LENGTHS_WITH_PADDING = [5, 16, 200, 210]  # past 192 keys more pages are read than the request has


def tables_in_poison(pool: KVPool, length: int) -> Iterator[tuple[list[int], KVPool]]:
    """Page tables at the start, backwards, and at the end of the pool, each with a copy whose other pages are NaN."""
    own = -(-length // pool.page_size)
    pages = list(range(pool.num_pages))
    for table in (pages[:own], pages[:own][::-1], pages[-own:]):
        poisoned = random_pool(pool.num_pages)
        poisoned.keys.copy_(pool.keys)
        poisoned.values.copy_(pool.values)
        poison(poisoned, [page for page in pages if page not in table])
        yield table, poisoned


@pytest.mark.parametrize("length", LENGTHS_WITH_PADDING)
def test_nan_of_a_neighbour_does_not_leak(length: int) -> None:
    """Case S3: a masked NaN still turns a weight of 0 into NaN, so a neighbour's pages must not be read at all."""
    pool, queries = random_pool(40), torch.randn(4, HEADS, DIM)
    for table, poisoned in tables_in_poison(pool, length):
        own = Segment(0, 2, length - 2, table)
        expected = attend([own], queries[:2], pool)
        theirs = [page for page in range(40) if page not in table]
        assert torch.equal(attend([own, Segment(2, 2, 3, theirs)], queries, poisoned)[:2], expected)


@pytest.mark.parametrize("length", LENGTHS_WITH_PADDING)
def test_nan_of_a_request_outside_the_batch_does_not_leak(length: int) -> None:
    pool, queries = random_pool(40), torch.randn(2, HEADS, DIM)
    for table, poisoned in tables_in_poison(pool, length):
        own = [Segment(0, 2, length - 2, table)]
        assert torch.equal(attend(own, queries, poisoned), attend(own, queries, pool))


def test_rows_behind_a_request_in_its_own_page_are_not_seen() -> None:
    pool, queries = random_pool(2), torch.randn(1, HEADS, DIM)
    segment = [Segment(0, 1, 4, [1])]
    before = attend(segment, queries, pool)
    pool.keys[1, :, :, :, 5:] += 100
    pool.values[1, :, :, 5:] += 100
    assert torch.equal(attend(segment, queries, pool), before)
    pool.keys[1, :, :, :, 5:] = torch.nan
    pool.values[1, :, :, 5:] = torch.nan
    assert torch.equal(attend(segment, queries, pool), before)
    assert largest(interpreted(segment, queries, pool), before) < TOLERANCE
    pool.values[1, :, :, 4] += 1
    assert not torch.equal(attend(segment, queries, pool), before)


def test_pool_gives_back_what_was_written() -> None:
    pool = random_pool(3, num_layers=2)
    keys, values = torch.randn(3, 2, DIM), torch.randn(3, 2, DIM)
    others = pool.keys[:, 0].clone()
    pool.write(1, torch.tensor([47, 0, 17]), keys, values)
    assert torch.equal(pool.keys[:, 0], others), "another layer was written"
    found_keys, found_values = pool.read(1, torch.tensor([2, 0, 1]))
    assert found_keys.shape == found_values.shape == (2, 48, DIM)
    assert torch.equal(found_keys[:, [15, 16, 33]].transpose(0, 1), keys)
    assert torch.equal(found_values[:, [15, 16, 33]].transpose(0, 1), values)


def test_cleared_pages_are_zero_and_the_others_untouched() -> None:
    pool = random_pool(4, num_layers=2)
    poison_all = torch.full_like(pool.keys, torch.nan)
    pool.keys.copy_(poison_all)
    pool.clear([1, 3])
    assert not pool.keys[[1, 3]].any()
    assert pool.keys[[0, 2]].isnan().all()
    assert not pool.values[[1, 3]].any()
    assert pool.values[[0, 2]].all()


def test_page_sizes_that_cannot_be_padded_are_refused() -> None:
    with pytest.raises(ValueError, match="page_size is 48"):
        random_pool(1, page_size=48)


def test_page_bytes_are_those_of_the_pool() -> None:
    pool = random_pool(5, page_size=32, num_layers=3)
    size = bytes_per_page(num_layers=3, page_size=32, num_kv_heads=2, head_dim=DIM, dtype=torch.float32)
    assert 5 * size == pool.keys.nbytes + pool.values.nbytes


@pytest.mark.parametrize("causal", [True, False])
def test_a_segment_without_the_pages_that_it_sees_is_refused(causal: bool) -> None:
    segment = Segment(0, 3, 2 * 16 - 1 - 2 * causal, [4, 7], causal=causal)
    assert list(segment.used_pages(16)) == [4, 7]
    with pytest.raises(IndexError, match="page 3 of 2"):
        tiles_of([replace(segment, limit=segment.limit + 1)], 16)
