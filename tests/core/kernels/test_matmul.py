"""Products with packed weights: right, and the same bits in any batch, kind and number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dspark_core.kernels import storage
from dspark_core.kernels.formats import BFLOAT16, FLOAT32, GROUP_BYTES
from dspark_core.kernels.matmul import matmul
from dspark_core.kernels.source.matmul import UNPACK_ROWS
from dspark_core.kernels.source.tile import MAX_ROWS
from dspark_core.kernels.storage import pack

# (outputs, inputs): whole panels, less than one, odd numbers, wide
SHAPES = [(64, 96), (5, 32), (50, 96), (83, 1056), (3072, 576)]
COUNTS = [*range(1, 2 * MAX_ROWS + 2), UNPACK_ROWS - 1, UNPACK_ROWS, UNPACK_ROWS + 5, 63, 64, 65, 130]


@pytest.fixture(params=[1, 2, 3], ids="{} threads".format, autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def rounded(weight: Tensor, kind: int) -> Tensor:
    """The values that a kind gives back."""
    if kind == FLOAT32:
        return weight
    return weight.bfloat16().float() if kind == BFLOAT16 else storage.ROUND[kind](weight)


def run(weight: Tensor, kind: int, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    out = torch.full((len(x), len(weight)), torch.nan)
    matmul(pack(weight, kind), x, out, bias=bias, residual=residual)
    return out


@pytest.mark.parametrize("kind", GROUP_BYTES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_right_and_rows_independent(outputs: int, inputs: int, kind: int) -> None:
    weight, x = torch.randn(outputs, inputs) / inputs**0.5, torch.randn(130, inputs)
    packed, values = pack(weight, kind), rounded(weight, kind)
    out = torch.full((130, outputs), torch.nan)
    matmul(packed, x, out)
    assert (out - x.double() @ values.double().T).abs().max() < 1e-5
    for count in COUNTS:
        for start in (0, 7):
            part = torch.full((min(count, 130 - start), outputs), torch.nan)
            matmul(packed, x[start : start + count], part)
            assert torch.equal(part, out[start : start + count]), (count, start)


@pytest.mark.parametrize("kind", GROUP_BYTES)
def test_values_give_the_same_bits_in_every_kind_that_holds_them(kind: int) -> None:
    values, x = rounded(torch.randn(70, 96), kind), torch.randn(40, 96)
    for count in (1, 8, 40):
        assert torch.equal(run(values, kind, x[:count]), run(values, FLOAT32, x[:count]))


@pytest.mark.parametrize("count", [1, 3, 70])
def test_bias_and_residual_are_added_last(count: int) -> None:
    weight, bias, x, residual = torch.randn(50, 96), torch.randn(50), torch.randn(count, 96), torch.randn(count, 50)
    plain = run(weight, FLOAT32, x)
    assert torch.equal(run(weight, FLOAT32, x, bias=bias), plain + bias)
    assert torch.equal(run(weight, FLOAT32, x, residual=residual), plain + residual)
    assert torch.equal(run(weight, FLOAT32, x, bias, residual), plain + bias + residual)
    out = residual.clone()
    matmul(pack(weight, FLOAT32), x, out, residual=out)
    assert torch.equal(out, plain + residual)


def test_rows_may_lie_apart() -> None:
    wide, weight = torch.randn(9, 200), torch.randn(50, 96)
    assert torch.equal(run(weight, FLOAT32, wide[:, 30:126]), run(weight, FLOAT32, wide[:, 30:126].contiguous()))


def test_outputs_from_a_panel_on() -> None:
    weight, x = torch.randn(150, 96), torch.randn(3, 96)
    part = pack(weight, FLOAT32).part(64)
    out = torch.empty(3, 86)
    matmul(part, x, out)
    assert torch.equal(out, run(weight, FLOAT32, x)[:, 64:])


def test_nan_stays_in_its_row() -> None:
    x = torch.randn(20, 96)
    x[5, 3], x[7, 0] = torch.nan, torch.inf
    weight = torch.randn(50, 96)
    out = run(weight, FLOAT32, x)
    assert out[5].isnan().all()
    assert not out[7].isfinite().any()
    others = [row for row in range(20) if row not in (5, 7)]
    assert torch.equal(out[others], run(weight, FLOAT32, x[others]))
