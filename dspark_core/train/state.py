"""The state of a run on disk: everything that the next step depends on, in one file that is whole or not there."""

from __future__ import annotations

import logging
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from dspark_core.checkpoint.files import write_atomically
from dspark_core.errors import CheckpointError
from dspark_core.train.build import FROZEN
from dspark_core.train.ranks import Ranks

logger = logging.getLogger(__name__)

FOLDER = "state"
_NAME = re.compile(r"step-(\d{8})\.pt")


def collect_state(objective: nn.Module, optimiser: torch.optim.Optimizer, ranks: Ranks) -> dict[str, Any]:
    """Weights that learn and the optimiser's state, whole and on the CPU; with shards every process must call it."""
    if ranks.size > 1:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, optimiser_state = get_state_dict(objective, optimiser, options=options)
    else:
        weights = {name: tensor.detach().cpu() for name, tensor in objective.state_dict().items()}
        optimiser_state = optimiser.state_dict()
    prefix = "draft."
    draft = {n.removeprefix(prefix): w for n, w in weights.items() if not n.removeprefix(prefix).startswith(FROZEN)}
    return {"draft": draft, "optimiser": optimiser_state, "random": torch.get_rng_state()}


def apply_state(state: dict[str, Any], objective: nn.Module, optimiser: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Put back what `collect_state` took."""
    weights = {f"draft.{name}": tensor for name, tensor in state["draft"].items()}
    if ranks.size > 1:
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_state_dict(
            objective, optimiser, model_state_dict=weights, optim_state_dict=state["optimiser"], options=options
        )
    else:
        objective.load_state_dict(weights, strict=False)
        optimiser.load_state_dict(state["optimiser"])
    torch.set_rng_state(state["random"])


def write_state(output: Path, step: int, state: dict[str, Any], keep: int) -> None:
    """Write the state after `step` steps, then drop all but the newest `keep`."""
    folder = output / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"step-{step:08d}.pt", lambda file: torch.save(state | {"step": step}, file))
    for path in _files(output)[keep:]:
        path.unlink()


def has_state(output: Path) -> bool:
    """Whether a run has come to its first checkpoint."""
    return bool(_files(output))


def read_newest_state(output: Path) -> dict[str, Any] | None:
    """The newest readable state of a run, or None before its first; an unreadable one is passed over with a warning.

    Raises:
        CheckpointError: there are states, and none can be read.
    """
    paths = _files(output)
    for path in paths:
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError) as error:
            logger.warning("%s cannot be read and is passed over: %s", path, str(error).splitlines()[0])
            continue
        return state
    if paths:
        raise CheckpointError(f"{output / FOLDER}: none of {len(paths)} states can be read; remove them to start anew")
    return None


def _files(output: Path) -> list[Path]:
    """State files, newest first."""
    found = [path for path in (output / FOLDER).glob("step-*.pt") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.name, reverse=True)
