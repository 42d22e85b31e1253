"""Distributions by logits, whose tokens our kernels choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark_core.arrays import Ints
from dspark_core.kernels.launch import Kernel
from dspark_core.kernels.rows import COUPLE, DRAW, PICK, VERIFY, expect
from dspark_core.randomness import Purpose
from dspark_core.verify import Verified


class LogitRows:
    """Distributions over V tokens by their logits: softmax of rows divided by their temperatures.

    Args:
        logits: [N, V] float32 on a CPU, contiguous; not to be written to any more. Minus infinity is never drawn.
        temperature: [N] float32, or None for 1 everywhere.
    """

    def __init__(self, logits: Tensor, temperature: Tensor | None) -> None:
        expect(logits, torch.float32, logits.shape)
        self.logits, self.temperature = logits, temperature
        self._rows = logits.data_ptr(), logits.shape[1], _of_rows(temperature, len(logits))

    def draw(self, u: Tensor) -> Tensor:
        """As `dspark_core.distributions.Distributions` says."""
        expect(u, torch.float64, self.logits.shape[:1])
        ids = torch.empty(len(u), dtype=torch.int64)
        DRAW(len(u), *self._rows, u.data_ptr(), ids.data_ptr())
        return ids

    def couple(self, keys: Tensor, positions: Tensor) -> Tensor:
        """As `dspark_core.distributions.Distributions` says."""
        for part in (keys, positions):
            expect(part, torch.int64, self.logits.shape[:1])
        ids = torch.empty(len(keys), dtype=torch.int64)
        COUPLE(len(keys), *self._rows, keys.data_ptr(), positions.data_ptr(), int(Purpose.NOISE), ids.data_ptr())
        return ids

    def verify(
        self,
        draft_ids: Tensor,
        drafts: Sequence[LogitRows],
        row_start: Tensor,
        verify_lens: Tensor,
        *,
        accept_u: Tensor,
        residual_u: Tensor,
    ) -> Verified:
        """As `dspark_core.distributions.Distributions` says."""
        (requests, slots), vocab = draft_ids.shape, self.logits.shape[1]
        ids = draft_ids.contiguous()
        expect(ids, torch.int64, (requests, slots), below=vocab)
        expect(verify_lens, torch.int64, (requests,), below=slots + 1)
        expect(row_start, torch.int64, (requests,), below=len(self.logits))
        assert int((row_start + verify_lens).max()) < len(self.logits), "rows that are not there"
        expect(accept_u, torch.float64, (requests, slots))
        expect(residual_u, torch.float64, (requests,))
        assert len(drafts) == slots
        assert all(draft.logits.shape == (requests, vocab) for draft in drafts)
        assert all(draft.temperature is drafts[0].temperature for draft in drafts)
        places = torch.tensor([draft.logits.data_ptr() for draft in drafts])
        accepted, chosen = torch.empty(2, requests, dtype=torch.int64)
        VERIFY(
            requests, *self._rows, row_start.data_ptr(), verify_lens.data_ptr(), slots, ids.data_ptr(),
            places.data_ptr(), _of_rows(drafts[0].temperature, requests), accept_u.data_ptr(), residual_u.data_ptr(),
            accepted.data_ptr(), chosen.data_ptr(),
        )  # fmt: skip
        return Verified(accepted, chosen)


def _of_rows(temperature: Tensor | None, rows: int) -> int:
    """Where the temperatures of so many rows are, 0 for none."""
    if temperature is None:
        return 0
    expect(temperature, torch.float32, (rows,))
    return temperature.data_ptr()


@dataclass(frozen=True)
class SlotChoice:
    """A kernel that chooses the tokens of R requests, a task each, in one slot of their blocks after the other.

    Attributes:
        arguments: names of what it takes. Not in `values` are "x", "size" and "ids": logits [R, size], and where the
            ids go [R].
        values: numbers of all slots, or one for each of K.
        shape: (K, R) that the values are for; None for any.
        alive: what addresses among them point to.
    """

    kernel: Kernel
    arguments: tuple[str, ...]
    values: dict[str, int | Ints]
    shape: tuple[int, ...] | None = None
    alive: tuple[Tensor | None, ...] = ()

    @classmethod
    def most_likely(cls) -> SlotChoice:
        return cls(PICK, ("x", "size", "ids"), {})

    @classmethod
    def drawn(cls, temperature: Tensor | None, u: Tensor) -> SlotChoice:
        """As `LogitRows.draw` of each slot, by numbers `u` [K, R]."""
        expect(u, torch.float64, u.shape)
        values: dict[str, int | Ints] = {"temperature": _of_rows(temperature, u.shape[1]), "u": _by_slot(u)}
        return cls(DRAW, ("x", "size", "temperature", "u", "ids"), values, u.shape, (temperature, u))

    @classmethod
    def coupled(cls, temperature: Tensor | None, keys: Tensor, positions: Tensor) -> SlotChoice:
        """As `LogitRows.couple` of each slot, of keys [R] and positions [K, R]."""
        expect(positions, torch.int64, positions.shape)
        expect(keys, torch.int64, positions.shape[1:])
        values: dict[str, int | Ints] = {
            "temperature": _of_rows(temperature, positions.shape[1]),
            "keys": keys.data_ptr(),
            "positions": _by_slot(positions),
            "purpose": int(Purpose.NOISE),
        }
        arguments = ("x", "size", "temperature", "keys", "positions", "purpose", "ids")
        return cls(COUPLE, arguments, values, positions.shape, (temperature, keys, positions))


def _by_slot(values: Tensor) -> Ints:
    """Where the numbers of each slot begin, of [K, R] of 8 bytes each."""
    slots, rows = values.shape
    return values.data_ptr() + np.arange(slots) * rows * 8
