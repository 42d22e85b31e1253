"""One request at a time on the demo model: speculation against plain decoding, on the same prompts in turn.

    python -m benchmarks.single_stream [--max-tokens 64] [--cpu-weights exact] [--force]

Plain decoding is the same engine with `speculative: false`: no draft runs and no layer is tapped.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass

from benchmarks.common import (
    chat_ids,
    conditions,
    demo_engine,
    load_prompts,
    make_parser,
    read_bandwidth,
    require_quiet_machine,
)
from dspark_core.sampling import SamplingParams
from server.engine import Engine
from server.request import RequestParams


@dataclass
class Tally:
    """Sums over requests of one kind."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.rounds if self.rounds else 1.0


def run(engine: Engine, prompt: str, params: RequestParams, tally: Tally) -> None:
    """Generate one answer alone; the prompt's own step is not counted."""
    request = engine.make_request(chat_ids(engine.tokenizer, prompt), params)
    engine.add(request)
    while request.num_generated == 0 and not request.finished:
        engine.step()
    start = time.perf_counter()
    while not request.finished:
        engine.step()
    tally.seconds += time.perf_counter() - start
    tally.tokens += request.num_generated - 1
    tally.rounds += request.speculation.rounds
    tally.accepted += request.speculation.accepted


def measure(engine: Engine, temperature: float, max_tokens: int) -> dict[str, dict[str, float]]:
    """Every prompt decoded both ways in turn; figures by domain and over all."""
    tallies: dict[tuple[str, bool], Tally] = defaultdict(Tally)
    for item in load_prompts():
        for speculative in (True, False):
            params = RequestParams(
                sampling=SamplingParams(temperature=temperature), max_tokens=max_tokens, speculative=speculative
            )
            run(engine, item["prompt"], params, tallies[item["domain"], speculative])
    domains = sorted({domain for domain, _ in tallies})
    rows = {domain: _row(tallies[domain, True], tallies[domain, False]) for domain in domains}
    rows["mean"] = {key: sum(row[key] for row in rows.values()) / len(rows) for key in rows[domains[0]]}
    return rows


def _row(speculative: Tally, plain: Tally) -> dict[str, float]:
    return {
        "acceptance_length": round(speculative.acceptance_length, 3),
        "plain_tokens_per_s": round(plain.tokens_per_second, 2),
        "tokens_per_s": round(speculative.tokens_per_second, 2),
        "ratio": round(speculative.tokens_per_second / plain.tokens_per_second, 3),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--ckpt", default="demo")
    parser.add_argument("--target", default=None)
    args = parser.parse_args()
    load = require_quiet_machine(args.force)
    bandwidth = read_bandwidth()
    engine = demo_engine(args.cpu_weights, ckpt=args.ckpt, target=args.target)
    weights = sum(engine.target.weight_bytes.values())
    ceiling = bandwidth / weights
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, target weights {weights / 1e6:.0f} MB a pass:")
    print(f"plain decoding cannot exceed {ceiling:.1f} tokens/s")
    run(engine, "Warm up.", RequestParams(sampling=SamplingParams(temperature=0), max_tokens=8), Tally())
    results = {f"temperature {t:g}": measure(engine, t, args.max_tokens) for t in (0.0, 1.0)}
    for name, rows in results.items():
        print(f"\n{name:16}{'acceptance length':>20}{'plain tokens/s':>18}{'dspark tokens/s':>18}{'ratio':>8}")
        for domain, row in rows.items():
            print(f"{domain:16}{row['acceptance_length']:20.2f}{row['plain_tokens_per_s']:18.1f}", end="")
            print(f"{row['tokens_per_s']:18.1f}{row['ratio']:8.2f}")
    print(
        json.dumps(
            {
                "benchmark": "single_stream",
                "ceiling_tokens_per_s": round(ceiling, 1),
                "cpu_weights": args.cpu_weights,
                "max_tokens": args.max_tokens,
                "results": results,
                "conditions": conditions(load),
            }
        )
    )


if __name__ == "__main__":
    main()
