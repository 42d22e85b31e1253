"""Distributions by logits, whose tokens our kernels choose."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark_core.kernels.choosing import COUPLE, DRAW, PICK, VERIFY
from dspark_core.randomness import Purpose


class LogitRows:
    """Distributions over V tokens by their logits: softmax of rows divided by their temperatures.

    Args:
        logits: [N, V] float32 on a CPU, contiguous; not to be written to any more. Minus infinity is never drawn.
        temperature: [N] float32, or None for 1 everywhere.

    Attributes:
        scalings: [N, 3] by which a logit became a probability, once tokens were drawn.
    """

    def __init__(self, logits: Tensor, temperature: Tensor | None) -> None:
        assert logits.dtype == torch.float32
        assert logits.is_contiguous()
        assert temperature is None or temperature.shape == logits.shape[:1]
        self.logits, self.temperature = logits, temperature
        self.scalings = torch.empty(0)

    @property
    def _row_numbers(self) -> tuple[int, int, int]:
        temperatures = 0 if self.temperature is None else self.temperature.data_ptr()
        return self.logits.data_ptr(), self.logits.shape[1], temperatures

    def draw(self, u: Tensor) -> Tensor:
        """As `dspark_core.distributions.Distributions` says."""
        _expect(u, torch.float64, self.logits.shape[:1])
        ids, self.scalings = torch.empty(len(u), dtype=torch.int64), torch.empty(len(u), 3)
        DRAW(len(u), *self._row_numbers, u.data_ptr(), ids.data_ptr(), self.scalings.data_ptr())
        return ids

    def couple(self, keys: Tensor, positions: Tensor) -> Tensor:
        """As `dspark_core.distributions.Distributions` says."""
        for part in (keys, positions):
            _expect(part, torch.int64, self.logits.shape[:1])
        ids = torch.empty(len(keys), dtype=torch.int64)
        COUPLE(len(keys), *self._row_numbers, keys.data_ptr(), positions.data_ptr(), int(Purpose.NOISE), ids.data_ptr())
        return ids

    def verify(
        self,
        draft_ids: Tensor,
        drafts: Sequence[LogitRows],
        row_start: Tensor,
        verify_lens: Tensor,
        accept_u: Tensor,
        residual_u: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As `dspark_core.verify.verify_ratio`, of the target's rows; all `drafts` were drawn from."""
        requests, slots = draft_ids.shape
        ids, accept_u = draft_ids.contiguous(), accept_u.contiguous()
        _expect(ids, torch.int64, (requests, slots))
        _expect(accept_u, torch.float64, (requests, slots))
        _expect(residual_u, torch.float64, (requests,))
        for part in (row_start, verify_lens):
            _expect(part, torch.int64, (requests,))
        assert int((row_start + verify_lens).max()) < len(self.logits), "rows that are not there"
        assert len(drafts) == slots
        for draft in drafts:
            assert draft.logits.shape == (requests, self.logits.shape[1])
            _expect(draft.scalings, torch.float32, (requests, 3))
        places = torch.tensor([[d.logits.data_ptr() for d in drafts], [d.scalings.data_ptr() for d in drafts]])
        accepted, chosen = torch.empty(2, requests, dtype=torch.int64)
        VERIFY(
            requests, *self._row_numbers, row_start.data_ptr(), verify_lens.data_ptr(), slots, ids.data_ptr(),
            places[0].data_ptr(), places[1].data_ptr(), accept_u.data_ptr(), residual_u.data_ptr(),
            accepted.data_ptr(), chosen.data_ptr(),
        )  # fmt: skip
        return accepted, chosen


def _expect(tensor: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Kernels trust what they are given."""
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, tuple(shape)), (tensor.dtype, tensor.shape, shape)
    assert tensor.is_contiguous()


def most_likely(logits: Tensor) -> Tensor:
    """As `dspark_core.verify.greedy_choices`, of float32 logits on a CPU."""
    _expect(logits, torch.float32, logits.shape)
    ids = torch.empty(len(logits), dtype=torch.int64)
    PICK(len(logits), logits.data_ptr(), logits.shape[1], ids.data_ptr())
    return ids
