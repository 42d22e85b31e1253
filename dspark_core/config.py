"""Model configurations, read strictly from `config.json`.

Letters used in shapes across the package: N rows of a flat batch, R requests, K draft slots, V vocabulary,
D hidden size, H query heads, G = H / KV heads per key-value head, m tapped layers, r Markov rank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_core.errors import CheckpointError

HEAD_TYPES = ("vanilla", "gated", "rnn")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_MISSING: Any = object()


class Keys:
    """A JSON object whose reads fail with the file and key named.

    Args:
        values: the parsed object.
        where: what to call it in errors, usually the file's path.
    """

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    @classmethod
    def of_file(cls, path: Path) -> Keys:
        """Read a JSON object; a missing, broken or non-object file is a CheckpointError."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist; expected a model folder with this file") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds a {type(values).__name__}, expected a JSON object")
        return cls(values, str(path))

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = _MISSING) -> Any:
        """The value of `key`; null counts as absent, and a value of another type is an error."""
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise CheckpointError(f"{self.where}: key '{key}' is missing")
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(k.__name__ for k in kinds)
            raise CheckpointError(f"{self.where}: key '{key}' is {value!r}, expected {names}")
        return value

    def positive(self, key: str, default: Any = _MISSING) -> int:
        """An integer of at least 1."""
        value = self.get(key, int, default)
        if value < 1:
            raise CheckpointError(f"{self.where}: key '{key}' is {value}, expected at least 1")
        return int(value)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency, scaling type and that type's own numbers."""

    theta: float = 10000.0
    kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()

    @classmethod
    def read(cls, keys: Keys) -> RopeConfig:
        """From `rope_parameters` (Transformers 5) or `rope_theta` with `rope_scaling` (before)."""
        found = keys.get("rope_parameters", dict, None) or keys.get("rope_scaling", dict, None) or {}
        values = Keys(found, f"{keys.where}: rope_parameters")
        kind = values.get("rope_type", str, None) or values.get("type", str, "default")
        if kind not in ROPE_TYPES:
            expected = ", ".join(ROPE_TYPES)
            raise CheckpointError(f"{keys.where}: rope type '{kind}' is not supported, expected one of {expected}")
        theta = values.get("rope_theta", (int, float), None) or keys.get("rope_theta", (int, float), 10000.0)
        numbers = {k: float(v) for k, v in found.items() if isinstance(v, int | float) and k != "rope_theta"}
        partial = numbers.get("partial_rotary_factor", keys.get("partial_rotary_factor", (int, float), 1.0))
        if partial != 1.0:
            raise CheckpointError(f"{keys.where}: partial_rotary_factor is {partial}, expected 1.0")
        if kind in ("linear", "llama3", "yarn") and "factor" not in numbers:
            raise CheckpointError(f"{keys.where}: rope type '{kind}' needs the key 'factor'")
        return cls(float(theta), kind, tuple(sorted(numbers.items())))


@dataclass(frozen=True)
class DecoderConfig:
    """What a stack of decoder layers needs to know; the same for targets and for draft backbones."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    sliding_window: int | None
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def context_limit(self) -> int:
        """Positions this model handles exactly: attention windows are not implemented, so a window caps it."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)


def read_decoder_config(keys: Keys, family: str) -> DecoderConfig:
    """Common part of every supported `config.json`; `family` decides biases and query-key norms."""
    num_heads = keys.positive("num_attention_heads")
    num_kv_heads = keys.positive("num_key_value_heads", num_heads)
    hidden_size = keys.positive("hidden_size")
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{keys.where}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    activation = keys.get("hidden_act", str, "silu")
    if activation != "silu":
        raise CheckpointError(f"{keys.where}: hidden_act is '{activation}', expected 'silu'")
    bias = keys.get("attention_bias", bool, False)
    windowed = keys.get("use_sliding_window", bool, family == "mistral")
    return DecoderConfig(
        family=family,
        vocab_size=keys.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.positive("intermediate_size"),
        num_layers=keys.positive("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=keys.positive("head_dim", hidden_size // num_heads),
        norm_eps=float(keys.get("rms_norm_eps", float, 1e-6)),
        rope=RopeConfig.read(keys),
        max_position_embeddings=keys.positive("max_position_embeddings", 2048),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias and family != "qwen2",
        mlp_bias=keys.get("mlp_bias", bool, False),
        qk_norm=family == "qwen3",
        tie_word_embeddings=keys.get("tie_word_embeddings", bool, False),
        sliding_window=keys.get("sliding_window", int, None) if windowed else None,
        eos_token_ids=_token_ids(keys, "eos_token_id"),
    )


def _token_ids(keys: Keys, key: str) -> frozenset[int]:
    value = keys.get(key, (int, list), [])
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{keys.where}: key '{key}' is {value!r}, expected token ids")
    return frozenset(ids)


TARGET_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def read_target_config(folder: Path) -> DecoderConfig:
    """Configuration of a target from `config.json`; end-of-text ids of `generation_config.json` join in."""
    keys = Keys.of_file(folder / "config.json")
    names = keys.get("architectures", list)
    family = next((TARGET_ARCHITECTURES[n] for n in names if n in TARGET_ARCHITECTURES), None)
    if family is None:
        expected = ", ".join(TARGET_ARCHITECTURES)
        raise CheckpointError(f"{keys.where}: architectures is {names}, expected one of {expected}")
    if "quantization_config" in keys.values:
        raise CheckpointError(f"{keys.where}: key 'quantization_config' is set; expected unquantised weights")
    config = read_decoder_config(keys, family)
    generation = folder / "generation_config.json"
    if generation.exists():
        extra = _token_ids(Keys.of_file(generation), "eos_token_id")
        config = DecoderConfig(**{**config.__dict__, "eos_token_ids": config.eos_token_ids | extra})
    return config


@dataclass(frozen=True)
class DraftConfig:
    """A DSpark draft: its backbone and its heads (names of notation.md, file keys of DeepSpec)."""

    decoder: DecoderConfig
    draft_len: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    markov_rank: int
    markov_head_type: str
    enable_confidence_head: bool
    confidence_with_markov: bool
    target_name: str | None = None

    @property
    def head_name(self) -> str:
        """What to call the sequential head: vanilla, gated, rnn, or none (DFlash)."""
        return self.markov_head_type if self.markov_rank else "none"

    @property
    def confidence_width(self) -> int:
        """Input features of the confidence head (Eq 7): D, plus r when it sees the previous token."""
        return self.decoder.hidden_size + (self.markov_rank if self.confidence_with_markov else 0)


def read_draft_config(folder: Path) -> DraftConfig:
    """Configuration of a draft in DeepSpec's format; other formats are refused by name."""
    keys = Keys.of_file(folder / "config.json")
    if "speculators_model_type" in keys.values or "dflash_config" in keys.values:
        raise CheckpointError(f"{keys.where} is in the speculators or SpecForge format, expected DeepSpec's")
    names = keys.get("architectures", list)
    if "Qwen3DSparkModel" not in names:
        hint = " (is this a target? give it to --target)" if set(names) & set(TARGET_ARCHITECTURES) else ""
        raise CheckpointError(f"{keys.where}: architectures is {names}, expected ['Qwen3DSparkModel']{hint}")
    decoder = read_decoder_config(keys, "qwen3")
    rank = keys.get("markov_rank", int, 0)
    head = keys.get("markov_head_type", str, "vanilla")
    if rank < 0 or (rank and head not in HEAD_TYPES):
        raise CheckpointError(
            f"{keys.where}: markov_head_type '{head}' with markov_rank {rank}, expected one of "
            f"{', '.join(HEAD_TYPES)} with a positive rank, or rank 0"
        )
    confident = keys.get("enable_confidence_head", bool, False)
    with_markov = keys.get("confidence_head_with_markov", bool, bool(rank))
    if confident and with_markov and not rank:
        raise CheckpointError(f"{keys.where}: confidence_head_with_markov is true but markov_rank is 0")
    config = DraftConfig(
        decoder=decoder,
        draft_len=keys.positive("block_size"),
        target_layer_ids=tuple(keys.get("target_layer_ids", list)),
        num_target_layers=keys.positive("num_target_layers"),
        mask_token_id=keys.get("mask_token_id", int),
        markov_rank=rank,
        markov_head_type=head,
        enable_confidence_head=confident,
        confidence_with_markov=with_markov and bool(rank),
        target_name=keys.get("_name_or_path", str, None),
    )
    _check_draft(config, keys)
    return config


def _check_draft(config: DraftConfig, keys: Keys) -> None:
    kinds = keys.get("layer_types", list, [])
    if any(kind != "full_attention" for kind in kinds):
        raise CheckpointError(f"{keys.where}: layer_types is {kinds}, expected only 'full_attention'")
    if not 0 <= config.mask_token_id < config.decoder.vocab_size:
        raise CheckpointError(
            f"{keys.where}: mask_token_id is {config.mask_token_id}, expected an id of the target's vocabulary, "
            f"0 to {config.decoder.vocab_size - 1}"
        )
    ids, last = config.target_layer_ids, config.num_target_layers - 1
    if not ids or not all(isinstance(i, int) and not isinstance(i, bool) and -1 <= i < last for i in ids):
        raise CheckpointError(
            f"{keys.where}: target_layer_ids is {list(ids)}, expected layer outputs from -1 to {last - 1} "
            f"(the output of the last of {config.num_target_layers} layers cannot be tapped)"
        )
