"""Peak memory of a serving process beside what it must hold: weights as packed, keys and values, and the rest.

    python -m benchmarks.memory [--requests 16] [--cpu-weights exact] [--force]

The rest is Python, torch, the tokenizer, compiled kernels and a step's own rows; the aim is 400 MB at most.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.common import chat_ids, conditions, demo_engine, load_prompts, make_parser, require_quiet_machine
from dspark_core.models.linear import stored_as
from dspark_core.sampling import SamplingParams
from server.engine import Engine
from server.request import RequestParams

AIM = 400e6


def peak_bytes() -> int:
    """Most physical memory that this process has had at once."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "needs Linux"
    return int(found.group(1)) * 1024


def holdings(engine: Engine) -> dict[str, int]:
    """Bytes that the engine must hold: weights (the embedding table is not packed), and pages of keys and values."""
    parts = {"target": sum(engine.target.weight_bytes.values()), "embedding": engine.target.embed_tokens.weight.nbytes}
    pools = [engine.pool]
    if engine.drafter is not None:
        draft = engine.drafter.model
        assert draft.runner is not None
        parts["draft"] = sum(draft.runner.weight_bytes.values()) + stored_as(draft.fc)[1]
        if draft.markov_head is not None:
            parts["draft"] += draft.markov_head.markov_w1.weight.nbytes + stored_as(draft.markov_head.markov_w2)[1]
        pools.append(engine.drafter.pool)
    written = sum(bool(page.any()) for page in engine.pool.keys)
    parts["keys and values"] = written * sum(memory[0].nbytes for pool in pools for memory in (pool.keys, pool.values))
    return parts


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=16, help="at once")
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    load = require_quiet_machine(args.force)
    engine = demo_engine(args.cpu_weights, max_model_len=1024)
    loading, prompts = peak_bytes(), load_prompts()
    for number in range(args.requests):
        ids = chat_ids(engine.tokenizer, prompts[number % len(prompts)]["prompt"])
        params = RequestParams(SamplingParams(temperature=args.temperature), max_tokens=64)
        engine.add(engine.make_request(ids, params))
    while engine.has_work:
        engine.step()
    peak = peak_bytes()  # before the pages are looked at, which touches all of them
    parts = {"peak while loading": loading, "peak": peak, **holdings(engine)}
    parts["rest"] = peak - sum(size for name, size in parts.items() if "peak" not in name)
    for name, size in parts.items():
        print(f"{name:20}{size / 1e6:8.0f} MB")
    print(f"{'aim for the rest':20}{AIM / 1e6:8.0f} MB")
    result = {"benchmark": "memory", "requests": args.requests, "cpu_weights": args.cpu_weights, "bytes": parts}
    print(json.dumps(result | {"within_aim": parts["rest"] <= AIM, "conditions": conditions(load)}))


if __name__ == "__main__":
    main()
