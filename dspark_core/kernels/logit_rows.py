"""Distributions by logits, whose tokens our kernels choose."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark_core.kernels.launch import Kernel
from dspark_core.randomness import Purpose
from dspark_core.verify import Verified

# x: address of float32 rows; size: of a row; temperatures: address of one for each row, or 0 for 1 everywhere.
SOFTMAX = Kernel("softmax")  # x, out, size, temperatures
UNIFORM = Kernel("uniform")  # int64 keys, int64 rounds, float64 out, purpose, slots
DRAW = Kernel("draw")  # x, size, temperatures, float64 numbers, int64 ids out
# x, size, temperatures, row starts, lens, slots, draft ids, addresses by slot of draft logits, their temperatures,
# float64 numbers of slots and of requests, int64 accepted and next ids out
VERIFY = Kernel("verify")
COUPLE = Kernel("couple")  # x, size, temperatures, keys, positions, purpose, int64 ids out
PICK = Kernel("pick")  # x, size, int64 ids out


class LogitRows:
    """Distributions over V tokens by their logits: softmax of rows divided by their temperatures.

    Args:
        logits: [N, V] float32 on a CPU, contiguous; not to be written to any more. Minus infinity is never drawn.
        temperature: [N] float32, or None for 1 everywhere.
    """

    def __init__(self, logits: Tensor, temperature: Tensor | None) -> None:
        _expect(logits, torch.float32, logits.shape)
        if temperature is not None:
            _expect(temperature, torch.float32, logits.shape[:1])
        self.logits, self.temperature = logits, temperature

    @property
    def _rows(self) -> tuple[int, int, int]:
        return self.logits.data_ptr(), self.logits.shape[1], _address(self.temperature)

    def draw(self, u: Tensor) -> Tensor:
        """As `dspark_core.distributions.Distributions` says."""
        _expect(u, torch.float64, self.logits.shape[:1])
        ids = torch.empty(len(u), dtype=torch.int64)
        DRAW(len(u), *self._rows, u.data_ptr(), ids.data_ptr())
        return ids

    def couple(self, keys: Tensor, positions: Tensor) -> Tensor:
        """As `dspark_core.distributions.Distributions` says."""
        for part in (keys, positions):
            _expect(part, torch.int64, self.logits.shape[:1])
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
        _expect(ids, torch.int64, (requests, slots), below=vocab)
        _expect(verify_lens, torch.int64, (requests,), below=slots + 1)
        _expect(row_start, torch.int64, (requests,), below=len(self.logits))
        assert int((row_start + verify_lens).max()) < len(self.logits), "rows that are not there"
        _expect(accept_u, torch.float64, (requests, slots))
        _expect(residual_u, torch.float64, (requests,))
        assert len(drafts) == slots
        assert all(draft.logits.shape == (requests, vocab) for draft in drafts)
        assert all(draft.temperature is drafts[0].temperature for draft in drafts)
        places = torch.tensor([draft.logits.data_ptr() for draft in drafts])
        accepted, chosen = torch.empty(2, requests, dtype=torch.int64)
        VERIFY(
            requests, *self._rows, row_start.data_ptr(), verify_lens.data_ptr(), slots, ids.data_ptr(),
            places.data_ptr(), _address(drafts[0].temperature), accept_u.data_ptr(), residual_u.data_ptr(),
            accepted.data_ptr(), chosen.data_ptr(),
        )  # fmt: skip
        return Verified(accepted, chosen)


def _address(temperature: Tensor | None) -> int:
    return 0 if temperature is None else temperature.data_ptr()


def _expect(tensor: Tensor, dtype: torch.dtype, shape: Sequence[int], *, below: int | None = None) -> None:
    """Kernels trust what they are given. `below`: for numbers from 0 on."""
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, tuple(shape)), (tensor.dtype, tensor.shape, shape)
    assert tensor.is_contiguous()
    if below is not None and tensor.numel():
        numbers = tensor.numpy()
        assert 0 <= numbers.min() <= numbers.max() < below, f"{tensor.tolist()}, expected 0 to {below - 1}"


def most_likely(logits: Tensor) -> Tensor:
    """As `dspark_core.verify.greedy_choices`, of float32 logits on a CPU."""
    _expect(logits, torch.float32, logits.shape)
    ids = torch.empty(len(logits), dtype=torch.int64)
    PICK(len(logits), logits.data_ptr(), logits.shape[1], ids.data_ptr())
    return ids


def softmax(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Softmax of the rows of `logits` [N, V] divided by `temperature` [N]; float32, contiguous."""
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    assert temperature is None or temperature.shape == logits.shape[:1]
    out = torch.empty_like(logits)
    divisors = 0 if temperature is None else temperature.data_ptr()
    SOFTMAX(logits.shape[0], logits.data_ptr(), out.data_ptr(), logits.shape[1], divisors)
    return out


def uniform(keys: Tensor, rounds: Tensor, purpose: int, slots: int) -> Tensor:
    """`dspark_core.randomness.uniform` of keys and rounds [R], a purpose and slots 0, 1, ...: [R, slots]."""
    assert keys.is_contiguous()
    assert rounds.is_contiguous()
    assert keys.shape == rounds.shape
    out = torch.empty(len(keys), slots, dtype=torch.float64)
    UNIFORM(len(keys), keys.data_ptr(), rounds.data_ptr(), out.data_ptr(), purpose, slots)
    return out
