"""Values of the host on a device."""

from __future__ import annotations

import pytest
import torch

from dspark_core.devices import tensor_on


@pytest.mark.parametrize("values", [[], [3, -1], [[1, 2], [3, 4]], [(1, 2), (3, 4)], [2**62]])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_values_of_the_host_arrive_as_they_are(values: list[int], dtype: torch.dtype) -> None:
    made = tensor_on(torch.device("cpu"), values, dtype)
    assert made.dtype == dtype
    assert torch.equal(made, torch.tensor(values, dtype=dtype))
