"""What requests at once bring: tokens/s of 1 to 16 concurrent requests on the demo model, plain and speculative.

    python -m benchmarks.batching [--cpu-weights float32] [--temperature 0] [--force]

Every point answers the same 16 prompts to the same lengths, so that the last ones of a point may run with fewer beside
them; without the prefix cache. The ceiling is that of the target's passes alone.
"""

from __future__ import annotations

import argparse
import json
import time

from benchmarks.common import (
    conditions,
    load_prompts,
    matmul_rate,
    read_bandwidth,
    require_quiet_machine,
    weight_bytes,
    weight_count,
)
from dspark_core.sampling import SamplingParams
from server.config import ServerConfig
from server.engine import Engine
from server.loader import load_engine
from server.request import Request, RequestParams

CONCURRENT = (1, 2, 4, 8, 16)


def measure(engine: Engine, concurrent: int, params: RequestParams) -> dict[str, float]:
    """Keep `concurrent` requests running until all are answered; prompts count as time, not as tokens."""
    contents = [item["prompt"] for item in load_prompts()]
    contents = (contents + [f"{content} Be brief." for content in contents])[: max(CONCURRENT)]
    chats = [engine.tokenizer.encode_chat([{"role": "user", "content": content}]) for content in contents]
    requests = [engine.make_request(ids, params) for ids in chats]
    waiting, running = list(requests), list[Request]()
    start = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < concurrent:
            running.append(waiting.pop(0))
            engine.add(running[-1])
        engine.step()
        running = [request for request in running if not request.finished]
    seconds = time.perf_counter() - start
    tokens = sum(request.num_generated for request in requests)
    rounds = sum(request.speculation.rounds for request in requests)
    accepted = sum(request.speculation.accepted for request in requests)
    return {
        "tokens_per_s": tokens / seconds,
        "per_request_tokens_per_s": tokens / seconds / concurrent,
        "acceptance_length": 1 + accepted / rounds if rounds else 1.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-weights", default="float32", choices=["float32", "float16", "int4"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--force", action="store_true", help="run on a busy machine")
    args = parser.parse_args()
    load = require_quiet_machine(args.force)
    config = {"ckpt": "demo", "max_model_len": 1024, "kv_memory_fraction": 0.1, "cpu_weights": args.cpu_weights}
    engine = load_engine(ServerConfig.model_validate(config | {"prefix_cache": False}))
    bandwidth, rate = read_bandwidth(), matmul_rate()
    measure(engine, max(CONCURRENT), RequestParams(SamplingParams(temperature=0), max_tokens=4))  # warms up
    results = []
    print(
        f"{'at once':>8}{'plain tok/s':>13}{'x alone':>9}{'ceiling':>9}{'dspark tok/s':>14}{'x alone':>9}{'length':>8}"
    )
    for concurrent in CONCURRENT:
        row: dict[str, float] = {"concurrent": concurrent}
        for name, speculative in (("plain", False), ("speculative", True)):
            sampling = SamplingParams(temperature=args.temperature)
            params = RequestParams(sampling, max_tokens=args.max_tokens, ignore_eos=True, speculative=speculative)
            found = measure(engine, concurrent, params)
            row |= {f"{name}_{key}": value for key, value in found.items()}
        a_pass = max(weight_bytes(engine, args.cpu_weights) / bandwidth, 2 * weight_count(engine) * concurrent / rate)
        row["plain_ceiling_tokens_per_s"] = concurrent / a_pass
        results.append(row)
        first = results[0]
        print(f"{concurrent:8}{row['plain_tokens_per_s']:13.1f}", end="")
        print(f"{row['plain_tokens_per_s'] / first['plain_tokens_per_s']:9.2f}{concurrent / a_pass:9.1f}", end="")
        print(f"{row['speculative_tokens_per_s']:14.1f}", end="")
        print(f"{row['speculative_tokens_per_s'] / first['speculative_tokens_per_s']:9.2f}", end="")
        print(f"{row['speculative_acceptance_length']:8.2f}", flush=True)
    result = {"benchmark": "batching", "cpu_weights": args.cpu_weights, "temperature": args.temperature}
    print(json.dumps(result | {"max_tokens": args.max_tokens, "results": results, "conditions": conditions(load)}))


if __name__ == "__main__":
    main()
