"""Writing a draft in DeepSpec's format, which this server and others read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from dspark_core.checkpoint.files import write_atomically
from dspark_core.checkpoint.load import EMBEDDING, HEAD
from dspark_core.config import DraftConfig
from dspark_core.keys import Keys

# What a draft's config takes over from its target's as it stands there.
_TAKEN_OVER = (
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "pad_token_id",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "vocab_size",
)


def draft_config_json(config: DraftConfig, target_folder: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """Content of a draft's config.json: the shape of its backbone, taken from its target, and its own keys."""
    target = Keys.of_file(target_folder / "config.json").values
    decoder = config.decoder
    return {
        **{key: target[key] for key in _TAKEN_OVER if target.get(key) is not None},
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "num_hidden_layers": decoder.num_layers,
        "layer_types": ["full_attention"] * decoder.num_layers,
        "max_window_layers": decoder.num_layers,
        "rms_norm_eps": decoder.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": list(config.target_layer_ids),
        "block_size": config.draft_len,
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_with_markov,
        **({"_name_or_path": config.target_name} if config.target_name else {}),
        **extra,
    }


def save_draft(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], *, dtype: torch.dtype, with_embeddings: bool
) -> None:
    """Write config.json and model.safetensors, each whole or not at all.

    Args:
        with_embeddings: include `embed_tokens` and `lm_head`, copies of the target's that our loader can do without.
    """
    left_out = () if with_embeddings else (EMBEDDING, HEAD)
    tensors = {n: w.detach().to("cpu", dtype).contiguous() for n, w in weights.items() if n not in left_out}
    if with_embeddings:  # two names of one tensor cannot be stored
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}, indent=1, sort_keys=True)
    write_atomically(folder / "config.json", lambda file: file.write(content.encode()))
    data = save(tensors, metadata={"format": "pt"})
    write_atomically(folder / "model.safetensors", lambda file: file.write(data))
