"""Drawing from rows of probabilities, and the coupled choice among them."""

from __future__ import annotations

import pytest
import torch

from dspark_core import distributions
from dspark_core.distributions import Probabilities


def draw_all(weights: list[float], us: list[float]) -> list[int]:
    return Probabilities(torch.tensor([weights] * len(us))).draw(torch.tensor(us, dtype=torch.float64)).tolist()


def test_draw_inverts_the_cumulative_sum() -> None:
    weights = [1.0, 0.0, 2.0, 1.0]
    assert draw_all(weights, [0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 0.9999]) == [0, 0, 2, 2, 2, 3, 3]


def test_draw_never_returns_a_token_of_weight_zero() -> None:
    last = 1 - 2.0**-53  # the largest u
    for weights in (
        [0.0, 0.0, 1.0, 0.0, 0.0],
        [0.0, 1e-38, 0.0],
        [0.0, 0.1, 0.2, 0.3, 0.0],
        [0.0] * 999 + [1e-45] + [0.0] * 1000,  # the smallest float32
        [0.0, 3e38, 3e38, 0.0],
    ):
        for token in draw_all(weights, [0.0, 1e-300, 0.3, 0.5, 0.999, last]):
            assert weights[token] > 0
    generator = torch.Generator().manual_seed(0)
    many = torch.rand(2000, 40, generator=generator) * (torch.rand(2000, 40, generator=generator) < 0.2)
    many[:, 7] += 1e-6
    u = torch.rand(2000, dtype=torch.float64, generator=generator)
    assert (many.gather(1, Probabilities(many).draw(u).unsqueeze(-1)) > 0).all()


def test_draws_follow_the_weights() -> None:
    weights = torch.tensor([0.1, 0.2, 0.0, 0.4, 0.3])
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000  # a grid leaves no room for chance
    counts = torch.bincount(Probabilities(weights.expand(100_000, -1)).draw(u), minlength=5)
    expected = torch.tensor([10_000, 20_000, 0, 40_000, 30_000])
    assert (counts - expected).abs().max() <= 1


@pytest.mark.parametrize(
    ("noise", "expected"),
    [
        ([0.0, 0.0, 0.0, 0.0], 0),
        ([0.0, 0.7, 0.0, 0.0], 1),  # log 2 = 0.693
        ([0.0, 0.69, 0.0, 0.0], 0),
        ([0.0, 0.8, 0.9, 0.0], 2),
        ([-50.0, -50.0, -50.0, 1e6], 0),  # a filtered token is never chosen
    ],
)
def test_coupled_choice_is_log_probability_plus_noise(
    noise: list[float], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    probs, one = torch.tensor([[0.5, 0.25, 0.25, 0.0]]), torch.zeros(1, dtype=torch.int64)
    monkeypatch.setattr(distributions, "gumbel", lambda *_: torch.tensor([noise], dtype=torch.float64))
    assert Probabilities(probs).couple(one, one).tolist() == [expected]
