"""Keys of config.json that are missing, wrong or not understood are named; nothing is guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_core.config import read_draft_config, read_target_config
from dspark_core.errors import CheckpointError
from tests.tiny import tiny_draft_folder, tiny_target_folder


def target(tmp_path: Path, **changes: Any) -> Path:
    return _changed(tiny_target_folder(tmp_path), changes)


def draft(tmp_path: Path, **changes: Any) -> Path:
    return _changed(tiny_draft_folder(tmp_path, tiny_target_folder(tmp_path)), changes)


def _changed(folder: Path, changes: dict[str, Any]) -> Path:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
    return folder


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*expected one of LlamaForCausalLM"),
        ({"vocab_size": "absent"}, "key 'vocab_size' is missing"),
        ({"vocab_size": "many"}, "key 'vocab_size' is 'many', expected int"),
        ({"num_hidden_layers": 0}, "key 'num_hidden_layers' is 0, expected at least 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "key 'factor' is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, expected 1.0"),
        ({"quantization_config": {"bits": 4}}, "expected unquantised weights"),
        ({"eos_token_id": ["x"]}, "key 'eos_token_id'"),
    ],
)
def test_target_keys(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    """Case R8."""
    with pytest.raises(CheckpointError, match=expected) as error:
        read_target_config(target(tmp_path, **changes))
    assert "config.json" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mask_token_id": "absent"}, "key 'mask_token_id' is missing"),
        ({"mask_token_id": -1}, "mask_token_id is -1, expected an id of the target's vocabulary, 0 to 258"),
        ({"mask_token_id": 259}, "mask_token_id is 259"),
        ({"mask_token_id": True}, "key 'mask_token_id' is True, expected int"),
        ({"target_layer_ids": [0, 3]}, r"target_layer_ids is \[0, 3\], expected different layer outputs from -1 to 2"),
        ({"target_layer_ids": [-2]}, "target_layer_ids"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"markov_head_type": "lstm"}, "markov_head_type 'lstm'.*expected one of vanilla, gated, rnn"),
        ({"markov_rank": 0, "confidence_head_with_markov": True}, "markov_rank is 0"),
        ({"block_size": 0}, "key 'block_size' is 0, expected at least 1"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true, expected false"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({"speculators_model_type": "dspark"}, "speculators"),
        ({"dflash_config": {}}, "SpecForge"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "is this a target"),
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
    ],
)
def test_draft_keys(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    """Cases I10, R5, R6 and R7."""
    with pytest.raises(CheckpointError, match=expected):
        read_draft_config(draft(tmp_path, **changes))


def test_files_that_are_no_json_object(tmp_path: Path) -> None:
    folder = target(tmp_path)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="holds a list, expected a JSON object"):
        read_target_config(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_target_config(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        read_target_config(folder)


def test_end_of_text_ids_of_both_files_are_joined(tmp_path: Path) -> None:
    folder = target(tmp_path, eos_token_id=[3, 4])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 9]}))
    assert read_target_config(folder).eos_token_ids == {3, 4, 9}


def test_a_sliding_window_caps_the_context(tmp_path: Path) -> None:
    """Case I10."""
    folder = _changed(tiny_target_folder(tmp_path, "mistral"), {"sliding_window": 64})
    assert read_target_config(folder).context_limit == 64
    unused = _changed(tiny_target_folder(tmp_path, "qwen2", name="unused"), {"sliding_window": 64})
    assert read_target_config(unused).context_limit == 256
