"""What checking more tokens in one pass costs: the target's forward over 1 to 64 rows of one request.

    python -m benchmarks.verify_curve [--cpu-weights exact] [--context 256] [--force]

The ceiling beside each time is the larger of reading every weight and key once and of the products' arithmetic, at the
rates that this machine reaches on plain arrays.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.common import Machine, conditions, demo_engine, make_parser, require_quiet_machine
from dspark_core.models.attention import FlatBatch, Segment
from server.engine import Engine

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def forward(engine: Engine, rows: int, context: int) -> Callable[[], object]:
    """A pass over `rows` tokens after `context` others, scores of all of them wanted."""
    positions = torch.arange(context, context + rows)
    pages = list(range(engine.memory.pages_for(context + max(ROWS))))
    batch = FlatBatch(positions % engine.vocab_size, positions, positions, [Segment(0, rows, context, pages)])
    return lambda: engine.target(batch, engine.pool)


def measure(engine: Engine, context: int, repeats: int) -> dict[int, list[float]]:
    """Seconds of every pass; the row counts take turns, so that noise hits all alike."""
    passes = {rows: forward(engine, rows, context) for rows in ROWS}
    seconds: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for turn in range(repeats + 2):
        for rows, run in passes.items():
            start = time.perf_counter()
            run()
            if turn >= 2:  # the first two warm up
                seconds[rows].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--context", type=int, default=256, help="tokens already in memory")
    parser.add_argument("--repeats", type=int, default=25)
    args = parser.parse_args()
    load = require_quiet_machine(args.force)
    engine = demo_engine(args.cpu_weights)
    for memory in (engine.pool.keys, engine.pool.values):
        memory[
            : (args.context + max(ROWS)) // engine.pool.page_size + 1
        ].normal_()  # untouched memory would be read from one page of zeros
    machine = Machine.measured()
    seconds = measure(engine, args.context, args.repeats)
    rows = {}
    print(f"{'rows':>6}{'ms':>9}{'ceiling ms':>12}{'x one row':>11}")
    for count, own in seconds.items():
        ceiling = machine.pass_seconds(engine, count, args.context)
        ratio = median(a / b for a, b in zip(own, seconds[1], strict=True))
        rows[count] = {"ms": median(own) * 1e3, "ceiling_ms": ceiling * 1e3, "ratio": ratio}
        print(f"{count:6}{median(own) * 1e3:9.1f}{ceiling * 1e3:12.1f}{ratio:11.2f}")
    result = {"benchmark": "verify_curve", "cpu_weights": args.cpu_weights, "context": args.context, "rows": rows}
    print(json.dumps(result | {"conditions": conditions(load)}))


if __name__ == "__main__":
    main()
