"""What every benchmark needs: a quiet machine, the physical ceiling, the conditions, one JSON line at the end."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from dspark_core import __version__

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


def load_prompts(path: Path = PROMPTS) -> list[dict[str, str]]:
    """Prompts of all domains, one JSON object a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


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
