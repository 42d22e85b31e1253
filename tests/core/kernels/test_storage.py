"""Kinds of packed weights: which is chosen, what they give back, what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark_core.kernels import storage
from dspark_core.kernels.formats import GROUP_BYTES, PANEL
from dspark_core.kernels.matmul import matmul
from dspark_core.kernels.storage import BFLOAT16, FLOAT16, FLOAT32, GROUP, INT4, INT8, exact_kind, pack

OUTPUTS, INPUTS = 200, 96  # no whole number of panels


def weights(outputs: int = OUTPUTS, inputs: int = INPUTS) -> Tensor:
    return torch.randn(outputs, inputs) / inputs**0.5


def of_kind(kind: int) -> Tensor:
    """Weights that this kind gives back and no smaller one."""
    if kind == FLOAT32:
        return weights()
    if kind == BFLOAT16:
        return weights().bfloat16().float()
    return storage.ROUND[kind](weights())


def q4_1(outputs: int = OUTPUTS, inputs: int = INPUTS) -> Tensor:
    """As GGUF stores Q4_1: 16 levels from a minimum, float16 both, in groups of 32."""
    codes = torch.randint(0, 16, (outputs, inputs // GROUP, GROUP))
    codes[..., 0], codes[..., 1] = 0, 15
    scale = (torch.rand(outputs, inputs // GROUP, 1) * 0.02 + 0.01).half().float()
    minimum = (-8 * scale + 0.01 * torch.randn(scale.shape)).half().float()
    return (codes * scale + minimum).flatten(1)


def q8_0(outputs: int = OUTPUTS, inputs: int = INPUTS) -> Tensor:
    """As GGUF stores Q8_0: signed bytes times a float16 scale, the largest of a group 127."""
    codes = torch.randint(-127, 128, (outputs, inputs // GROUP, GROUP))
    codes[..., 3] = torch.where(torch.rand(codes[..., 3].shape) < 0.5, -127, 127)
    scale = (torch.rand(outputs, inputs // GROUP, 1) * 1e-3).half().float()
    return (codes * scale).flatten(1)


@pytest.mark.parametrize("kind", [FLOAT32, BFLOAT16, FLOAT16, INT8, INT4])
def test_the_smallest_exact_kind_is_found(kind: int) -> None:
    assert exact_kind(of_kind(kind)) == kind


def test_weights_that_were_quantised_are_recognised() -> None:
    assert exact_kind(q4_1()) == INT4
    assert exact_kind(q8_0()) == INT8


@pytest.mark.parametrize("place", [(0, 0), (120, 50), (OUTPUTS - 1, INPUTS - 1)])
@pytest.mark.parametrize("kind", [BFLOAT16, FLOAT16, INT8, INT4])
def test_one_weight_that_does_not_fit_decides(kind: int, place: tuple[int, int]) -> None:
    weight = of_kind(kind)
    weight[place] = 0.123456789
    assert exact_kind(weight) == FLOAT32


def test_a_large_matrix_is_judged_by_all_its_parts() -> None:
    weight = torch.zeros(storage.CHUNK + 40, GROUP)
    assert exact_kind(weight) == INT4
    weight[-1, -1] = 15 / 64
    assert exact_kind(weight) == INT4
    weight[-1, :3] = torch.tensor([0.123456789, 0.2, -0.7])
    assert exact_kind(weight) == FLOAT32


@pytest.mark.parametrize("inputs", [40, 33])
def test_kinds_with_groups_need_whole_ones(inputs: int) -> None:
    assert exact_kind(torch.zeros(8, inputs)) == BFLOAT16
    assert not storage.has_whole_groups(torch.zeros(8, inputs), INT4)
    assert storage.has_whole_groups(torch.zeros(8, inputs), FLOAT16)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 7e4])
def test_values_that_float16_has_not(value: float) -> None:
    weight = q4_1()
    weight[3, 4] = value
    assert exact_kind(weight) == FLOAT32
    with pytest.raises(ValueError, match=f"the largest weight is {value:g}, expected at most 65504"):
        storage.check_roundable(weight)


def test_exact_kinds_may_hold_more_than_float16_has() -> None:
    """Of a scale and a code, or an infinity that was one in float16."""
    large = torch.zeros(32, 32)
    large[:, 0] = 120000
    assert exact_kind(large) == INT4
    infinite = weights().half().float()
    infinite[1, 0] = torch.inf
    assert exact_kind(infinite) == FLOAT16
    for weight in (large, infinite):
        out, x = torch.empty(1, len(weight)), torch.eye(weight.shape[1])[:1]
        matmul(pack(weight, exact_kind(weight)), x, out)
        assert torch.equal(out[0], weight[:, 0])


@pytest.mark.parametrize("kind", [INT8, INT4])
def test_a_negative_zero_is_another_number(kind: int) -> None:
    weight = of_kind(kind)
    weight[5, 6] = 0.0
    exact = exact_kind(weight)
    weight[5, 6] = -0.0
    assert exact_kind(weight) not in (INT8, INT4)
    assert exact in (INT8, INT4, FLOAT32)


@pytest.mark.parametrize("kind", GROUP_BYTES)
def test_bytes(kind: int) -> None:
    panels = pack(weights(), kind)
    per_weight = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2, INT8: 1 + 2 / GROUP, INT4: 0.5 + 4 / GROUP}[kind]
    assert panels.data.shape == (-(-OUTPUTS // PANEL), INPUTS * PANEL * per_weight)


def test_rounding_is_within_half_a_level() -> None:
    weight = weights()
    groups = weight.unflatten(1, (-1, GROUP))
    for kind, levels in ((INT4, groups.amax(-1) - groups.amin(-1)), (INT8, 2 * groups.abs().amax(-1))):
        step = levels / (15 if kind == INT4 else 254)
        error = (storage.ROUND[kind](weight) - weight).abs().unflatten(1, (-1, GROUP)).amax(-1)
        # Half a level, and what rounding scale and minimum to 11 bits moves the outermost levels.
        assert (error < step / 2 + 2**-10 * levels).all()
        assert (error > step / 8).any(), "or nothing was rounded"


def test_a_group_of_equal_weights_is_kept() -> None:
    weight = torch.full((16, 64), 0.25)
    weight[1] = 0
    assert torch.equal(storage.ROUND[INT4](weight), weight)
    assert torch.equal(storage.ROUND[INT8](torch.zeros(16, 64)), torch.zeros(16, 64))
