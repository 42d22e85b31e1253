"""Kinds of CPU weights: what they compute, how far they are from the checkpoint's, and who is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_core.checkpoint.load import load_target
from dspark_core.errors import CheckpointError
from dspark_core.models import packed
from dspark_core.models.packed import (
    INT4_GROUP,
    Float16Linear,
    Float32Linear,
    Int4Linear,
    PlainLinear,
    is_row_invariant,
    pack_linear,
    quantise_int4,
)
from dspark_core.settings import CpuWeights
from tests.tiny import tiny_target_folder

KINDS: tuple[CpuWeights, ...] = ("float32", "float16", "int4")
# (outputs, inputs): multiples of everything, odd ones, one that is wide, the demo's widest
SHAPES = [(64, 96), (48, 1056), (3072, 576), (50, 96), (64, 40)]


def linear(outputs: int, inputs: int, *, bias: bool = False, seed: int = 0) -> nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(outputs, inputs, generator=generator) / inputs**0.5)
        if bias:
            layer.bias.copy_(torch.randn(outputs, generator=generator))
    return layer


def rows(count: int, inputs: int) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(1))


def dequantised(weight: Tensor) -> Tensor:
    """What the codes stand for, by the formula in their documentation."""
    codes, scales_and_zeros = quantise_int4(weight)
    scale, zero = scales_and_zeros.float().repeat_interleave(INT4_GROUP, 0).unbind(-1)
    return (codes.float() - 8) * scale.T + zero.T


@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_float32_and_float16_compute_the_layer(outputs: int, inputs: int, bias: bool) -> None:
    layer, x = linear(outputs, inputs, bias=bias), rows(19, inputs)
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    assert (pack_linear(layer)(x) - exact).abs().max() < 1e-5
    rounded = F.linear(x.double(), layer.weight.half().double(), layer.bias.double() if bias else None)
    found = pack_linear(layer, weights="float16")(x)
    assert found.dtype == torch.float32
    assert (found - rounded).abs().max() < 1e-5, "the weights are rounded, nothing else is"
    assert (rounded - exact).abs().max() > 1e-5, "or this test could not tell"


@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES[:3])
def test_int4_computes_what_its_codes_stand_for(outputs: int, inputs: int, bias: bool) -> None:
    layer = linear(outputs, inputs, bias=bias)
    x = rows(19, inputs)
    found = pack_linear(layer, weights="int4")(x)
    assert found.dtype == torch.float32
    expected = F.linear(x.bfloat16().double(), dequantised(layer.weight).double())
    expected += layer.bias if bias else 0
    # bfloat16 keeps 8 bits, of the outputs and, inside the kernel, of the weights.
    assert (found - expected).norm() / expected.norm() < 2**-8


def test_int4_weights_lie_within_half_a_level() -> None:
    weight = linear(64, 96).weight.detach()
    step = (
        weight.unflatten(1, (-1, INT4_GROUP)).aminmax(dim=-1).max - weight.unflatten(1, (-1, INT4_GROUP)).amin(-1)
    ) / 15
    error = (dequantised(weight) - weight).abs().unflatten(1, (-1, INT4_GROUP)).amax(-1)
    # Half a level, and what rounding scale and zero point to 8 bits moves the outermost levels.
    assert (error < step * (0.5 + 8 * 2**-8) + 2**-8 * weight.abs().max()).all()


def test_codes_of_weights_that_were_4_bit_come_back() -> None:
    """GGUF's Q4_1: 16 levels from a minimum, in groups of 32."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (32, 4, INT4_GROUP), generator=generator)
    codes[..., 0], codes[..., 1] = 0, 15
    scale = (torch.rand(32, 4, 1, generator=generator) * 0.02 + 0.01).half().float()
    low = (-8 * scale + 0.01 * torch.randn(32, 4, 1, generator=generator)).half().float()
    found, _ = quantise_int4((codes * scale + low).flatten(1))
    assert torch.equal(found.view_as(codes), codes.int())


def test_a_group_of_equal_weights_is_kept() -> None:
    weight = torch.full((16, 64), 0.25)
    weight[1] = 0
    assert torch.equal(dequantised(weight), weight)


@torch.inference_mode()
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (4096, 64)])
def test_a_row_has_the_same_bits_in_any_batch(weights: CpuWeights, outputs: int, inputs: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        layer, x = pack_linear(linear(outputs, inputs, bias=True), weights=weights), rows(150, inputs)
        assert is_row_invariant(layer)
        whole = layer(x)
        for count in [*range(1, 20), 31, 32, 33, 48, 64, 65, 128]:
            for start in (0, 1, 7, 22):
                assert torch.equal(layer(x[start : start + count]), whole[start : start + count]), (count, start)
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
@pytest.mark.parametrize("weights", KINDS)
def test_layers_are_joined_and_cut(weights: CpuWeights) -> None:
    parts, x = [linear(size, 64, bias=True, seed=size) for size in (32, 48, 16)], rows(5, 64)
    joined = pack_linear(*parts, weights=weights)(x)
    assert torch.equal(joined, torch.cat([pack_linear(part, weights=weights)(x) for part in parts], -1))
    assert torch.equal(pack_linear(*parts, rows=48, weights=weights)(x), joined[:, :48])


def test_shapes_that_the_int4_kernel_does_not_take_get_float16() -> None:
    kinds = [type(pack_linear(linear(*shape), weights="int4")) for shape in SHAPES]
    assert kinds == [Int4Linear, Int4Linear, Int4Linear, Float16Linear, Float16Linear]


@pytest.mark.parametrize("weights", ["float16", "int4"])
def test_other_dtypes_are_refused(weights: CpuWeights) -> None:
    layer = linear(64, 64).bfloat16()
    assert isinstance(pack_linear(layer), PlainLinear)
    with pytest.raises(
        CheckpointError, match=f"^cpu_weights is {weights}, which is for float32 layers on a CPU, found bfloat16"
    ):
        pack_linear(layer, weights=weights)


@pytest.mark.parametrize(
    ("weights", "value", "complaint"),
    [
        ("float16", 7e4, "the largest weight is 70000, expected at most 65504"),
        ("float16", float("nan"), "the largest weight is nan"),
        ("int4", float("nan"), "not finite"),
        ("int4", float("inf"), "not finite"),
    ],
)
def test_weights_that_would_become_others_are_refused(weights: CpuWeights, value: float, complaint: str) -> None:
    layer = linear(64, 64)
    with torch.no_grad():
        layer.weight[3, 4] = value
    where = rf"^cpu_weights is {weights}: a layer of shape \(64, 64\) cannot be packed: "
    with pytest.raises(CheckpointError, match=f"{where}.*{complaint}"):
        pack_linear(layer, weights=weights)


@pytest.mark.parametrize(("weights", "kind"), [("float16", Float16Linear), ("int4", Int4Linear)])
def test_a_torch_without_the_kernels_is_told(weights: CpuWeights, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(self: Any, weight: Tensor) -> Any:
        return torch.ops.quantized.no_such_operator(weight)

    monkeypatch.setattr(kind, "pack", pack)
    with pytest.raises(CheckpointError, match=f"^cpu_weights is {weights}: .* cannot be packed: .*no_such_operator"):
        pack_linear(linear(64, 64), weights=weights)


def test_float32_falls_back_with_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    layer, x = linear(64, 64), rows(3, 64)
    monkeypatch.setattr(Float32Linear, "_check_rows", lambda _: False)
    with torch.inference_mode():
        plain = pack_linear(layer)
        assert torch.equal(plain(x), F.linear(x, layer.weight))
    assert not is_row_invariant(plain)
    assert "depend on the batch" in caplog.text
    monkeypatch.setattr(packed.torch.backends.mkldnn, "is_available", lambda: False)
    assert isinstance(pack_linear(layer), PlainLinear)
    assert "no oneDNN packing" in caplog.text


@pytest.mark.parametrize("weights", KINDS)
def test_a_model_s_kinds(weights: CpuWeights, tmp_path: Path) -> None:
    """The LM head is never int4."""
    model = load_target(tiny_target_folder(tmp_path, hidden_size=64, intermediate_size=96, vocab_size=320))
    model.prepare(max_positions=32, cpu_weights=weights)
    layer = {"float32": Float32Linear, "float16": Float16Linear, "int4": Int4Linear}[weights]
    found = {type(m) for m in model.layers.modules() if isinstance(m, packed.PackedLinear | PlainLinear)}
    assert found == {layer}
    assert isinstance(model.lm_head, Float32Linear if weights == "float32" else Float16Linear)
