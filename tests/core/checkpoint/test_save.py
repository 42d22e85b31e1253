"""Drafts are written in DeepSpec's format, and are the same when they are read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from dspark_core.checkpoint.load import load_draft, load_target, shares_head
from dspark_core.checkpoint.save import draft_config_json, save_draft
from dspark_core.config import DraftConfig, read_draft_config, read_target_config
from dspark_core.draft.backbone import DraftModel
from tests.tiny import tiny_draft_folder, tiny_target_folder

HEADS = ("vanilla", "gated", "rnn", "none")
COPIES = {"embed_tokens.weight", "lm_head.weight"}
# What DeepSpec's files add to the target's configuration (formats.md, format A).
OWN_KEYS = {
    "architectures",
    "num_target_layers",
    "num_hidden_layers",
    "block_size",
    "target_layer_ids",
    "mask_token_id",
    "num_anchors",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "markov_rank",
    "markov_head_type",
    "layer_types",
    "tie_word_embeddings",
}

DEEPSPEC_CONFIG = Path(__file__).parents[2] / "data" / "deepspec-draft" / "config.json"


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    return tiny_target_folder(tmp_path)


def trained(target_folder: Path, head: str = "vanilla", **overrides: Any) -> DraftModel:
    """A draft in float32 whose embedding and LM head are the target's, as in training."""
    folder = tiny_draft_folder(target_folder.parent, target_folder, head, name=f"draft-{head}", **overrides)
    return load_draft(folder, load_target(target_folder))


def save(draft: DraftModel, target_folder: Path, name: str = "saved", **options: Any) -> Path:
    options = {"dtype": torch.float32, "with_embeddings": True} | options
    folder = target_folder.parent / name
    content = draft_config_json(draft.config, target_folder, {"num_anchors": 16})
    save_draft(folder, content, dict(draft.named_parameters()), **options)
    return folder


def weights(draft: DraftModel) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in draft.named_parameters()}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("with_embeddings", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_draft_is_read_back(head: str, with_embeddings: bool, dtype: torch.dtype, target_folder: Path) -> None:
    draft = trained(target_folder, head)
    folder = save(draft, target_folder, dtype=dtype, with_embeddings=with_embeddings)
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    assert stored.keys() == weights(draft).keys() - (set() if with_embeddings else COPIES)
    target = load_target(target_folder)
    found = load_draft(folder, target)
    assert found.config == draft.config
    assert shares_head(found, target), "a rounded copy of the target's head is still the target's"
    for name, tensor in weights(found).items():
        own = weights(draft)[name]
        assert torch.equal(tensor, own if name in COPIES else own.to(dtype).float()), name


def test_weights_that_learn_and_lie_on_any_strides_can_be_saved(target_folder: Path) -> None:
    """Transposed memory, gradients, and two names of one tensor, which safetensors refuses as it stands."""
    draft = trained(target_folder).requires_grad_(True)
    content = draft_config_json(draft.config, target_folder, {})
    given = {name: parameter.t() if "fc" in name else parameter for name, parameter in draft.named_parameters()}
    given["lm_head.weight"] = given["embed_tokens.weight"]
    save_draft(target_folder.parent / "saved", content, given, dtype=torch.float32, with_embeddings=True)
    stored = load_file(target_folder.parent / "saved" / "model.safetensors")
    assert torch.equal(stored["fc.weight"], given["fc.weight"])
    assert torch.equal(stored["lm_head.weight"], stored["embed_tokens.weight"])


def test_config_has_the_keys_of_the_format(target_folder: Path) -> None:
    folder = save(trained(target_folder, "gated"), target_folder, dtype=torch.bfloat16)
    values = json.loads((folder / "config.json").read_text())
    assert values.keys() >= OWN_KEYS | {"hidden_size", "vocab_size", "rope_theta", "head_dim"}
    expected = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "num_target_layers": 4,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "block_size": 4,
        "target_layer_ids": [0, 2],
        "mask_token_id": 258,
        "num_anchors": 16,
        "markov_rank": 6,
        "markov_head_type": "gated",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "eos_token_id": 1,
    }
    assert {key: values[key] for key in expected} == expected
    assert "_name_or_path" not in values, "a target without a public name has none"


def test_the_name_of_the_target_is_told_where_there_is_one(target_folder: Path) -> None:
    config = DraftConfig(**trained(target_folder).config.__dict__ | {"target_name": "Qwen/Qwen3-4B"})
    assert draft_config_json(config, target_folder, {})["_name_or_path"] == "Qwen/Qwen3-4B"


def test_config_has_every_key_of_a_draft_that_deepspec_s_own_code_wrote(target_folder: Path) -> None:
    reference = json.loads(DEEPSPEC_CONFIG.read_text())
    values = draft_config_json(trained(target_folder).config, target_folder, {"num_anchors": 16})
    # Written by save_draft; the version of a library we do not use; and what the tiny target does not say.
    elsewhere = {"dtype", "transformers_version", "initializer_range", "pad_token_id", "rope_parameters"}
    assert reference.keys() - values.keys() == elsewhere
    same = {"architectures", "model_type", "attention_bias", "attention_dropout", "hidden_act", "sliding_window"}
    same |= {"tie_word_embeddings", "use_cache", "use_sliding_window"}
    assert {key: values[key] for key in same} == {key: reference[key] for key in same}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500.0},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {
            "rope_theta": 500.0,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    ],
    ids=["theta", "parameters", "yarn", "llama3"],
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_positions_are_the_target_s_in_every_layout(family: str, rope: dict[str, Any], tmp_path: Path) -> None:
    """Case R8: the draft rotates as its target does, whichever layout of RoPE settings the target's file has."""
    folder = tiny_target_folder(tmp_path, family, **rope)
    target = read_target_config(folder)
    draft = trained(folder)
    found = read_draft_config(save(draft, folder)).decoder
    assert found.rope == target.rope
    assert found.max_position_embeddings == target.max_position_embeddings
    assert not found.qkv_bias
    assert found.context_limit == found.max_position_embeddings


def test_files_say_that_they_are_torch_s(target_folder: Path) -> None:
    """Transformers refuses safetensors files without this word."""
    with safe_open(save(trained(target_folder), target_folder) / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_saving_again_replaces_the_draft(target_folder: Path) -> None:
    draft = trained(target_folder)
    folder = save(draft, target_folder)
    with torch.no_grad():
        draft.fc.weight.mul_(2)
    save(draft, target_folder, with_embeddings=False)
    assert torch.equal(load_file(folder / "model.safetensors")["fc.weight"], draft.fc.weight)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
