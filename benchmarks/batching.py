"""What requests at once bring: tokens/s of 1 to 16 concurrent requests on the demo model, plain and speculative.

    python -m benchmarks.batching [--cpu-weights exact] [--temperature 0] [--force]

Every point answers the same 16 prompts to the same lengths, so that the last ones of a point may run with fewer beside
them; without the prefix cache. The ceiling is that of the target's passes alone.
"""

from __future__ import annotations

import json
import time

from benchmarks.common import (
    Machine,
    chat_ids,
    conditions,
    demo_engine,
    load_prompts,
    make_parser,
    require_quiet_machine,
)
from dspark_core.sampling import SamplingParams
from server.engine import Engine
from server.request import Request, RequestParams, Speculation

CONCURRENT = (1, 2, 4, 8, 16)


def measure(engine: Engine, concurrent: int, params: RequestParams) -> dict[str, float]:
    """Keep `concurrent` requests running until all are answered; prompts count as time, not as tokens."""
    contents = [item["prompt"] for item in load_prompts()]
    contents = (contents + [f"{content} Be brief." for content in contents])[: max(CONCURRENT)]
    requests = [engine.make_request(chat_ids(engine.tokenizer, content), params) for content in contents]
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
    spent = Speculation(
        rounds=sum(request.speculation.rounds for request in requests),
        accepted=sum(request.speculation.accepted for request in requests),
    )
    return {
        "tokens_per_s": tokens / seconds,
        "per_request_tokens_per_s": tokens / seconds / concurrent,
        "acceptance_length": spent.acceptance_length,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    load = require_quiet_machine(args.force)
    engine = demo_engine(args.cpu_weights, prefix_cache=False, verify="auto")
    machine = Machine.measured()
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
        row["plain_ceiling_tokens_per_s"] = concurrent / machine.pass_seconds(engine, concurrent)
        results.append(row)
        first = results[0]
        print(f"{concurrent:8}{row['plain_tokens_per_s']:13.1f}", end="")
        print(
            f"{row['plain_tokens_per_s'] / first['plain_tokens_per_s']:9.2f}{row['plain_ceiling_tokens_per_s']:9.1f}",
            end="",
        )
        print(f"{row['speculative_tokens_per_s']:14.1f}", end="")
        print(f"{row['speculative_tokens_per_s'] / first['speculative_tokens_per_s']:9.2f}", end="")
        print(f"{row['speculative_acceptance_length']:8.2f}", flush=True)
    result = {"benchmark": "batching", "cpu_weights": args.cpu_weights, "temperature": args.temperature}
    print(json.dumps(result | {"max_tokens": args.max_tokens, "results": results, "conditions": conditions(load)}))


if __name__ == "__main__":
    main()
