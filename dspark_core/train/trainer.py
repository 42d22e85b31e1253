"""`dspark-train fit`: the loop, from the first step or from where a run stopped, to a draft that can be served."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from dspark_core.checkpoint.files import write_atomically
from dspark_core.checkpoint.save import save_draft
from dspark_core.errors import CheckpointError
from dspark_core.keys import Keys
from dspark_core.train.batches import Batch, choose_anchors, make_batch, validation_anchors
from dspark_core.train.config import FitConfig
from dspark_core.train.log import RunLog
from dspark_core.train.objective import Tally
from dspark_core.train.optimiser import clip_gradients, learning_rate, set_learning_rate
from dspark_core.train.ranks import Ranks
from dspark_core.train.setup import Run, prepare_run
from dspark_core.train.state import apply_state, collect_state, read_newest_state, write_state

logger = logging.getLogger(__name__)

SETTINGS = "fit.json"
# What may change when a run is resumed: nothing that its weights depend on.
_FREE = {"output", "log_every", "save_every", "keep", "device", "save_dtype", "save_embeddings"}


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why, and which file holds what led to it."""


def fit(config: FitConfig) -> Path:
    """Train a draft; returns its folder, which `dspark-serve --ckpt` serves. A run that is there is resumed.

    Raises:
        CheckpointError: what it starts from cannot be used, or the folder holds a run with other settings.
        TrainingError: loss or gradient is not finite.
    """
    ranks = Ranks.start(config.device)
    try:
        output = Path(config.output)
        _claim(output, config, ranks)
        run = prepare_run(config, ranks)
        _train(run, output)
        return output
    finally:
        ranks.stop()


def _claim(output: Path, config: FitConfig, ranks: Ranks) -> None:
    """Note the run's settings in its folder; a run begun with others is not touched."""
    path = output / SETTINGS
    wanted = json.loads(config.model_dump_json())
    if path.exists():
        begun = Keys.of_file(path).values
        if different := [n for n in wanted if n not in _FREE and begun.get(n) != wanted[n]]:
            name = different[0]
            raise CheckpointError(
                f"{output} holds a run with {name} {begun.get(name)!r}, now it is {wanted[name]!r}; "
                "expected the same settings, or another output folder"
            )
    ranks.barrier()
    if ranks.first:
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(json.dumps(wanted, indent=1).encode()))


def _train(run: Run, output: Path) -> None:
    start = 0
    state = read_newest_state(output)
    if state is not None:
        apply_state(state, run.wrapped, run.optimiser, run.ranks)
        start = state["step"]
        logger.info("%s: resuming after step %d of %d", output, start, run.num_steps)
    log = RunLog(output, start) if run.ranks.first else None
    bar = tqdm(total=run.num_steps, initial=start, unit="step", disable=not run.ranks.first, smoothing=0.05)
    with bar, contextlib.closing(log) if log else contextlib.nullcontext():
        tally, since = _empty_tally(run), time.perf_counter()
        for step in range(start, run.num_steps):
            stepped, norm = _step(run, step, output)
            tally.add(stepped)
            bar.update()
            done = step + 1
            if done % run.config.log_every == 0 or done == run.num_steps:
                seconds, since = time.perf_counter() - since, time.perf_counter()
                _report(run, log, done, tally, norm, seconds, bar)
                tally = _empty_tally(run)
            if run.validation and (done % run.config.eval_every == 0 or done == run.num_steps):
                _validate(run, log, done)
            if done % run.config.save_every == 0 or done == run.num_steps:
                _save(run, output, done)


def _step(run: Run, step: int, output: Path) -> tuple[Tally, float]:
    """One optimiser step; statistics of this process's batches, and the norm of the gradient."""
    config, ranks = run.config, run.ranks
    members = run.order.of_step(step)[ranks.rank :: ranks.size]
    batches = []
    for first in range(0, len(members), config.batch_size):
        part = [(run.training[i], epoch) for i, epoch in members[first : first + config.batch_size]]
        examples = [run.source.examples[index] for index, _ in part]
        anchors = [choose_anchors(example, epoch, config) for example, (_, epoch) in zip(examples, part, strict=True)]
        states = run.source.states([index for index, _ in part])
        batches.append(make_batch(examples, states, anchors, config.row_tokens).to(ranks.device))
    weight = torch.stack([run.objective.weight(run.objective.windows(batch)) for batch in batches]).sum()
    normaliser = ranks.sum(weight)
    set_learning_rate(run.optimiser, learning_rate(step, run.num_steps, config))
    run.optimiser.zero_grad(set_to_none=True)
    tally, total, vocab = _empty_tally(run), torch.zeros((), device=ranks.device), _vocab(run, step)
    for number, batch in enumerate(batches):
        with _accumulating(run.wrapped, last=number == len(batches) - 1):
            # Gradients are averaged over processes, and the loss is a sum over them.
            loss, statistics = run.wrapped(batch, normaliser, vocab)
            (loss * ranks.size).backward()
        total += loss.detach()
        tally.add(statistics)
    norm = clip_gradients(run.objective.draft, config.clip)
    if not (torch.isfinite(ranks.sum(total)) and norm < float("inf")):
        _stop_non_finite(output, step, batches, float(total), norm, ranks)
    run.optimiser.step()
    return tally, norm


def _vocab(run: Run, step: int) -> Tensor | None:
    if run.vocab is None or step >= run.config.loss_vocab_share * run.num_steps:
        return None
    return run.vocab.of_step(step).to(run.ranks.device)


def _accumulating(wrapped: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[Any]:
    """Exchange gradients only with the last of a step's batches."""
    if isinstance(wrapped, DistributedDataParallel) and not last:
        return wrapped.no_sync()
    if isinstance(wrapped, FSDPModule):
        wrapped.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def _stop_non_finite(output: Path, step: int, batches: list[Batch], loss: float, norm: float, ranks: Ranks) -> None:
    path = output / f"non-finite-step-{step + 1}-rank-{ranks.rank}.pt"
    content = [dict(vars(batch)) for batch in batches]
    write_atomically(path, lambda file: torch.save(content, file))
    raise TrainingError(
        f"step {step + 1}: the loss is {loss}, the gradient's norm {norm}, expected finite numbers; its batch is in "
        f"{path}, and the weights before it in the last checkpoint"
    )


def _empty_tally(run: Run) -> Tally:
    return Tally.zeros(run.config.draft_len, run.ranks.device)


def _gather(run: Run, tally: Tally) -> dict[str, Any]:
    """Statistics over all processes."""
    whole = Tally(run.ranks.sum(tally.slots.clone()), run.ranks.sum(tally.windows.clone()))
    return whole.summary(run.objective.loss, run.config.decay)


def _report(run: Run, log: RunLog | None, step: int, tally: Tally, norm: float, seconds: float, bar: Any) -> None:
    values = _gather(run, tally)
    if log is None:
        return
    values["learning_rate"] = learning_rate(step - 1, run.num_steps, run.config)
    values["gradient_norm"] = norm
    values["tokens_per_s"] = values["positions"] / seconds
    log.write("train", step, values)
    bar.set_postfix(loss=f"{values['loss']:.3f}", tau=f"{values['expected_acceptance_length']:.3f}")


@torch.no_grad()
def _validate(run: Run, log: RunLog | None, step: int) -> None:
    """The loss on held-out prompts, always the same windows, split among processes."""
    tally, size = _empty_tally(run), run.config.batch_size
    alike = run.config.sharding == "full"  # every process must then run every forward pass
    mine = run.validation if alike else run.validation[run.ranks.rank :: run.ranks.size]
    for first in range(0, len(mine), size):
        indices = mine[first : first + size]
        examples = [run.source.examples[index] for index in indices]
        anchors = [validation_anchors(example, run.config.draft_len) for example in examples]
        batch = make_batch(examples, run.source.states(indices), anchors, None).to(run.ranks.device)
        one = torch.ones((), device=run.ranks.device)
        tally.add(run.objective(batch, one)[1])
    values = tally.summary(run.objective.loss, run.config.decay) if alike else _gather(run, tally)
    if log is not None:
        log.write("validation", step, values)


def _save(run: Run, output: Path, step: int) -> None:
    """State first, then the draft: a kill between them costs nothing."""
    state = collect_state(run.wrapped, run.optimiser, run.ranks)
    if not run.ranks.first:
        return
    try:
        write_state(output, step, state, run.config.keep)
        weights: dict[str, Tensor] = dict(state["draft"])
        weights["fc.weight"] = weights["fc.weight"] / run.scale.cpu()
        if run.config.save_embeddings:
            weights |= run.frozen
        dtype = getattr(torch, run.config.save_dtype)
        save_draft(output, run.draft_json, weights, dtype=dtype, with_embeddings=run.config.save_embeddings)
    except OSError as error:
        raise TrainingError(
            f"the checkpoint of step {step} cannot be written to {output}: {error.strerror}; earlier ones are whole"
        ) from None
