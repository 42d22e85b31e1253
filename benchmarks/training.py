"""Training throughput of a draft of the demo's shape: supervised positions a second, and where the time goes.

    python -m benchmarks.training [--precision bfloat16] [--loss-vocab N] [--force]

Random target states stand in for real ones (speed does not depend on them). The ceiling is the matrix products alone,
at the rate this machine reaches on the widest of them. The chunked loss is timed against the same losses by autograd.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.common import conditions, require_quiet_machine
from dspark_core.checkpoint.references import DEMO_DRAFT
from dspark_core.config import read_draft_config
from dspark_core.draft.backbone import DraftModel
from dspark_core.losses import LossInputs, LossWeights, chunked_loss, slot_terms
from dspark_core.train.batches import Batch, Rows
from dspark_core.train.objective import Objective

SEQUENCES, LENGTH, ANCHORS, DRAFT_LEN = 4, 256, 16, 7
D, V, RANK, TAPS, LAYERS = 576, 49152, 64, 5, 3


def best_of(run: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the fastest of some runs, after one to warm up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def make_draft() -> DraftModel:
    draft = DraftModel(read_draft_config(DEMO_DRAFT))
    for name, parameter in draft.named_parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.requires_grad_(not name.startswith(("embed_tokens.", "lm_head.")))
    return draft


def make_batch() -> Batch:
    ids = torch.randint(0, V, (SEQUENCES, LENGTH))
    anchors = torch.stack([torch.randperm(LENGTH - DRAFT_LEN - 1)[:ANCHORS].sort().values for _ in range(SEQUENCES)])
    keep = torch.ones_like(anchors).bool()
    rows = Rows(ids, torch.ones(SEQUENCES, LENGTH), torch.zeros_like(ids), anchors, keep, [], [])
    return Batch(rows, torch.randn(SEQUENCES, LENGTH, TAPS * D), torch.randn(SEQUENCES, LENGTH, D))


def products(vocab: int) -> float:
    """Multiply-adds times two of a step's matrix products, forward and backward."""
    positions = SEQUENCES * ANCHORS * DRAFT_LEN
    layer = D * (2 * D + 2 * 192) + 3 * D * 1536
    backbone = 6 * positions * LAYERS * layer
    context = 6 * SEQUENCES * LENGTH * (TAPS * D * D + LAYERS * 2 * D * 192)
    heads = 2 * positions * vocab * (3 * D + 3 * RANK)  # draft, target and back through the draft; W2 three ways
    return float(backbone + context + heads)


def compare_losses(compute: torch.dtype) -> dict[str, float]:
    """Seconds of loss and gradients of 256 positions: in chunks, and written out."""
    rows = 256
    head = torch.randn(V, D, dtype=compute) * 0.05
    hidden, target = torch.randn(rows, D, requires_grad=True), torch.randn(rows, D)
    ids, weights = torch.randint(0, V, (rows,)), torch.full((rows,), 1 / rows)

    def in_chunks() -> None:
        inputs = LossInputs(hidden, None, None, target, ids, weights, head, head, None)
        chunked_loss(inputs, LossWeights())[0].backward()  # type: ignore[no-untyped-call]

    def written_out() -> None:
        def logits(x: Tensor) -> Tensor:
            return (x.to(compute) @ head.T).float()

        slot_terms(logits(hidden), logits(target), ids, None).total(weights, LossWeights()).backward()  # type: ignore[no-untyped-call]

    return {"in_chunks_s": best_of(in_chunks, 3), "written_out_s": best_of(written_out, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--loss-vocab", type=int, default=None)
    parser.add_argument("--force", action="store_true", help="run on a busy machine")
    args = parser.parse_args()
    load = require_quiet_machine(args.force)
    torch.manual_seed(0)
    compute = getattr(torch, args.precision)
    draft, batch = make_draft(), make_batch()
    head = draft.lm_head.weight.detach().to(compute)
    objective = Objective(
        draft, head, torch.ones(TAPS * D), loss=LossWeights(), decay=DRAFT_LEN, chunk=128, compute=compute
    )
    vocab = None if args.loss_vocab is None else torch.randperm(V)[: args.loss_vocab].sort().values
    if vocab is not None:  # labels must be among them
        batch.rows.input_ids.copy_(vocab[batch.rows.input_ids % len(vocab)])
    optimiser = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], fused=True)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        objective(batch, torch.tensor(100.0), vocab)[0].backward()
        optimiser.step()

    wide = torch.randn(448, D, dtype=compute)
    rate = 2 * 448 * D * V / best_of(lambda: wide @ head.T)
    seconds, positions = best_of(step), SEQUENCES * ANCHORS * DRAFT_LEN
    floor = products(V if vocab is None else len(vocab)) / rate
    print(f"matrix products run at {rate / 1e9:.0f} GFLOP/s: a step cannot take less than {floor:.3f} s")
    print(f"a step of {positions} positions takes {seconds:.3f} s: {positions / seconds:.0f} positions/s")
    losses = compare_losses(compute)
    print("loss and gradients of 256 positions: ", end="")
    print(f"{losses['in_chunks_s']:.3f} s in chunks, {losses['written_out_s']:.3f} s by autograd")
    result = {
        "benchmark": "training",
        "precision": args.precision,
        "loss_vocab": args.loss_vocab,
        "floor_s": round(floor, 4),
        "step_s": round(seconds, 4),
        "positions_per_s": round(positions / seconds, 1),
        **{name: round(value, 4) for name, value in losses.items()},
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "conditions": conditions(load),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
