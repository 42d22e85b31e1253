"""What every test gets: no network, two threads, fixed seeds, and a skip for `gpu` tests without CUDA."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path
from typing import Any

# Read when these libraries are imported, so set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# Without a GPU, Triton's kernels are interpreted.
os.environ.setdefault("TRITON_INTERPRET", "0" if Path("/dev/nvidia0").exists() else "1")
# Threads that spin while they wait make tiny operations many times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import pytest
import torch
from hypothesis import settings

# Tiny tensors: more threads only wait for each other, and one number everywhere makes a failure repeat.
torch.set_num_threads(2)

# The same examples in every run, and no failure because the machine was busy.
settings.register_profile("dspark", derandomize=True, deadline=None, database=None)
settings.load_profile("dspark")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """A test that draws from a global stream draws the same whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection to anywhere but this machine fails the test instead of depending on the outside."""
    connect = socket.socket.connect

    def connect_here(self: socket.socket, address: Any) -> None:
        local = self.family == socket.AF_UNIX or address[0] in {"127.0.0.1", "::1", "localhost"}
        assert local, f"a test tried to connect to {address}: tests run offline"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_here)
