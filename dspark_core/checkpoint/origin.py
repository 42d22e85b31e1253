"""What a measurement belongs to: a file made for one pair of models or one machine must not serve another."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dspark_core.errors import CheckpointError


@dataclass(frozen=True)
class Origin:
    """Where numbers were measured.

    Attributes:
        target, draft: fingerprints of the models.
        draft_len: slots of a block.
        dtype, weights: of the models in memory.
        device: kind of what they ran on, cpu or cuda.
        machine: its name.
        threads: of the CPU's kernels; 0 on another device.
    """

    target: str
    draft: str
    draft_len: int
    dtype: str
    weights: str
    device: str
    machine: str
    threads: int

    @classmethod
    def of(
        cls, *, target: str, draft: str, draft_len: int, dtype: torch.dtype, weights: str, device: torch.device
    ) -> Origin:
        """For models on this machine."""
        on_cpu = device.type == "cpu"
        return cls(
            target,
            draft,
            draft_len,
            str(dtype).removeprefix("torch."),
            weights if on_cpu else "",
            device.type,
            _processor() if on_cpu else torch.cuda.get_device_name(device),
            torch.get_num_threads() if on_cpu else 0,
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def check(self, found: Mapping[str, Any], where: object, names: tuple[str, ...]) -> None:
        """Raise CheckpointError, naming the field, if what a file says of itself differs in one of `names`."""
        for name in names:
            if name not in found:
                raise CheckpointError(f"{where}: does not say for which {name} it was made")
            if found[name] != getattr(self, name):
                raise CheckpointError(
                    f"{where}: made for {name} {found[name]!r}, this server's is {getattr(self, name)!r}; "
                    "make it again with dspark-calibrate, or move it away"
                )


def _processor() -> str:
    """Name of the CPU, as far as the system says."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
