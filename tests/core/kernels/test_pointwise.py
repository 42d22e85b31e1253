"""Norm, rotation and storing, gating: against torch, and row by row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_core.kernels.layers import (
    COPY_COLUMNS,
    GATHER_ROWS,
    RMS_NORM,
    ROTATE_AND_STORE,
    ROWS_PER_TASK,
    SILU_MUL,
    row_tasks,
)
from dspark_core.models.kv_cache import KVPool
from dspark_core.models.rope import RopeConfig, Rotary, rotate

EPS = torch.tensor([1e-5])
COUNTS = [1, 2, ROWS_PER_TASK, ROWS_PER_TASK + 1, 70]


def gated(gate_up: Tensor) -> Tensor:
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = torch.full((rows, size), torch.nan)
    SILU_MUL(row_tasks(rows), gate_up.data_ptr(), out.data_ptr(), rows, size)
    return out


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return norm_into(x, weight, torch.full_like(x, torch.nan))


def norm_into(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    RMS_NORM(row_tasks(len(x)), x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, EPS.data_ptr())
    return out


@pytest.mark.parametrize("size", [5, 16, 40, 576])
def test_norm(size: int) -> None:
    x, weight = torch.randn(70, size) * torch.logspace(-4, 4, 70).unsqueeze(-1), torch.randn(size)
    expected = F.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    found = normed(x, weight)
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=1e-6)
    for count in COUNTS:
        assert torch.equal(normed(x[:count], weight), found[:count])
    assert torch.equal(norm_into(x, weight, x), found), "in place"


@pytest.mark.parametrize("size", [5, 16, 40, 1536])
def test_gating(size: int) -> None:
    gate_up = torch.randn(70, 2 * size) * 4
    expected = F.silu(gate_up[:, :size].double()) * gate_up[:, size:].double()
    found = gated(gate_up)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)
    for count in COUNTS:
        assert torch.equal(gated(gate_up[:count]), found[:count])


@pytest.mark.parametrize("size", [16, 21])
def test_gating_at_the_ends(size: int) -> None:
    """No overflow for large values, and what is not finite stays so."""
    values = [-1e4, -200.0, -88.5, -87.0, -1e-30, 0.0, 87.0, 88.5, 200.0, 1e4, torch.inf, torch.nan]
    for value in values:
        gate_up = torch.cat((torch.full((1, size), value), torch.ones(1, size)), 1)
        expected = F.silu(gate_up[:, :size])
        torch.testing.assert_close(gated(gate_up), expected, rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 3, 10), (9, 3, 64), (0, 2, 16)])
def test_rotation_and_storing(heads: int, kv_heads: int, dim: int, norms: bool) -> None:
    rows, page_size = 40, 16
    rotary = Rotary(RopeConfig(), dim, 200, torch.device("cpu"))
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim)
    positions, slots = torch.randperm(200)[:rows], torch.randperm(5 * page_size)[:rows]
    sizes = {"num_layers": 2, "num_pages": 5, "page_size": page_size, "num_kv_heads": kv_heads, "head_dim": dim}
    pool, expected = (KVPool(**sizes, dtype=torch.float32, device=torch.device("cpu")) for _ in range(2))
    weights = (torch.randn(dim), torch.randn(dim)) if norms else None
    queries, keys, values = qkv.split((heads, kv_heads, kv_heads), 1)
    if weights:
        queries, keys = (F.rms_norm(x, (dim,), w, 1e-5) for x, w in zip((queries, keys), weights, strict=True))
    angles = rotary.at(positions, torch.float32)
    queries, keys = rotate(queries, angles), rotate(keys, angles)
    expected.write(1, slots, keys, values)
    flat = qkv.flatten(1).clone()
    layer = (page_size, pool.values.shape[-1], pool.keys.data_ptr(), pool.values.data_ptr(), 2, 1)
    q_norm, k_norm = (weight.data_ptr() for weight in weights) if weights else (0, 0)
    ROTATE_AND_STORE(
        row_tasks(rows), flat.data_ptr(), rotary.cos.data_ptr(), rotary.sin.data_ptr(), positions.data_ptr(),
        slots.data_ptr(), rows, heads, kv_heads, dim, *layer, q_norm, k_norm, EPS.data_ptr(),
    )  # fmt: skip
    close = {"rtol": 1e-5, "atol": 1e-5} if norms else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(pool.keys, expected.keys, **close)
    torch.testing.assert_close(pool.values, expected.values, rtol=0, atol=0)
    if heads:
        torch.testing.assert_close(flat.view(qkv.shape)[:, :heads], queries, **close)


@pytest.mark.parametrize("rows", [1, 20])
def test_copies_side_by_side(rows: int) -> None:
    parts, wide = [torch.randn(rows, 7) for _ in range(3)], torch.full((rows, 21), torch.nan)
    for place, part in enumerate(parts):
        COPY_COLUMNS(row_tasks(rows), part.data_ptr(), wide.data_ptr(), rows, 7, 21 * 4, place * 7 * 4)
    assert torch.equal(wide, torch.cat(parts, 1))


def test_rows_of_a_table() -> None:
    table, ids, out = torch.randn(9, 7), torch.tensor([3, 8, 0, -1]), torch.full((4, 7), torch.nan)
    GATHER_ROWS(len(ids), ids.data_ptr(), table.data_ptr(), out.data_ptr(), 7)
    assert torch.equal(out, table[[3, 8, 0, 0]]), "no choice is the first row"
