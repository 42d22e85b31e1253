"""One request at a time on the demo model: speculation against plain decoding, on the same prompts in turn.

"auto" is what the server does by default: draft as far as earlier rounds say it pays; "full" are whole blocks.

    python -m benchmarks.single_stream [--max-tokens 64] [--cpu-weights exact] [--force]

Plain decoding is the same engine with `speculative: false`: no draft runs and no layer is tapped. The break-even length
is the acceptance length at which a round yields as many tokens a second as plain decoding. Last, the same draft runs
with its proposals replaced by a script, right just often enough for an acceptance length of 2.2.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass, replace

from benchmarks.common import (
    chat_ids,
    conditions,
    demo_engine,
    load_prompts,
    make_parser,
    read_bandwidth,
    require_quiet_machine,
)
from benchmarks.scripted import ScriptedDrafter
from dspark_core.checkpoint.calibration import Calibration
from dspark_core.sampling import SamplingParams
from server.auto_policy import AutoPolicy
from server.engine import Engine
from server.policy import LengthPolicy
from server.request import Request, RequestParams


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


def run(engine: Engine, prompt: str, params: RequestParams, tally: Tally) -> Request:
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
    return request


def measure_scripted(engine: Engine, max_tokens: int) -> dict[str, float]:
    """Greedy, over all prompts: the real draft's cost with an acceptance length of 2.2, known by calibration."""
    assert engine.drafter is not None
    tallies = {way: Tally() for way in ("full", "plain", "auto")}
    answers: dict[tuple[int, ...], list[int]] = {}
    real, usual = engine.drafter, engine.policy
    assert isinstance(usual, AutoPolicy)
    known = {"ratio": (0.99, 0.2, *[0.01] * (engine.draft_len - 2))}
    auto = AutoPolicy(usual.cost, replace(Calibration.raw(engine.draft_len), acceptance=known))

    def pattern(request: Request, _: int) -> tuple[int, list[float]]:
        right = (1, 1, 2, 1, 1)[request.speculation.rounds % 5]
        return right, [0.0] * engine.draft_len

    script = ScriptedDrafter(engine, answers, pattern)
    for item in load_prompts():
        greedy = {"sampling": SamplingParams(temperature=0), "max_tokens": max_tokens}
        answered = run(engine, item["prompt"], RequestParams(**greedy, speculative=False), tallies["plain"])
        answers[tuple(answered.prompt_ids)] = list(answered.output_ids)
        engine.drafter = script
        for way in ("full", "auto"):
            engine.policy = auto if way == "auto" else LengthPolicy()
            again = run(engine, item["prompt"], RequestParams(**greedy), tallies[way])
            assert again.tokens == answered.tokens, "speculation changed a text"
        engine.drafter = real
    engine.policy = usual
    return _row(*tallies.values())


def measure(engine: Engine, temperature: float, max_tokens: int) -> dict[str, dict[str, float]]:
    """Every prompt decoded in all ways in turn; figures by domain and over all."""
    tallies: dict[tuple[str, str], Tally] = defaultdict(Tally)
    auto = engine.policy
    for item in load_prompts():
        for way in ("full", "plain", "auto"):
            params = RequestParams(SamplingParams(temperature=temperature), max_tokens, speculative=way != "plain")
            engine.policy = auto if way == "auto" else LengthPolicy()
            run(engine, item["prompt"], params, tallies[item["domain"], way])
    engine.policy = auto
    domains = sorted({domain for domain, _ in tallies})
    rows = {domain: _row(*(tallies[domain, way] for way in ("full", "plain", "auto"))) for domain in domains}
    rows["mean"] = {key: sum(row[key] for row in rows.values()) / len(rows) for key in rows[domains[0]]}
    return rows


def _row(full: Tally, plain: Tally, auto: Tally) -> dict[str, float]:
    return {
        "acceptance_length": round(full.acceptance_length, 3),
        "break_even_length": round(full.seconds / full.rounds * plain.tokens_per_second, 3),
        "plain_tokens_per_s": round(plain.tokens_per_second, 2),
        "full_tokens_per_s": round(full.tokens_per_second, 2),
        "auto_tokens_per_s": round(auto.tokens_per_second, 2),
        "full_ratio": round(full.tokens_per_second / plain.tokens_per_second, 3),
        "auto_ratio": round(auto.tokens_per_second / plain.tokens_per_second, 3),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--ckpt", default="demo")
    parser.add_argument("--target", default=None)
    args = parser.parse_args()
    load = require_quiet_machine(args.force)
    bandwidth = read_bandwidth()
    engine = demo_engine(args.cpu_weights, ckpt=args.ckpt, target=args.target, verify="auto")
    weights = sum(engine.target.weight_bytes.values())
    ceiling = bandwidth / weights
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, target weights {weights / 1e6:.0f} MB a pass:")
    print(f"plain decoding cannot exceed {ceiling:.1f} tokens/s")
    run(engine, "Warm up.", RequestParams(sampling=SamplingParams(temperature=0), max_tokens=8), Tally())
    results = {f"temperature {t:g}": measure(engine, t, args.max_tokens) for t in (0.0, 1.0)}
    results["scripted, temperature 0"] = {"mean": measure_scripted(engine, args.max_tokens)}
    for name, rows in results.items():
        head = f"\n{name:26}{'length':>7}{'break-even':>11}{'plain':>8}{'full':>8}{'auto':>8} tokens/s"
        print(f"{head}{'full':>8}{'auto':>7}")
        for domain, row in rows.items():
            print(f"{domain:26}{row['acceptance_length']:7.2f}{row['break_even_length']:11.2f}", end="")
            print("".join(f"{row[f'{way}_tokens_per_s']:8.1f}" for way in ("plain", "full", "auto")), end="")
            print(f"{'':9}{row['full_ratio']:8.2f}{row['auto_ratio']:7.2f}")
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
