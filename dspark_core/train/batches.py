"""From sequences to batches: which sequences a step sees, where their windows lie, and rows of tensors.

Everything is a function of the seed and the step number, so a run needs no state to be resumed exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspark_core.randomness import derive_key
from dspark_core.train.config import FitConfig
from dspark_core.train.data import Example
from dspark_core.train.features import States
from dspark_core.windows import Windows, make_windows, random_anchors, stride_anchors

VALIDATION_STRIDE = 8


class VocabSample:
    """The ids that a step takes its softmaxes over: all that the data supervises, and random others.

    Args:
        data_ids: ids that occur as labels, ascending.
        size: ids in all; as many as there are labels if that is more.
    """

    def __init__(self, data_ids: Tensor, vocab_size: int, size: int, seed: int) -> None:
        others = torch.ones(vocab_size, dtype=torch.bool)
        others[data_ids] = False
        self._data_ids, self._others = data_ids, others.nonzero().squeeze(-1)
        self._size, self._seed = size, seed

    def of_step(self, step: int) -> Tensor:
        """Ids of a step, ascending."""
        generator = torch.Generator().manual_seed(derive_key("vocabulary", self._seed, step))
        count = max(self._size - len(self._data_ids), 0)
        drawn = self._others[torch.randperm(len(self._others), generator=generator)[:count]]
        return torch.cat((self._data_ids, drawn)).sort().values


@dataclass(frozen=True)
class Rows:
    """B rows of T tokens with N windows each; padding is neither anchor nor label.

    Attributes:
        input_ids, loss_mask, sequence_starts: [B, T].
        anchors, keep: [B, N].
        places: row and first token of each sequence.
        names: ids of the sequences, for people.
    """

    input_ids: Tensor
    loss_mask: Tensor
    sequence_starts: Tensor
    anchors: Tensor
    keep: Tensor
    places: list[tuple[int, int]]
    names: list[str]

    def windows(self, draft_len: int) -> Windows:
        return make_windows(self.input_ids, self.loss_mask, self.anchors, self.keep, draft_len, self.sequence_starts)

    def with_states(self, states: Sequence[States], device: torch.device) -> Batch:
        """Add the target's states of the sequences, and move everything to a device."""
        shape = self.input_ids.shape
        features, last_hidden = (
            part.new_zeros(*shape, part.shape[-1]) for part in (states[0].features, states[0].last_hidden)
        )
        for (row, start), state in zip(self.places, states, strict=True):
            features[row, start : start + len(state.features)] = state.features
            last_hidden[row, start : start + len(state.features)] = state.last_hidden
        moved = {n: v.to(device, non_blocking=True) for n, v in vars(self).items() if isinstance(v, Tensor)}
        rows = replace(self, **moved)  # type: ignore[arg-type]
        return Batch(rows, features.to(device, non_blocking=True), last_hidden.to(device, non_blocking=True))


@dataclass(frozen=True)
class Batch:
    """Rows and the target's states of their tokens.

    Attributes:
        features: [B, T, m * D] tapped outputs.
        last_hidden: [B, T, D], after the final norm.
    """

    rows: Rows
    features: Tensor
    last_hidden: Tensor


class Order:
    """Which sequences belong to which step: every epoch a new permutation, cut into equal groups.

    Args:
        count: sequences.
        group: sequences in one optimiser step, over all processes and forward passes.
    """

    def __init__(self, count: int, group: int, seed: int) -> None:
        self.count, self.group, self.seed = count, group, seed
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def of_step(self, step: int) -> list[tuple[int, int]]:
        """(sequence, epoch) of a step counted from 0; the end of an epoch and the start of the next may share one."""
        return [self._at(place) for place in range(step * self.group, (step + 1) * self.group)]

    def _at(self, place: int) -> tuple[int, int]:
        epoch, within = divmod(place, self.count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_key("order", self.seed, epoch))
            self._epoch, self._permutation = epoch, torch.randperm(self.count, generator=generator)
        return int(self._permutation[within]), epoch


def choose_anchors(example: Example, epoch: int, config: FitConfig) -> Tensor:
    """Anchors of a sequence in an epoch: other random ones each time it comes, or always the same stride."""
    mask = torch.tensor(example.supervised, dtype=torch.float32)
    if config.anchor_stride is not None:
        return stride_anchors(mask, config.draft_len, config.anchor_stride)
    generator = torch.Generator().manual_seed(derive_key("anchors", config.seed, epoch, example.id))
    return random_anchors(mask, config.num_anchors, generator)


def validation_anchors(example: Example, draft_len: int) -> Tensor:
    """The same anchors in every validation."""
    return stride_anchors(torch.tensor(example.supervised, dtype=torch.float32), draft_len, VALIDATION_STRIDE)


def make_rows(examples: Sequence[Example], anchors: Sequence[Tensor], row_tokens: int | None) -> Rows:
    """Lay sequences into rows, several end to end where `row_tokens` has room for them."""
    rows = _rows([len(example.token_ids) for example in examples], row_tokens)
    length = max(sum(len(examples[i].token_ids) for i in row) for row in rows)
    windows = max(1, *(sum(len(anchors[i]) for i in row) for row in rows))
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros(len(rows), length)
    starts = torch.arange(length).repeat(len(rows), 1)
    anchor_places = torch.zeros(len(rows), windows, dtype=torch.int64)
    keep = torch.zeros(len(rows), windows, dtype=torch.bool)
    places = []
    for number, row in enumerate(rows):
        start = window = 0
        for i in row:
            stop, last = start + len(examples[i].token_ids), window + len(anchors[i])
            ids[number, start:stop] = torch.tensor(examples[i].token_ids)
            mask[number, start:stop] = torch.tensor(examples[i].supervised, dtype=torch.float32)
            starts[number, start:stop] = start
            anchor_places[number, window:last] = anchors[i] + start
            keep[number, window:last] = True
            places.append((number, start))
            start, window = stop, last
    return Rows(ids, mask, starts, anchor_places, keep, places, [example.id for example in examples])


def _rows(lengths: Sequence[int], row_tokens: int | None) -> list[list[int]]:
    """Which sequences share a row: in order, as many as fit."""
    rows: list[list[int]] = []
    room = 0
    for i, length in enumerate(lengths):
        if row_tokens is None or length > room:
            rows.append([])
            room = row_tokens or 0
        rows[-1].append(i)
        room -= length
    return rows
