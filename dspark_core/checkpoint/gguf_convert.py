"""Write a Llama model stored in one GGUF file as a Hugging Face style folder in float32."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tqdm import tqdm

from dspark_core.checkpoint.gguf_tokenizer import rebuild_tokenizer
from dspark_core.errors import CheckpointError

Array = npt.NDArray[np.float32]

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def convert_gguf(source: Path, folder: Path) -> None:
    """Write config, generation config, weights and tokenizer files of the GGUF file `source` into `folder`.

    Args:
        source: a GGUF file of the `llama` architecture with a byte-level BPE tokenizer.
        folder: an existing, empty folder.

    Raises:
        CheckpointError: the file is damaged, or holds something this converter does not know; the message
            names the key or tensor.
    """
    reader = _open(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = _model_config(metadata, {tensor.name for tensor in reader.tensors}, source)
    tensors = dict(_tensors(reader, config, source))
    _check_names(set(tensors), config, source)
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    # The safetensors library makes its files private to the user; a cache folder may be shared.
    weights.chmod((folder / "config.json").stat().st_mode)
    token_ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
    write_json(folder / "generation_config.json", token_ids)
    tokenizer, tokenizer_config = rebuild_tokenizer(metadata, source)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as indented UTF-8 JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _open(source: Path) -> GGUFReader:
    try:
        return GGUFReader(source)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise CheckpointError(f"{source}: not a readable GGUF file: {error}") from error


def _model_config(metadata: dict[str, Any], names: set[str], source: Path) -> dict[str, Any]:
    """The `config.json` of a LlamaForCausalLM, every number taken from the GGUF metadata."""

    def need(key: str) -> Any:
        if key not in metadata:
            raise CheckpointError(f"{source}: GGUF key {key!r} is missing")
        return metadata[key]

    if need("general.architecture") != "llama":
        raise CheckpointError(
            f"{source}: general.architecture is {metadata['general.architecture']!r}, expected 'llama'"
        )
    if metadata.get("llama.rope.scaling.type", "none") != "none":
        raise CheckpointError(f"{source}: llama.rope.scaling.type is set; only plain rotary positions are converted")
    hidden, heads = int(need("llama.embedding_length")), int(need("llama.attention.head_count"))
    head_dim = int(metadata.get("llama.attention.key_length", hidden // heads))
    if int(metadata.get("llama.rope.dimension_count", head_dim)) != head_dim:
        raise CheckpointError(
            f"{source}: llama.rope.dimension_count is {metadata['llama.rope.dimension_count']}, "
            f"expected the head size {head_dim}"
        )
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(need("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": int(need("llama.feed_forward_length")),
        "num_hidden_layers": int(need("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata.get("llama.attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(need("llama.context_length")),
        "rope_theta": float(metadata.get("llama.rope.freq_base", 10000.0)),
        "rms_norm_eps": float(need("llama.attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in names,
        "dtype": "float32",
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        key = f"tokenizer.ggml.{theirs}_token_id"
        if key in metadata:
            config[f"{ours}_token_id"] = int(metadata[key])
    return config


def _tensors(reader: GGUFReader, config: dict[str, Any], source: Path) -> Iterator[tuple[str, Array]]:
    rotated = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in tqdm(reader.tensors, desc="converting the demo target", unit="tensor", disable=None):
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        layer = _LAYER_PATTERN.fullmatch(tensor.name)
        if tensor.name in _GLOBAL_NAMES:
            yield _GLOBAL_NAMES[tensor.name], weight
        elif layer and layer[2] in _LAYER_NAMES:
            if layer[2] in rotated:
                weight = _half_split_rows(weight, rotated[layer[2]])
            yield f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.weight", weight
        else:
            raise CheckpointError(f"{source}: tensor {tensor.name!r} is not part of a Llama model")


def _half_split_rows(weight: Array, heads: int) -> Array:
    """Reorder the rows of a query or key projection from GGUF's rotary layout to Transformers'.

    GGUF stores the two rows that rotate together side by side (2i, 2i + 1); Transformers rotates row i with
    row i + head_dim / 2.

    Args:
        weight: [heads * head_dim, hidden].
        heads: number of heads of this projection.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3).reshape(rows, columns))


def _check_names(found: set[str], config: dict[str, Any], source: Path) -> None:
    expected = {"model.embed_tokens.weight", "model.norm.weight"}
    if not config["tie_word_embeddings"]:
        expected.add("lm_head.weight")
    for layer in range(config["num_hidden_layers"]):
        expected |= {f"model.layers.{layer}.{name}.weight" for name in _LAYER_NAMES.values()}
    if found != expected:
        raise CheckpointError(
            f"{source}: tensors missing: {sorted(expected - found)[:5]}, unexpected: {sorted(found - expected)[:5]}"
        )
