"""The one function that makes probabilities, arg-max and inverse-transform draws."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark_core.errors import RequestError
from dspark_core.sampling import Filters, SamplingParams, argmax, probabilities
from tests.core.slow import CPU, slow_probabilities

# float32 softmax and cumulative sums against float64.
TOLERANCE = 1e-5


def one_row(logits: list[float], **params: Any) -> list[float]:
    return probabilities(torch.tensor([logits]), Filters.of([SamplingParams(**params)], CPU))[0].tolist()


def random_params(source: random.Random, vocab: int) -> SamplingParams:
    return SamplingParams(
        temperature=source.choice((0.3, 0.7, 1.0, 1.5)),
        top_k=source.choice((0, -1, 1, 2, vocab // 2 + 1, vocab, vocab + 1)),
        top_p=source.choice((1.0, 1.0, 0.1, 0.5, 0.9)),
        min_p=source.choice((0.0, 0.0, 0.02, 0.3)),
    )


@pytest.mark.parametrize("vocab", [2, 5, 83, 3000])
def test_mixed_rows_equal_the_slow_reference(vocab: int) -> None:
    source = random.Random(vocab)
    for _ in range(2 if vocab == 3000 else 30):
        params = [random_params(source, vocab) for _ in range(6)]
        logits = torch.randn(6, vocab) * source.choice((0.5, 2.0, 5.0))
        found = probabilities(logits, Filters.of(params, CPU))
        assert found.dtype == torch.float32
        for row, own, settings in zip(found.tolist(), logits.tolist(), params, strict=True):
            expected = slow_probabilities(own, settings)
            assert max(abs(a - b) for a, b in zip(row, expected, strict=True)) < TOLERANCE, settings


@pytest.mark.parametrize("top_k", [5, 1500])
def test_filters_reach_past_the_tokens_that_are_ranked_first(top_k: int) -> None:
    """A flat distribution needs more than the 1024 most likely tokens to reach its top-p mass."""
    logits = torch.randn(2, 4000) * 0.1
    for params in (SamplingParams(top_p=0.9), SamplingParams(top_k=top_k), SamplingParams(top_k=top_k, top_p=0.9)):
        found = probabilities(logits, Filters.of([params, SamplingParams()], CPU))
        for row in range(2):
            expected = slow_probabilities(logits[row].tolist(), params if row == 0 else SamplingParams())
            assert (found[row] > 0).sum() == sum(p > 0 for p in expected)
            assert float((found[row] - torch.tensor(expected)).abs().max()) < TOLERANCE


def test_a_row_has_the_same_bits_beside_any_other() -> None:
    source = random.Random(1)
    for vocab in (7, 83, 1500):
        logits = torch.randn(33, vocab) * 3
        params = [random_params(source, vocab) for _ in range(33)]
        filters = Filters.of(params, CPU)
        whole = probabilities(logits, filters)
        for rows in ([0], [32], [5, 9], list(range(17)), [3, 3, 3]):
            index = torch.tensor(rows)
            assert torch.equal(probabilities(logits[index], filters.rows(index)), whole[index])
        for row in range(33):
            alone = probabilities(logits[row : row + 1], Filters.of([params[row]], CPU))[0]
            assert torch.equal(alone, whole[row]), "nor on which filters the others use"


def test_tokens_as_likely_as_the_last_one_kept_are_kept() -> None:
    quarter = [0.25] * 4
    assert one_row([1.0] * 4, top_k=1) == quarter
    assert one_row([1.0] * 4, top_k=3) == quarter
    assert one_row([1.0] * 4, top_p=0.3) == quarter
    assert one_row([1.0, 3.0, 3.0, 0.0], top_k=1) == [0.0, 0.5, 0.5, 0.0]
    assert one_row([0.0, 0.0, -1.0], min_p=1.0) == [0.5, 0.5, 0.0]


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.0},
        {"top_p": 1e-6},
        {"top_k": 1},
        {"min_p": 1.0},
        {"temperature": 1e-5},
        {"temperature": 1e-4},
        {"temperature": 1e-4, "top_p": 1e-4, "top_k": 1, "min_p": 1.0},
    ],
)
def test_extremes_leave_the_most_likely_token(params: dict[str, Any]) -> None:
    """Case B10."""
    assert one_row([1.0, 5.0, -3.0, 4.0], **params) == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("params", [{"top_k": -1}, {"top_k": 0}, {"top_k": 5}, {"top_k": 10**9}, {"top_p": 1.0}])
def test_filters_that_keep_everything_change_nothing(params: dict[str, Any]) -> None:
    assert one_row([1.0, 5.0, -3.0, 4.0], **params) == one_row([1.0, 5.0, -3.0, 4.0])


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 1e37])
def test_no_temperature_makes_anything_but_a_distribution(temperature: float, scale: float) -> None:
    logits = torch.tensor([[0.5, -2.0, 1.0, -math.inf]]) * scale
    logits[:, 3] = -math.inf
    found = probabilities(logits, Filters.of([SamplingParams(temperature=temperature, top_p=0.99)], CPU))
    assert found.isfinite().all()
    assert float(found.sum()) == pytest.approx(1, abs=1e-6)
    assert found[0, 3] == 0
    assert found[0].argmax() in (0, 2)


def test_temperature_spreads_and_sharpens() -> None:
    """Case B9: it must have an effect after filters, too."""
    sharp, plain, flat = (one_row([1.0, 2.0, 3.0], temperature=t, top_k=2)[2] for t in (0.5, 1.0, 1.5))
    assert sharp > plain > flat
    assert plain == pytest.approx(1 / (1 + math.exp(-1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_argmax_takes_the_lowest_id_of_a_tie(dtype: torch.dtype) -> None:
    values = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0], [-1.0, -2.0, -1.0, -3.0]], dtype=dtype)
    assert argmax(values).tolist() == [1, 0, 0]
    wide = torch.zeros(2, 5000, dtype=dtype)
    wide[:, [700, 4321, 4999]] = 1
    found = argmax(wide)
    assert found.tolist() == [700, 700]
    assert found.dtype == torch.int64


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-1.0, -1e-9, 1e31, math.nan, math.inf]),
        ("top_k", [-2, -100]),
        ("top_p", [-0.1, 1.0001, math.nan]),
        ("min_p", [-0.1, 1.0001, math.nan]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, math.nan]),
        ("repetition_penalty", [0.0, -1.0, math.nan, math.inf]),
        ("seed", [-1, 2**63]),
    ],
)
def test_values_out_of_range_name_their_field(field: str, values: list[float]) -> None:
    """Case B10."""
    for value in values:
        with pytest.raises(RequestError, match=field) as caught:
            SamplingParams(**{field: value})  # type: ignore[arg-type]
        assert caught.value.field == field
        assert str(value) in str(caught.value)


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (1e-8, True), (1e-4, False), (1.0, False)])
def test_tiny_temperatures_are_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_only_penalties_that_do_something_count() -> None:
    assert not SamplingParams().penalised
    for change in ({"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"repetition_penalty": 1.1}):
        assert SamplingParams(**change).penalised  # type: ignore[arg-type]


def test_filters_are_left_out_where_no_row_uses_them() -> None:
    filters = Filters.of([SamplingParams(), SamplingParams(top_k=-1)], CPU)
    assert filters.top_k is None
    assert filters.top_p is None
    assert filters.min_p is None
    mixed = Filters.of([SamplingParams(top_k=3), SamplingParams()], CPU)
    assert isinstance(mixed.top_k, Tensor)
    assert mixed.top_k.tolist() == [3, 0]
