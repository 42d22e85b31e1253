"""What will run for minutes on a borrowed GPU is tried here first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_gpu_check_runs_without_a_gpu() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--shape", "tiny", "--device", "cpu", "--repeats", "1"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["kernel_error_float32"] < 1e-5
    assert result["kernel_error_16_bits"] < 2e-3
    assert result["texts_changed"] == 0
    assert len(result["steps"]) == 7
