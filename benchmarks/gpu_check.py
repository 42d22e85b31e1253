"""One short run that proves the CUDA path: exactness of kernels, graphs and speculation; step times beside their floor.

    python -m benchmarks.gpu_check [--shape qwen3-4b] [--device cuda]

Weights are random, of a real size. `--shape tiny --device cpu` runs the same script without a GPU, by Triton's
interpreter (TRITON_INTERPRET=1) and without graphs: for the script's own sake.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn

from benchmarks.common import conditions
from dspark_core.config import DecoderConfig, DraftConfig
from dspark_core.draft.backbone import DraftModel
from dspark_core.draft.drafter import Drafter
from dspark_core.models.attention import FlatBatch, PagedAttend, Segment, tiles_of
from dspark_core.models.decoder import TargetModel
from dspark_core.models.graphed import GraphedLayers
from dspark_core.models.kv_cache import KVPool
from dspark_core.models.rope import RopeConfig
from dspark_core.models.triton_attention import attend
from dspark_core.sampling import SamplingParams
from server.engine import Engine, EngineParts
from server.profile import Probe
from server.request import RequestParams

TINY = DecoderConfig(
    family="qwen3", vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=16, norm_eps=1e-6, rope=RopeConfig(1e6), max_position_embeddings=4096, qkv_bias=False, o_bias=False,
    mlp_bias=False, qk_norm=True, tie_word_embeddings=False, sliding_window=None,
)  # fmt: skip
QWEN3_4B = replace(
    TINY, vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32, num_kv_heads=8,
    head_dim=128,
)  # fmt: skip
SHAPES = {"tiny": TINY, "qwen3-4b": QWEN3_4B}
K, PAGE, LIMIT = 7, 64, 2048
# What may differ: the order of sums, and one text at a near-tie.
MOST = {"kernel_error_float32": 1e-4, "kernel_error_16_bits": 2e-2, "runner_error": 1e-3, "texts_changed": 1}
Model = TypeVar("Model", TargetModel, DraftModel)


class NoText:
    """In place of a tokenizer: random weights say nothing."""

    def detokenizer(self) -> NoText:
        return self

    def step(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def draft_config(decoder: DecoderConfig) -> DraftConfig:
    """A DSpark draft of five layers, as the paper trains for this size."""
    layers = tuple(range(1, decoder.num_layers - 1, max(1, decoder.num_layers // 5)))[:5]
    return DraftConfig(
        decoder=replace(decoder, num_layers=min(5, decoder.num_layers)), draft_len=K, target_layer_ids=layers,
        num_target_layers=decoder.num_layers, mask_token_id=decoder.vocab_size - 1, markov_rank=256,
        markov_head_type="vanilla", enable_confidence_head=True, confidence_with_markov=True,
    )  # fmt: skip


def random_model(kind: type[Model], config: Any, device: torch.device, dtype: torch.dtype) -> Model:
    """A prepared model whose logits are well spread."""
    with torch.device("meta"):
        model = kind(config)
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        spread = parameter.shape[-1] ** -0.5
        nn.init.ones_(parameter) if "norm" in name else nn.init.normal_(parameter, std=spread)
    model.prepare(max_positions=LIMIT)
    return model


def make_engine(decoder: DecoderConfig, device: torch.device, dtype: torch.dtype, *, num_seqs: int) -> Engine:
    """Target and draft of a shape behind the real engine."""
    torch.manual_seed(0)
    target = random_model(TargetModel, decoder, device, dtype)
    draft = random_model(DraftModel, draft_config(decoder), device, dtype)
    pages = num_seqs * LIMIT // PAGE
    drafter = Drafter(draft, KVPool.of(draft.config.decoder, pages, PAGE, dtype, device))
    return Engine(
        EngineParts(
            target=target, pool=KVPool.of(decoder, pages, PAGE, dtype, device), drafter=drafter,
            tokenizer=cast(Any, NoText()), eos_token_ids=frozenset(), vocab_size=decoder.vocab_size,
            max_model_len=LIMIT, max_num_seqs=num_seqs, max_num_batched_tokens=512, seed=0,
        )
    )  # fmt: skip


def check_kernel(device: torch.device, dtype: torch.dtype) -> float:
    """Largest difference between the Triton kernel and the reference on random pages."""
    generator = torch.Generator(device).manual_seed(0)
    pool = KVPool(num_layers=1, num_pages=64, page_size=PAGE, num_kv_heads=2, head_dim=128, dtype=dtype, device=device)
    for memory in (pool.keys, pool.values):
        memory.normal_(generator=generator)
    segments = [
        Segment(0, 8, 500, list(range(10))),
        Segment(8, 1, 3, [20]),
        Segment(9, 40, 90, list(range(30, 33))),
        Segment(49, 7, 700, list(range(40, 52)), causal=False),
    ]
    queries = torch.randn(56, 8, 128, device=device, generator=generator).to(dtype)
    tiles, tables = (torch.tensor(part, device=device) for part in tiles_of(segments, PAGE))
    expected = PagedAttend(segments, pool, torch.empty(0)).attend(0, queries)
    return float((attend(queries, pool, 0, tiles, tables) - expected).abs().max())


def check_runner(device: torch.device) -> float:
    """Largest difference of logits between the graphed runner and the eager one, over growing and mixed batches."""
    model = random_model(TargetModel, TINY, device, torch.float32)
    if not isinstance(model.runner, GraphedLayers):
        return 0.0
    graphed, largest, outputs = model.runner, 0.0, []
    for layers in (graphed, graphed.layers):
        pool = KVPool.of(TINY, 32, PAGE, torch.float32, device)
        model.runner, at = layers, 0
        rows = []
        for count in (40, 1, 8, 1, 1, 20, 3, 8, 8):
            span = torch.arange(at, at + count, device=device)
            batch = FlatBatch(span * 7 % 500, span, span, [Segment(0, count, at, range(16))])
            rows.append(model(batch, pool).logits.clone())
            at += count
        outputs.append(rows)
    for ours, theirs in zip(*outputs, strict=True):
        largest = max(largest, float((ours - theirs).abs().max()))
    return largest


def check_engine(device: torch.device, requests: int, tokens: int) -> int:
    """Requests whose greedy or seeded text speculation changes, in float32 (0 but for near-ties)."""
    engine = make_engine(TINY, device, torch.float32, num_seqs=requests)
    texts = []
    for speculative in (False, True):
        own = []
        for number in range(requests):
            sampling = SamplingParams(temperature=0) if number % 2 else SamplingParams(seed=number)
            prompt = [(number * 31 + i * 17) % 500 for i in range(10 + 30 * number)]
            own.append(engine.make_request(prompt, RequestParams(sampling, tokens, speculative=speculative)))
            engine.add(own[-1])
        while engine.has_work:
            engine.step()
        texts.append([request.tokens for request in own])
    return sum(plain != drafted for plain, drafted in zip(*texts, strict=True))


def timed(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Milliseconds of a call, the median of some, the device's work included."""
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds[2:])[repeats // 2] * 1e3


def bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy moves (read and written)."""
    data = torch.empty(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(data)
    return 2 * data.nbytes / (timed(lambda: target.copy_(data), device, 5) / 1e3)


def step_times(engine: Engine, device: torch.device, context: int, repeats: int) -> list[dict[str, float]]:
    """Verify and draft steps of some sizes beside the time that reading their bytes takes."""
    speed, rows = bandwidth(device), []
    weights = sum(engine.target.weight_bytes.values())
    assert engine.drafter is not None
    draft, probe = engine.drafter.model, Probe(engine, context=context, block=1 + K)
    draft_weights = sum(p.nbytes for name, p in draft.named_parameters() if "embed" not in name and "w1" not in name)
    for requests, count in ((1, 1), (1, 2), (1, 4), (1, 1 + K), (4, 1 + K), (16, 1), (16, 1 + K)):
        verify = timed(partial(probe.verify, requests, count), device, repeats)
        drafting = timed(partial(probe.draft, requests, K), device, repeats)
        keys = requests * context * (engine.pool.keys[0].nbytes + engine.pool.values[0].nbytes) / PAGE
        rows.append(
            {
                "requests": requests, "rows": count, "verify_ms": verify, "draft_ms": drafting,
                "verify_floor_ms": (weights + keys) / speed * 1e3, "draft_floor_ms": draft_weights / speed * 1e3,
            }
        )  # fmt: skip
    return rows


def waits_per_step(engine: Engine) -> float:
    """How often a decoding step of speculative greedy requests waits for the device (the aim: once)."""
    for number in range(4):
        prompt = [number + i for i in range(20)]
        engine.add(engine.make_request(prompt, RequestParams(SamplingParams(temperature=0), 200)))
    for _ in range(10):
        engine.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(10):
                engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return len(caught) / 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    result: dict[str, Any] = {"benchmark": "gpu_check", "shape": args.shape, "device": str(device)}
    with torch.inference_mode():
        # Triton's interpreter gets products of bfloat16 wrong.
        half = torch.bfloat16 if on_gpu else torch.float16
        result["kernel_error_float32"] = check_kernel(device, torch.float32)
        result["kernel_error_16_bits"] = check_kernel(device, half)
        result["runner_error"] = check_runner(device)
        result["texts_changed"] = check_engine(device, 8, 48 if on_gpu else 6)
        for name, most in MOST.items():
            print(f"{name:24}{result[name]:<12.3g}at most {most:g}")
        dtype = torch.bfloat16 if on_gpu else torch.float32
        engine = make_engine(SHAPES[args.shape], device, dtype, num_seqs=16)
        result["steps"] = step_times(engine, device, 1024 if on_gpu else 100, args.repeats)
        print(f"{'requests':>8}{'rows':>6}{'verify ms':>11}{'floor':>8}{'draft ms':>11}{'floor':>8}")
        for row in result["steps"]:
            print(f"{row['requests']:8}{row['rows']:6}{row['verify_ms']:11.2f}{row['verify_floor_ms']:8.2f}", end="")
            print(f"{row['draft_ms']:11.2f}{row['draft_floor_ms']:8.2f}")
        if on_gpu:
            result["waits_per_step"] = waits_per_step(engine)
            print(f"waits for the device per step: {result['waits_per_step']:.1f}")
    result["ok"] = all(result[name] <= most for name, most in MOST.items())
    print(json.dumps(result | {"conditions": conditions(0.0)}))
    if not result["ok"]:
        sys.exit(f"not exact: expected at most {MOST}")


if __name__ == "__main__":
    main()
