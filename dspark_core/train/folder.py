"""The folder of a run: whose it is, the states it is resumed from, the draft that comes of it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch
from torch import Tensor

from dspark_core.checkpoint.save import save_draft
from dspark_core.errors import CheckpointError, RunError
from dspark_core.keys import Keys
from dspark_core.train.config import FitConfig
from dspark_core.train.objective import Tally
from dspark_core.train.setup import Run
from dspark_core.train.state import apply_state, collect_state, has_state, read_newest_state, write_state

logger = logging.getLogger(__name__)

SETTINGS = "fit.json"
# What may change when a run is resumed: nothing that its weights depend on.
_FREE = {"output", "log_every", "eval_every", "save_every", "keep", "device", "save_dtype", "save_embeddings"}


class TrainingError(RunError):
    """Training cannot go on; the message says why, and which file holds what led to it."""


def check_folder(output: Path, config: FitConfig) -> None:
    """A run begun with other settings is not touched, and a folder that holds something else neither."""
    path = output / SETTINGS
    wanted = json.loads(config.model_dump_json())
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"{output} is a file, expected a folder for the run")
    foreign = [name for name in ("config.json", "model.safetensors") if (output / name).exists()]
    if foreign and not path.exists():
        raise CheckpointError(f"{output} holds {foreign[0]} and no {SETTINGS}: not a run, expected another folder")
    if path.exists() and has_state(output):
        begun = Keys.of_file(path).values
        if different := [n for n in wanted if n not in _FREE and begun.get(n) != wanted[n]]:
            name = different[0]
            raise CheckpointError(
                f"{output} holds a run with {name} {begun.get(name)!r}, now it is {wanted[name]!r}; "
                "expected the same settings, or another output folder"
            )


def empty_tally(run: Run) -> Tally:
    return Tally.zeros(run.config.draft_len, run.ranks.device)


def resume(run: Run, output: Path) -> tuple[int, Tally]:
    """Steps that are done, and what has been counted since the last line of the log."""
    state = read_newest_state(output)
    if state is None:
        return 0, empty_tally(run)
    for key, value in run.identity.items():
        if (found := state["identity"].get(key)) != value:
            raise CheckpointError(
                f"{output}: the run was begun with {key} {found}, now it is {value}; expected the same, or another "
                "output folder"
            )
    apply_state(state, run.wrapped, run.optimiser, run.ranks)
    step: int = state["step"]
    logger.info("%s: resuming after step %d of %d", output, step, run.num_steps)
    tally = empty_tally(run)
    if run.ranks.first:
        tally.add(Tally(*(part.to(run.ranks.device) for part in state["tally"])))
    if step == run.num_steps:  # the end may have been killed between state and draft
        export(run, output, state["draft"])
    return step, tally


def save(run: Run, output: Path, step: int, tally: Tally) -> None:
    """State first, then the draft: a kill between them costs nothing."""
    state = collect_state(run.wrapped, run.optimiser, run.ranks)
    whole = [run.ranks.sum(part.clone()).cpu() for part in (tally.slots, tally.windows)]
    if not run.ranks.first:
        return
    try:
        write_state(output, step, state | {"tally": whole, "identity": run.identity}, run.config.keep)
        export(run, output, state["draft"])
    except (OSError, RuntimeError) as error:  # torch.save hides the former in the latter
        reason = next((e.strerror for e in (error, error.__context__) if isinstance(e, OSError)), None)
        raise TrainingError(
            f"the checkpoint of step {step} cannot be written to {output}: {reason or error}; earlier ones are whole"
        ) from None


def export(run: Run, output: Path, learnt: dict[str, Tensor]) -> None:
    """Write the draft as it is served: the scale of the features folded into `fc`."""
    if not run.ranks.first:
        return
    weights = dict(learnt)
    weights["fc.weight"] = weights["fc.weight"] / run.scale.cpu()
    if run.config.save_embeddings:
        weights |= run.frozen
    dtype = getattr(torch, run.config.save_dtype)
    save_draft(output, run.draft_json, weights, dtype=dtype, with_embeddings=run.config.save_embeddings)
