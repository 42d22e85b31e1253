"""Several processes compute what one computes: gradients, whole runs, and runs resumed, with DDP and with FSDP2."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspark_core.train.ranks import Ranks
from dspark_core.train.setup import prepare_run
from dspark_core.train.trainer import _step, fit
from tests.core.train.runs import log_lines, settings

ROOT = Path(__file__).parents[3]
ROUNDING = 1e-5  # sums over two processes are made in another order

# Makes a step without updating, and keeps the gradients.
GRADIENTS = """
import gc, sys, torch
from pathlib import Path
from torch.distributed.tensor import DTensor
from dspark_core.train.config import FitConfig
from dspark_core.train.ranks import Ranks
from dspark_core.train.setup import prepare_run
from dspark_core.train.trainer import _step
torch.set_num_threads(1)
ranks = Ranks.start("cpu")
run = prepare_run(FitConfig.model_validate_json(sys.argv[1]), ranks)
run.optimiser.step = lambda: None
_, norm = _step(run, 0, Path("."))
found = {n: p.grad for n, p in run.objective.draft.named_parameters() if p.grad is not None}
found = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}
if ranks.first:
    torch.save({"norm": norm, "gradients": found}, sys.argv[2])
# What still holds the process group when Python ends may be torn down while its threads run, which aborts the process.
del run, found
gc.collect()
ranks.stop()
"""
FIT = """
import sys, torch
from dspark_core.train.config import FitConfig
from dspark_core.train.trainer import fit
torch.set_num_threads(1)
fit(FitConfig.model_validate_json(sys.argv[1]))
"""


def free_port() -> int:
    """Below those that the system hands to clients: who calls such a port before anybody listens may get itself."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def run_two(code: str, *arguments: str) -> None:
    """Run code in two processes, as torchrun would."""
    shared = os.environ | {
        "PYTHONPATH": str(ROOT),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [sys.executable, "-c", code, *arguments]
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)


@pytest.mark.parametrize("sharding", ["none", "full"])
@pytest.mark.parametrize("changes", [{}, {"markov_head_type": "rnn", "loss_vocab": 220}])
def test_two_processes_compute_the_gradients_of_one(sharding: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Four sequences of different lengths a step: the normaliser is over all of them, wherever they are.

    The draft has made some steps: in the first one W2 is zero, and what lies behind it gets no gradient.
    """
    started = fit(settings(tmp_path, "started", max_steps=3, **changes))
    changes = changes | {"clip": 1e9, "init": str(started)}
    alone = prepare_run(settings(tmp_path, batch_size=2, accumulation=2, **changes), lone_rank())
    alone.optimiser.step = lambda: None  # type: ignore[assignment, misc]
    _, norm = _step(alone, 0, tmp_path)
    config = settings(tmp_path, batch_size=1, accumulation=2, sharding=sharding, **changes)
    run_two(GRADIENTS, config.model_dump_json(), str(tmp_path / "found.pt"))
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    expected = {n: p.grad for n, p in alone.objective.draft.named_parameters() if p.grad is not None}
    assert found["gradients"].keys() == expected.keys()
    assert found["norm"] == pytest.approx(norm, rel=1e-4)
    for name, gradient in expected.items():
        assert gradient.any(), name
        assert torch.allclose(found["gradients"][name], gradient, atol=ROUNDING * float(gradient.abs().max())), name


def lone_rank() -> Ranks:
    return Ranks(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_a_run_of_two_processes_is_a_run_of_one(sharding: str, tmp_path: Path) -> None:
    """Also when one of them stops after a checkpoint and both resume."""
    one = fit(settings(tmp_path, "one", batch_size=2, max_steps=8, save_dtype="float32"))
    config = settings(tmp_path, "two", batch_size=1, max_steps=8, save_dtype="float32", sharding=sharding)
    run_two(FIT, config.model_dump_json())
    (tmp_path / "two" / "state" / "step-00000008.pt").unlink()
    run_two(FIT, config.model_dump_json())
    for found, expected in zip(log_lines(tmp_path / "two"), log_lines(one), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert found["positions"] == expected["positions"]
    a, b = load_file(tmp_path / "two" / "model.safetensors"), load_file(one / "model.safetensors")
    assert all(torch.allclose(a[name], b[name], atol=1e-3) for name in b)  # AdamW turns rounding into whole steps
