"""`dspark-train fit`: the loop, from the first step or from where a run stopped, to a draft that can be served."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from dspark_core.checkpoint.files import locked, write_atomically
from dspark_core.train.batches import Batch, Rows, choose_anchors, make_rows, validation_anchors
from dspark_core.train.config import FitConfig
from dspark_core.train.folder import SETTINGS, TrainingError, check_folder, empty_tally, resume, save
from dspark_core.train.log import RunLog
from dspark_core.train.objective import Tally
from dspark_core.train.optimiser import clip_gradients, learning_rate, set_learning_rate
from dspark_core.train.ranks import Ranks
from dspark_core.train.setup import Run, prepare_run

logger = logging.getLogger(__name__)


def fit(config: FitConfig) -> Path:
    """Train a draft; returns its folder, which `dspark-serve --ckpt` serves. A run that is there is resumed.

    Raises:
        CheckpointError: what it starts from cannot be used, or the folder holds a run with other settings.
        TrainingError: loss or gradient is not finite.
    """
    ranks = Ranks.start(config.device)
    try:
        output = Path(config.output)
        with locked(output) if ranks.first else contextlib.nullcontext():
            check_folder(output, config)
            run = prepare_run(config, ranks)
            ranks.barrier()
            if ranks.first:
                output.mkdir(parents=True, exist_ok=True)
                content = config.model_dump_json(indent=1)
                write_atomically(output / SETTINGS, lambda file: file.write(content.encode()))
            _train(run, output)
        return output
    finally:
        ranks.stop()


def _train(run: Run, output: Path) -> None:
    start, tally = resume(run, output)
    log = RunLog(output, start) if run.ranks.first else None
    bar = tqdm(total=run.num_steps, initial=start, unit="step", disable=not run.ranks.first, smoothing=0.05)
    with bar, contextlib.closing(log) if log else contextlib.nullcontext():
        since = time.perf_counter()
        for step in range(start, run.num_steps):
            stepped, norm = _step(run, step, output)
            tally.add(stepped)
            bar.update()
            done = step + 1
            if done % run.config.log_every == 0 or done == run.num_steps:
                seconds, since = time.perf_counter() - since, time.perf_counter()
                _report(run, log, done, tally, norm, seconds, bar)
                tally = empty_tally(run)
            if run.validation and (done % run.config.eval_every == 0 or done == run.num_steps):
                _validate(run, log, done)
            if done % run.config.save_every == 0 or done == run.num_steps:
                save(run, output, done, tally)


def _step(run: Run, step: int, output: Path) -> tuple[Tally, float]:
    """One optimiser step; statistics of this process's batches, and the norm of the gradient."""
    config, ranks = run.config, run.ranks
    members = run.order.of_step(step)[ranks.rank :: ranks.size]
    parts = [members[first : first + config.batch_size] for first in range(0, len(members), config.batch_size)]
    rows = [_rows(run, part) for part in parts]
    weight = torch.stack([run.objective.weight(part) for part in rows]).sum()
    normaliser = ranks.sum(weight.to(ranks.device))
    set_learning_rate(run.optimiser, learning_rate(step, run.num_steps, config))
    run.optimiser.zero_grad(set_to_none=True)
    tally, losses, vocab = empty_tally(run), [], _vocab(run, step)
    for number in range(len(parts)):
        batch = _batch(run, parts[number], rows[number])
        with _accumulating(run.wrapped, last=number == len(parts) - 1):
            # Gradients are averaged over processes, and the loss is a sum over them.
            loss, statistics = run.wrapped(batch, normaliser, vocab)
            (loss * ranks.size).backward()
        losses.append(loss.detach())
        tally.add(statistics)
    norm = clip_gradients(run.objective.draft, config.clip)
    each = torch.stack(losses)
    if not (torch.isfinite(ranks.sum(each.sum())) and norm < float("inf")):
        bad = int((~each.isfinite()).float().argmax())  # the first; of finite losses with a bad gradient, the first too
        _stop_non_finite(run, output, step, _batch(run, parts[bad], rows[bad]), float(each.sum()), norm)
    run.optimiser.step()
    return tally, norm


def _rows(run: Run, part: list[tuple[int, int]]) -> Rows:
    """Tokens and windows of some (sequence, epoch)."""
    examples = [run.source.examples[run.training[i]] for i, _ in part]
    anchors = [choose_anchors(e, epoch, run.config) for e, (_, epoch) in zip(examples, part, strict=True)]
    return make_rows(examples, anchors, run.config.row_tokens)


def _batch(run: Run, part: list[tuple[int, int]], rows: Rows) -> Batch:
    return rows.with_states(run.source.states([run.training[i] for i, _ in part]), run.ranks.device)


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


def _stop_non_finite(run: Run, output: Path, step: int, batch: Batch, loss: float, norm: float) -> None:
    path = output / f"non-finite-step-{step + 1}-rank-{run.ranks.rank}.pt"
    content = vars(batch.rows) | {"features": batch.features, "last_hidden": batch.last_hidden}
    write_atomically(path, lambda file: torch.save(content, file))
    raise TrainingError(
        f"step {step + 1}: the loss is {loss}, the gradient's norm {norm}, expected finite numbers; its batch is in "
        f"{path}, and the weights before it in the last checkpoint"
    )


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
    tally, size = empty_tally(run), run.config.batch_size
    alike = run.config.sharding == "full"  # every process must then run every forward pass
    mine = run.validation if alike else run.validation[run.ranks.rank :: run.ranks.size]
    for first in range(0, len(mine), size):
        indices = mine[first : first + size]
        examples = [run.source.examples[index] for index in indices]
        anchors = [validation_anchors(example, run.config.draft_len) for example in examples]
        batch = make_rows(examples, anchors, None).with_states(run.source.states(indices), run.ranks.device)
        one = torch.ones((), device=run.ranks.device)
        tally.add(run.objective(batch, one)[1])
    values = tally.summary(run.objective.loss, run.config.decay) if alike else _gather(run, tally)
    if log is not None:
        log.write("validation", step, values)
