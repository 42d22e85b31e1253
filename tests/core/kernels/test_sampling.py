"""Softmax of wide rows, against torch."""

from __future__ import annotations

import pytest
import torch

from dspark_core.kernels.rows import softmax
from dspark_core.kernels.source.sampling import BLOCK

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
