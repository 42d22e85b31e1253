"""What rounded weights change: next-token distributions under every kind of `--cpu-weights`, against float32's.

    python -m benchmarks.weights [--tokens 48] [--no-rotate]

The demo's checkpoint was once quantised to 4 bits, so that rounding it again changes next to nothing. Therefore its
hidden states are turned by a random rotation, which a norm's weights, moved into the matrices behind it, let through:
the same function in float32, of weights that no small type holds. Texts are the model's own answers at temperature 1 to
the prompts of the benchmarks. KL is in nats a token, from float32 to the rounded model; perplexity is that of the
answers. No time is taken: a busy machine does no harm.
"""

from __future__ import annotations

import json
from typing import cast, get_args

import torch
from torch import Tensor, nn

from benchmarks.common import chat_ids, conditions, demo_engine, make_parser, mixed_prompts
from dspark_core.checkpoint.load import load_target
from dspark_core.checkpoint.references import DEMO, resolve_target
from dspark_core.models.attention import FlatBatch, Segment
from dspark_core.models.decoder import TargetModel
from dspark_core.models.kv_cache import KVPool
from dspark_core.models.layers import RMSNorm
from dspark_core.sampling import SamplingParams
from dspark_core.settings import CpuWeights
from server.offline import complete
from server.request import RequestParams

PAGE = 16
Text = tuple[list[int], int]  # all ids, and how many of them are the prompt's


def answers(max_tokens: int) -> list[Text]:
    """What the demo model answers to every prompt."""
    engine = demo_engine("exact", verify="off", seed=0)
    params = RequestParams(SamplingParams(temperature=1.0), max_tokens)
    jobs = [(content, chat_ids(engine.tokenizer, content), params) for content in mixed_prompts()]
    return [(list(request.tokens), len(request.prompt_ids)) for _, request in complete(engine, jobs)]


def rotate(model: TargetModel, seed: int = 0) -> None:
    """Turn the hidden states x into x Q, and every matrix so that the function stays the same."""
    size = model.config.hidden_size
    turn = torch.linalg.qr(
        torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ).Q

    def reads(norm: RMSNorm, *matrices: nn.Linear) -> None:
        """These read normed states: the norm's weights become theirs."""
        scale = norm.weight.double()
        for matrix in matrices:
            matrix.weight = nn.Parameter(((matrix.weight.double() * scale) @ turn).float())
        norm.weight = nn.Parameter(torch.ones_like(norm.weight))

    def writes(*matrices: nn.Linear) -> None:
        for matrix in matrices:
            matrix.weight = nn.Parameter((turn.T @ matrix.weight.double()).float())

    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        reads(layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj)
        reads(layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj)
        writes(attention.o_proj, mlp.down_proj)
    head = nn.Linear(size, model.config.vocab_size, bias=False, device="meta")
    head.weight = cast(nn.Linear, model.lm_head).weight
    reads(cast(RMSNorm, model.norm), head)
    model.lm_head = head
    model.embed_tokens.weight = nn.Parameter((model.embed_tokens.weight.double() @ turn).float())


@torch.inference_mode()
def scores(texts: list[Text], weights: CpuWeights, turned: bool) -> tuple[list[Tensor], dict[str, int]]:
    """Log-probabilities [answer, V] of the answer's places in every text, and the bytes of the weights."""
    model = load_target(resolve_target(DEMO))
    if turned:
        rotate(model)
    longest = max(len(ids) for ids, _ in texts)
    model.prepare(max_positions=longest, cpu_weights=weights)
    pages = list(range(-(-longest // PAGE)))
    pool = KVPool.of(model.config, len(pages), PAGE, model.dtype, model.device)
    found = []
    for ids, prompt in texts:
        places = torch.arange(len(ids))
        batch = FlatBatch(torch.tensor(ids), places, places, [Segment(0, len(ids), 0, pages)])
        rows = torch.arange(prompt - 1, len(ids) - 1)
        found.append(model(batch, pool, logit_rows=rows).logits.log_softmax(-1))
    return found, model.weight_bytes


def compare(texts: list[Text], exact: list[Tensor], other: list[Tensor]) -> dict[str, float]:
    """KL to the rounded model, share of places with the same best token, perplexity of the answers under both."""
    said = torch.cat([torch.tensor(ids[prompt:]) for ids, prompt in texts])[:, None]
    left, right = torch.cat(exact), torch.cat(other)
    return {
        "kl": float((left.exp() * (left - right)).sum(-1).mean()),
        "same_best": float((left.argmax(-1) == right.argmax(-1)).float().mean()),
        "perplexity": float((-right.gather(1, said).mean()).exp()),
        "perplexity_float32": float((-left.gather(1, said).mean()).exp()),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=48, help="of every answer, at most")
    parser.add_argument("--no-rotate", action="store_true", help="the checkpoint as it is")
    args = parser.parse_args()
    texts = answers(args.tokens)
    exact, _ = scores(texts, "float32", turned=False)
    print(f"{len(texts)} answers, {sum(map(len, exact))} tokens")
    print(f"{'weights':<9}{'MB':>6}{'KL':>12}{'same best':>11}{'perplexity':>12}")
    results = {}
    for kind in get_args(CpuWeights):
        found, sizes = scores(texts, kind, turned=not args.no_rotate)
        row = compare(texts, exact, found) | {"bytes": float(sum(sizes.values()))}
        results[kind] = row
        print(f"{kind:<9}{row['bytes'] / 1e6:6.0f}{row['kl']:12.2e}{row['same_best']:11.2%}{row['perplexity']:12.3f}")
    result = {"benchmark": "weights", "rotated": not args.no_rotate, "results": results}
    print(json.dumps(result | {"conditions": conditions(0.0)}))


if __name__ == "__main__":
    main()
