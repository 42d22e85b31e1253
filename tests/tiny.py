"""Tiny random models in folders, as a trainer would leave them; for every test that needs a model.

Seeded and small enough to build in milliseconds. Logits are well spread, so that greedy text is neither constant nor
full of near-ties.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from dspark_core.config import TARGET_ARCHITECTURES, read_draft_config, read_target_config
from dspark_core.draft.backbone import DraftModel
from dspark_core.models.decoder import TargetModel
from tests.core.checkpoint.tiny_tokenizers import BYTE_CHARACTERS, SPECIALS

EOS_ID = 1
LOGIT_SPREAD = 3.0  # standard deviation of a row of target logits
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}:{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
_PRINTABLE_FIRST = [*range(32, 127), 10, *range(10), *range(11, 32), *range(127, 256)]


def tiny_target_folder(
    tmp_path: Path,
    family: str = "qwen3",
    *,
    name: str = "target",
    seed: int = 2,
    tokenizer_size: int | None = None,
    **overrides: Any,
) -> Path:
    """A target of `family` (llama, mistral, qwen2, qwen3): config, float32 weights, generation config, tokenizer.

    The tokenizer knows `<|start|>` (0), `<|end|>` (1, the end of text) and single bytes, printable ones first. By
    default all 256, and one more row in the vocabulary that only the draft's mask uses.

    Args:
        tokenizer_size: ids that the tokenizer knows; as many as fit, at most 258, by default.
        overrides: keys of config.json; None removes a key.
    """
    config: dict[str, Any] = {
        "architectures": [{v: k for k, v in TARGET_ARCHITECTURES.items()}[family]],
        "model_type": family,
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": EOS_ID,
        **overrides,
    }
    folder = _folder(tmp_path / name, config)
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": EOS_ID})
    size = min(len(BYTE_CHARACTERS) + 2, config["vocab_size"]) if tokenizer_size is None else tokenizer_size
    tiny_tokenizer(size).save(str(folder / "tokenizer.json"))
    names = {"bos_token": SPECIALS[0], "eos_token": SPECIALS[1], "chat_template": CHAT_TEMPLATE}
    write_json(folder / "tokenizer_config.json", names)
    with torch.device("meta"):
        model = TargetModel(read_target_config(folder))
    weights = _random_weights(model, seed, depth=1.5 if config["tie_word_embeddings"] else 0.2)
    if config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
        # Weak against what the layers add, or each token would predict itself.
        weights["embed_tokens.weight"] *= LOGIT_SPREAD * config["hidden_size"] ** -0.5
    renamed = {n if n.startswith("lm_head") else f"model.{n}": w for n, w in weights.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tiny_draft_folder(
    tmp_path: Path,
    target_folder: Path,
    head: str = "vanilla",
    draft_len: int = 4,
    *,
    name: str = "draft",
    seed: int = 1,
    agrees: bool = False,
    borrow: bool = False,
    **overrides: Any,
) -> Path:
    """A draft in DeepSpec's format for the target in `target_folder`; `head`: vanilla, gated, rnn or none.

    Args:
        agrees: make the sequential head (vanilla) a bigram model of the target, which is right about every second
            time (for untied targets, where the last token counts most).
        borrow: leave out `embed_tokens` and `lm_head`.
        overrides: keys of config.json; None removes a key.
    """
    target = json.loads((target_folder / "config.json").read_text())
    rank = {"none": 0}.get(head, target["hidden_size"] if agrees else 6)
    config: dict[str, Any] = {
        **{k: v for k, v in target.items() if k not in ("architectures", "layer_types")},
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_target_layers": target["num_hidden_layers"],
        "num_hidden_layers": 2,
        "block_size": draft_len,
        "target_layer_ids": [0, target["num_hidden_layers"] - 2],
        "mask_token_id": target["vocab_size"] - 1,
        "enable_confidence_head": True,
        "confidence_head_with_markov": bool(rank),
        "markov_rank": rank,
        "markov_head_type": "vanilla" if head == "none" else head,
        "tie_word_embeddings": False,
        **overrides,
    }
    folder = _folder(tmp_path / name, config)
    with torch.device("meta"):
        model = DraftModel(read_draft_config(folder))
    weights = _random_weights(model, seed)
    theirs = load_file(target_folder / "model.safetensors")
    embedding = theirs["model.embed_tokens.weight"]
    weights["embed_tokens.weight"] = embedding.clone()
    weights["lm_head.weight"] = theirs.get("lm_head.weight", embedding).clone()
    if agrees:
        scale = embedding.square().mean(-1, keepdim=True).rsqrt()
        weights["markov_head.markov_w1.weight"] = embedding * scale * theirs["model.norm.weight"]
        weights["markov_head.markov_w2.weight"] = weights["lm_head.weight"].clone()
        weights["norm.weight"] *= 0.1
    if borrow:
        del weights["embed_tokens.weight"], weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tiny_tokenizer(size: int = 258) -> Tokenizer:
    """Byte-level BPE without merges: two special tokens and `size - 2` bytes; other bytes are dropped."""
    tokens = [*SPECIALS, *(BYTE_CHARACTERS[byte] for byte in _PRINTABLE_FIRST)][:size]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes a key."""
    values = {**json.loads(path.read_text()), **changes}
    write_json(path, {k: v for k, v in values.items() if v is not None})


def edit_weights(path: Path, **changes: Tensor | None) -> None:
    """Change tensors of a safetensors file (dots in names as in the file); None removes one."""
    values = {**load_file(path), **changes}
    save_file({k: v for k, v in values.items() if v is not None}, path)


def _folder(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    write_json(folder / "config.json", {k: v for k, v in config.items() if v is not None})
    return folder


def _random_weights(model: nn.Module, seed: int, depth: float = 1.0) -> dict[str, Tensor]:
    """Weights that keep activations near 1; `depth` scales what layers add, and the LM head spreads the logits."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            weights[name] = 0.1 * noise + (0.0 if name.endswith("bias") else 1.0)
        elif "embed" in name or name.endswith("markov_w1.weight"):
            weights[name] = noise
        else:
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            gain = LOGIT_SPREAD if name.startswith("lm_head") else depth if adds else 1.5
            weights[name] = noise * gain * parameter.shape[1] ** -0.5
    return weights
