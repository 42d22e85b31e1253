"""The processes of a run: one by itself, or many under torchrun."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dspark_core.devices import find_device
from dspark_core.train.objective import Objective


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def start(cls, device: str) -> Ranks:
        """Join the peers that torchrun's environment variables name; without them, be alone."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(0, 1, find_device(device))
        if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
            device = f"cuda:{os.environ['LOCAL_RANK']}"
        found = find_device(device)
        if found.type == "cuda":
            torch.cuda.set_device(found)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if found.type == "cuda" else "gloo")
        return cls(dist.get_rank(), size, found)

    @property
    def first(self) -> bool:
        """Whether this process writes files and talks to people."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def stop(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def wrap(self, objective: Objective, sharding: str) -> nn.Module:
        """Let gradients be averaged over processes; `full` also shards weights, gradients and optimiser state."""
        if self.size == 1:
            return objective
        if sharding == "none":
            ids = [self.device] if self.device.type == "cuda" else None
            return DistributedDataParallel(objective, device_ids=ids)
        for layer in objective.draft.layers:
            fully_shard(layer)
        # Embedding and LM head are frozen: gathering them in every step would cost more than they take.
        frozen = {parameter for parameter in objective.parameters() if not parameter.requires_grad}
        fully_shard(objective, ignored_params=frozen)
        return objective
