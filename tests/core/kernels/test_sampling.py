"""Softmax and draws of wide rows, against torch and against the sums they invert."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark_core.kernels.sampling import BLOCK, draw, softmax

SIZES = [1, 5, 16, 100, BLOCK, BLOCK + 1, 5000, 49152]


@pytest.mark.parametrize("size", SIZES)
def test_softmax(size: int) -> None:
    logits, temperature = torch.randn(6, size) * 5, torch.tensor([1.0, 0.3, 2.0, 1e-5, 1e3, 1.0])
    logits[5, : size - 1] = -torch.inf
    for divisors in (None, temperature):
        expected = torch.softmax(logits.double() / (1 if divisors is None else divisors.unsqueeze(-1)), -1)
        found = softmax(logits, divisors)
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=1e-37)
        assert (found.double().sum(-1) - 1).abs().max() < 1e-6
        rows = [
            softmax(row, None if divisors is None else divisors[i : i + 1]) for i, row in enumerate(logits.split(1))
        ]
        assert torch.equal(found, torch.cat(rows)), "a row depends on itself alone"


def test_softmax_of_what_is_not_finite() -> None:
    logits = torch.zeros(3, 100)
    logits[0, 99], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    assert softmax(logits, None)[0, 99].isnan()
    assert softmax(logits, None).isnan().any(-1).all(), "no row passes for a distribution"


def weights_of(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(4, size, generator=generator) ** 8
    weights[1] *= torch.rand(size, generator=generator) < 0.02
    weights[1, size // 2] = 1e-3
    weights[2] = 0
    weights[2, size - 1 if seed % 2 else 0] = 1e-30
    return weights


@pytest.mark.parametrize("size", SIZES)
def test_draws_invert_the_cumulative_sum(size: int) -> None:
    for seed in range(20):
        weights = weights_of(size, seed)
        cumulative = weights.double().cumsum(-1)
        for u in (0.0, 1 - 2**-53, *torch.rand(5, dtype=torch.float64).tolist()):
            chosen = draw(weights, torch.full((4,), u, dtype=torch.float64))
            rows = torch.arange(4)
            assert (weights[rows, chosen] > 0).all(), "an index without weight is never drawn"
            point, slack = u * cumulative[:, -1], 1e-12 * cumulative[:, -1]
            assert (cumulative[rows, chosen] >= point - slack).all()
            assert (cumulative[rows, chosen] - weights[rows, chosen].double() <= point + slack).all()


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_rows_without_a_distribution_do_not_leave_the_row(value: float) -> None:
    chosen = draw(torch.full((2, 1000), value), torch.tensor([0.0, 0.9], dtype=torch.float64))
    assert ((chosen >= 0) & (chosen < 1000)).all()
