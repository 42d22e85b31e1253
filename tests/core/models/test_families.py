"""Every supported family computes what Transformers' own model computes, from folders that Transformers wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dspark_core.checkpoint.load import load_target
from dspark_core.errors import CheckpointError
from dspark_core.models.decoder import TargetModel, TargetOutput
from tests.paged import flat_batch, make_pool
from tests.tiny import edit_json, tiny_target_folder

# Two float32 implementations with other orders of summation; logits here are of size 1 to 10.
TOLERANCE = 1e-4
LENGTH = 60

SIZES: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 40,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / num_attention_heads
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8.0,  # with the default of 32 turns no dimension of so small a model is blended
    "beta_slow": 1.0,
}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}

CASES: dict[str, tuple[type[PreTrainedModel], Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama, all heads keys": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "llama, one key head": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "llama, tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama, biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama, epsilon": (LlamaForCausalLM, LlamaConfig, {"rms_norm_eps": 0.1}),
    "llama, llama3 rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama, linear rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LINEAR}),
    "llama, yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN}),
    "llama, yarn, untruncated": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": {**YARN, "truncate": False}}),
    "llama, yarn, mscale": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.4}},
    ),
    "llama, yarn, scaled": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"head_dim": 10}),
    "qwen2, tied, theta": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {
            "head_dim": 10,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "qwen3, biases, tied": (Qwen3ForCausalLM, Qwen3Config, {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3, yarn": (Qwen3ForCausalLM, Qwen3Config, {"rope_parameters": YARN}),
}


def save_random(case: str, folder: Path) -> PreTrainedModel:
    """A model of Transformers with weights of useful size, and its folder."""
    model_class, config_class, overrides = CASES[case]
    model = model_class(config_class(**{**SIZES, **overrides}))
    model.train(mode=False)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, spread)
    model.save_pretrained(folder)
    return model


def run(model: TargetModel, ids: list[int], tap: tuple[int, ...] = ()) -> TargetOutput:
    output: TargetOutput = model(flat_batch([(ids, 0, list(range(8)))]), make_pool(model, 8), tap=tap)
    return output


def prepared(folder: Path, **options: Any) -> TargetModel:
    model = load_target(folder, **options)
    model.prepare(max_positions=128)
    return model


def largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("case", CASES)
def test_logits_and_layer_outputs_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs = save_random(case, tmp_path)
    ours = prepared(tmp_path)
    ids = torch.randint(0, 83, (LENGTH,))
    with torch.no_grad():
        expected = theirs(ids.unsqueeze(0), output_hidden_states=True)
    taps = (1, -1, 0)
    output = run(ours, ids.tolist(), taps)
    assert expected.logits[0].std() > 0.5, "near-constant logits would hide errors"
    assert largest(output.logits, expected.logits[0]) < TOLERANCE
    hidden = torch.cat([expected.hidden_states[layer + 1][0] for layer in taps], -1)
    assert output.features is not None
    assert largest(output.features, hidden) < TOLERANCE


@pytest.mark.parametrize("case", [c for c in CASES if CASES[c][2].get("rope_parameters")])
def test_both_layouts_of_rope_settings_mean_the_same(case: str, tmp_path: Path) -> None:
    """Case R8."""
    save_random(case, tmp_path)
    ids = torch.randint(0, 83, (LENGTH,)).tolist()
    new = run(prepared(tmp_path), ids).logits
    settings = dict(json.loads((tmp_path / "config.json").read_text())["rope_parameters"])
    theta = settings.pop("rope_theta")
    scaling = None if settings == {"rope_type": "default"} else settings
    edit_json(tmp_path / "config.json", rope_parameters=None, rope_theta=theta, rope_scaling=scaling)
    assert torch.equal(run(prepared(tmp_path), ids).logits, new)
    if scaling:
        edit_json(tmp_path / "config.json", rope_scaling={**settings, "rope_type": None, "type": scaling["rope_type"]})
        assert torch.equal(run(prepared(tmp_path), ids).logits, new), "the older key 'type'"
    edit_json(tmp_path / "config.json", rope_theta=theta * 2)
    assert not torch.equal(run(prepared(tmp_path), ids).logits, new), "rope_theta must count"


@pytest.mark.parametrize("settings", [YARN, LLAMA3])
def test_the_original_length_defaults_to_the_context(settings: dict[str, Any], tmp_path: Path) -> None:
    # As Transformers reads such files: max_position_embeddings, 256 here.
    folder, key = tiny_target_folder(tmp_path), "original_max_position_embeddings"
    rotaries = []
    for scaling in ({**settings, key: 256}, {k: v for k, v in settings.items() if k != key}, settings):
        edit_json(folder / "config.json", rope_scaling=scaling)
        rotaries.append(prepared(folder).runner.tables[0])  # type: ignore[union-attr]
    assert torch.equal(rotaries[1], rotaries[0])
    assert not torch.equal(rotaries[2], rotaries[0])


def test_the_tap_order_is_the_one_asked_for(tmp_path: Path) -> None:
    model = prepared(tiny_target_folder(tmp_path))
    first, second = run(model, [5, 6, 7], (0, 2)).features, run(model, [5, 6, 7], (2, 0)).features
    assert first is not None
    assert second is not None
    assert torch.equal(first, second.roll(32, -1))
    assert run(model, [5, 6, 7]).features is None
    embedded = run(model, [5, 6, 7], (-1,)).features
    assert embedded is not None
    assert torch.equal(embedded, model.embed_tokens.weight[[5, 6, 7]])


def test_only_the_rows_asked_for_get_logits(tmp_path: Path) -> None:
    model = prepared(tiny_target_folder(tmp_path))
    batch = flat_batch([([5, 6, 7, 8], 0, [0]), ([9, 10], 0, [1])])
    whole = model(batch, make_pool(model, 2)).logits
    some = model(batch, make_pool(model, 2), logit_rows=torch.tensor([5, 2])).logits
    assert torch.equal(some, whole[[5, 2]])


def test_ids_past_the_emitted_vocabulary_get_no_logit(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    whole, cut = load_target(folder), load_target(folder)
    whole.prepare(max_positions=64)
    cut.prepare(max_positions=64, emit_vocab=200)
    expected = run(whole, [5, 258, 6]).logits[:, :200]
    found = run(cut, [5, 258, 6]).logits
    assert found.shape == (3, 200)
    assert largest(found, expected) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    ids = torch.randint(2, 250, (40,)).tolist()
    exact, rounded = run(prepared(folder), ids).logits, run(prepared(folder, dtype=dtype), ids, (0, 2))
    assert rounded.logits.dtype == torch.float32
    assert rounded.features is not None
    assert rounded.features.dtype == dtype
    # bfloat16 keeps 8 bits: relative errors of 2**-8 a layer, of logits with standard deviation 3.
    assert largest(rounded.logits, exact) < (0.5 if dtype == torch.bfloat16 else 0.1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "longrope"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "proportional"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}}, "beta_fast"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, "factor"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "both set",
        ),
    ],
)
def test_unknown_rotary_settings_are_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    """Case R8."""
    folder = tiny_target_folder(tmp_path)
    edit_json(folder / "config.json", **change)
    with pytest.raises(CheckpointError, match=named) as caught:
        load_target(folder)
    assert "config.json" in str(caught.value)
