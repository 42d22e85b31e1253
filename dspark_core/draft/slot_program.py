"""The slots of blocks one after the other without Python in between: for a vanilla sequential head in kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn

from dspark_core.draft.heads import MarkovHead
from dspark_core.kernels import NO_CHOICE

if TYPE_CHECKING:  # they need llvmlite
    from dspark_core.kernels.launch import Program
    from dspark_core.logit_rows import SlotChoice
    from dspark_core.models.packed import PackedLinear


class SlotProgram:
    """Embeds the token before a slot, adds its bias to the slot's logits and chooses the token, for one slot after the
    other: one call where each slot would take a dozen, which is 1 to 2 % of a small model's step.
    """

    def __init__(self, head: MarkovHead) -> None:
        self.table = head.markov_w1.weight
        self.projection = cast("PackedLinear", head.markov_w2)
        assert self.table.dtype == torch.float32
        assert self.table.is_contiguous()
        self._programs: dict[tuple[str, int], Program] = {}

    @classmethod
    def of(cls, head: MarkovHead | None) -> SlotProgram | None:
        """None for heads that need more than that, and where our kernels do not run."""
        packed = type(head) is MarkovHead and not isinstance(head.markov_w2, nn.Linear)
        return cls(head) if head is not None and packed else None

    def run(self, logits: Tensor, anchor_ids: Tensor, choice: SlotChoice) -> tuple[Tensor, Tensor]:
        """Choose the tokens of all slots.

        Args:
            logits: [K, R, V] float32 base logits; the biases are added to them.
            anchor_ids: [R] tokens before the first slot, which the backbone has looked up too.

        Returns:
            ids [K, R], below 0 where there was no choice, and the embeddings [K, R, r] of the tokens before them.
        """
        slots, rows, size = logits.shape
        assert (logits.dtype, anchor_ids.dtype) == (torch.float32, torch.int64)
        assert logits.is_contiguous()
        assert anchor_ids.is_contiguous()
        assert size == self.projection.out_features
        assert anchor_ids.shape == (rows,)
        assert choice.shape in (None, (slots, rows)), (choice.shape, slots, rows)
        ids = anchor_ids.new_full((slots, rows), NO_CHOICE)  # the next slot reads them even if a kernel gave up
        embedded = self.table.new_empty(slots, rows, self.table.shape[1])
        place = np.arange(slots)
        id_places = ids.data_ptr() + place * rows * 8
        self._program(choice, slots).run(
            choice.values
            | {
                "rows": rows,
                "size": size,
                "previous": np.concatenate(([anchor_ids.data_ptr()], id_places[:-1])),
                "ids": id_places,
                "embedded": np.repeat(embedded.data_ptr() + place * embedded[0].nbytes, 2),
                "x": np.repeat(logits.data_ptr() + place * logits[0].nbytes, 3),
            }
        )
        return ids, embedded

    def _program(self, choice: SlotChoice, slots: int) -> Program:
        from dspark_core.kernels.launch import Program
        from dspark_core.kernels.layers import GATHER_ROWS
        from dspark_core.kernels.matmul import MATMUL, runs_of

        key = choice.kernel.name, slots
        if key not in self._programs:
            panels, bias = self.projection.panels, self.projection.bias
            address, rank = 0 if bias is None else bias.data_ptr(), panels.inputs
            program = self._programs[key] = Program()
            for _ in range(slots):
                program.add(GATHER_ROWS, "rows", "previous", self.table.data_ptr(), "embedded", rank)
                program.add(
                    MATMUL[panels.kind], runs_of(panels), "embedded", rank * 4, panels.address, address, "x", "x",
                    "rows", rank, panels.outputs,
                )  # fmt: skip
                program.add(choice.kernel, "rows", *choice.arguments)
            program.freeze()
        return self._programs[key]
