"""Values at the ends of what is allowed neither end the engine nor leave the vocabulary."""

from __future__ import annotations

from typing import Any

import pytest

from dspark_core.errors import RequestError
from dspark_core.sampling import SamplingParams
from server.request import RequestParams
from tests.server.engines import run_one
from tests.server.test_async_engine import PROMPT, tiny


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize(
    "values",
    [
        {"top_k": 2**63},
        {"top_k": 2**200, "top_p": 0.5},
        {"top_p": 0.0},
        {"temperature": 1e-4},
        {"temperature": 1e30},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100.0},
        {"presence_penalty": -2.0, "frequency_penalty": -2.0},
    ],
)
def test_extreme_values_are_served(values: dict[str, Any], speculative: bool, seed: int | None) -> None:
    engine = tiny()
    params = RequestParams(SamplingParams(**values, seed=seed), max_tokens=12, ignore_eos=True, speculative=speculative)
    result = run_one(engine, PROMPT, params)
    assert result.last.finish_reason == "length"
    assert all(0 <= token < engine.vocab_size for token in result.ids)


@pytest.mark.parametrize("value", [1e-40, 0.0, -1.0, 1e6, float("inf"), float("nan")])
def test_penalties_that_cannot_give_finite_scores_are_refused(value: float) -> None:
    with pytest.raises(RequestError, match="repetition_penalty"):
        SamplingParams(repetition_penalty=value)
