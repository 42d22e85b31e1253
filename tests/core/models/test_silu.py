"""The activation has the same bits wherever an element lies, for every width and number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from dspark_core.models.layers import silu

WIDTHS = [88, 2080, 4864, 14336]  # tiny; one that is no multiple of 64; Qwen2.5-0.5B; Llama 3 8B


@pytest.fixture(params=[2, 3, 5, 8])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_do_not_depend_on_the_rows_beside_them(threads: int, width: int) -> None:
    gate_up = torch.randn(40, 2 * width) * 4
    alone = torch.cat([silu(row.chunk(2, -1)[0]) for row in gate_up.split(1)])
    for rows in range(1, 41):
        assert torch.equal(silu(gate_up[:rows].chunk(2, -1)[0]), alone[:rows]), (threads, rows)


def test_it_is_silu_without_nan_at_the_ends() -> None:
    x = torch.cat((torch.linspace(-30, 30, 1001), torch.tensor([-1e4, -200.0, 200.0, 1e4])))
    torch.testing.assert_close(silu(x), F.silu(x), rtol=1e-6, atol=1e-7)
