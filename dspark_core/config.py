"""Model configurations, read strictly from `config.json`.

Letters used in shapes across the package: N rows of a flat batch, R requests, K draft slots, V vocabulary,
D hidden size, H query heads, G = H / KV heads per key-value head, m tapped layers, r Markov rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark_core.errors import CheckpointError
from dspark_core.keys import Keys
from dspark_core.models.rope import RopeConfig, read_rope

HEAD_TYPES = ("vanilla", "gated", "rnn")
DEFAULT_WINDOW = 4096


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
    # Transformers' own default where a windowed model does not say how wide; null means no window.
    window = keys.get("sliding_window", int, None) if "sliding_window" in keys.values else DEFAULT_WINDOW
    head_dim = keys.positive("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise CheckpointError(f"{keys.where}: head_dim is {head_dim}, expected an even number")
    return DecoderConfig(
        family=family,
        vocab_size=keys.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.positive("intermediate_size"),
        num_layers=keys.positive("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(keys.get("rms_norm_eps", (float, int), 1e-6)),
        rope=read_rope(keys),
        max_position_embeddings=keys.positive("max_position_embeddings", 2048),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias and family != "qwen2",
        mlp_bias=keys.get("mlp_bias", bool, False),
        qk_norm=family == "qwen3",
        tie_word_embeddings=keys.get("tie_word_embeddings", bool, False),
        sliding_window=window if windowed else None,
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
    if keys.get("quantization_config", dict, None):
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
    if any(kind != "full_attention" for kind in kinds) or len(kinds) not in (0, config.decoder.num_layers):
        expected = f"{config.decoder.num_layers} times 'full_attention'"
        raise CheckpointError(f"{keys.where}: layer_types is {kinds}, expected {expected}")
    if not 0 <= config.mask_token_id < config.decoder.vocab_size:
        raise CheckpointError(
            f"{keys.where}: mask_token_id is {config.mask_token_id}, expected an id of the target's vocabulary, "
            f"0 to {config.decoder.vocab_size - 1}"
        )
    if config.decoder.tie_word_embeddings:
        raise CheckpointError(f"{keys.where}: tie_word_embeddings is true, expected false (a draft has its own head)")
    check_taps(config.target_layer_ids, config.num_target_layers, where=f"{keys.where}: ")


def check_taps(ids: Sequence[int], num_layers: int, where: str = "") -> None:
    """Raise CheckpointError unless these outputs of a target's layers can be tapped."""
    last = num_layers - 1
    whole = all(isinstance(i, int) and not isinstance(i, bool) and -1 <= i < last for i in ids)
    if not ids or not whole or len(set(ids)) < len(ids):
        raise CheckpointError(
            f"{where}target_layer_ids is {list(ids)}, expected different layer outputs from -1 to {last - 1} "
            f"(the output of the last of {num_layers} layers cannot be tapped)"
        )
