"""What every benchmark needs: a quiet machine, the physical ceiling, the conditions, one JSON line at the end."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from dspark_core import __version__
from dspark_core.checkpoint.tokenizer import Tokenizer
from dspark_core.settings import CpuWeights
from server.config import ServerConfig
from server.engine import Engine
from server.loader import load_engine

PROMPTS = Path(__file__).with_name("prompts.jsonl")
# A background load above this many busy cores makes the figures worthless.
MAX_LOAD = 0.5


def require_quiet_machine(force: bool) -> float:
    """The load average; ends the program on a busy machine unless forced."""
    load = os.getloadavg()[0]
    print(f"load average {load:.2f}, {os.cpu_count()} cores, {torch.get_num_threads()} threads")
    if load > MAX_LOAD and not force:
        sys.exit(f"the machine is busy: load average {load:.2f}, expected at most {MAX_LOAD} (--force runs anyway)")
    return load


def read_bandwidth() -> float:
    """Bytes per second at which one large float32 array can be read (the best of five sums)."""
    data = torch.ones(256 * 2**20 // 4)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.numel() * 4 / best


@dataclass(frozen=True)
class Machine:
    """What this machine reaches on plain arrays: bytes read and float32 operations per second."""

    bandwidth: float
    matmul_rate: float

    @classmethod
    def measured(cls) -> Machine:
        machine = cls(read_bandwidth(), matmul_rate())
        print(f"{machine.bandwidth / 1e9:.1f} GB/s, {machine.matmul_rate / 1e9:.0f} GFLOP/s in float32")
        return machine

    def pass_seconds(self, engine: Engine, rows: float, context: float = 0) -> float:
        """Least time of one pass of the target: every weight and key read once, or the products' arithmetic.

        Args:
            rows: tokens in the pass.
            context: tokens whose keys and values are read, over all requests.
        """
        reading = sum(engine.target.weight_bytes.values()) + kv_bytes(engine) * context
        return max(reading / self.bandwidth, 2 * weight_count(engine) * rows / self.matmul_rate)


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """What every benchmark of the engine can be told."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-weights", default="exact", choices=get_args(CpuWeights))
    parser.add_argument("--force", action="store_true", help="run on a busy machine")
    return parser


def demo_engine(cpu_weights: CpuWeights, **settings: Any) -> Engine:
    """The demo model and draft behind the real engine; whole blocks unless `settings` say otherwise."""
    config = {"max_model_len": 2048, "kv_memory_fraction": 0.1, "verify": "full", "cpu_weights": cpu_weights}
    return load_engine(ServerConfig.model_validate(config | settings))


def chat_ids(tokenizer: Tokenizer, content: str) -> list[int]:
    """Prompt ids of one message of a user."""
    return tokenizer.encode_chat([{"role": "user", "content": content}])


def matmul_rate() -> float:
    """Floating-point operations per second of a large float32 product (the best of five)."""
    left, right = torch.randn(512, 2048), torch.randn(2048, 2048)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - start)
    return 2 * 512 * 2048 * 2048 / best


def weight_count(engine: Engine) -> int:
    """Target weights that every pass multiplies with, LM head included (the embedding is read a row at a time)."""
    return _layer_weights(engine) + engine.target.config.hidden_size * engine.vocab_size


def _layer_weights(engine: Engine) -> int:
    config = engine.target.config
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * width + 2 * kv_width)
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def kv_bytes(engine: Engine) -> int:
    """Bytes of the target's keys and values of one token."""
    config = engine.target.config
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * engine.target.dtype.itemsize


def load_prompts(path: Path = PROMPTS) -> list[dict[str, str]]:
    """Prompts of all domains, one JSON object a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def mixed_prompts() -> list[str]:
    """What is asked, in all domains by turns."""
    contents = [item["prompt"] for item in load_prompts()]
    return contents[0::4] + contents[1::4] + contents[2::4] + contents[3::4]


def conditions(load: float) -> dict[str, Any]:
    """Where and with what the figures were taken."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "command": " ".join(sys.argv),
        "commit": commit,
        "dspark": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average": round(load, 2),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
