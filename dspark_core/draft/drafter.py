"""Drafting: one parallel backbone pass, then sampling left to right through the sequential head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_core.devices import tensor_on
from dspark_core.draft.backbone import DraftModel
from dspark_core.draft.slot_program import SlotProgram
from dspark_core.models.attention import FlatBatch, Segment
from dspark_core.models.kv_cache import KVPool
from dspark_core.sampler import Round

# (slot, logits [R, V] float32, draft_ids [R, slot] chosen before) to token ids [R], whatever the logits are
Choose = Callable[[int, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DraftBlock:
    """One request's block: its anchor token, the anchor's position p, how many slots to draft, its page table.

    The draft's context of positions 0..p-1 must have been written; pages must cover p + num_slots positions.
    """

    anchor_id: int
    position: int
    num_slots: int
    pages: Sequence[int]


@dataclass(frozen=True)
class Drafts:
    """Proposals `draft_ids` [R, K] and `confidence_logits` [R, K] float32 (None without a confidence head).

    Requests with fewer than K slots have meaningless values after their own.
    """

    draft_ids: Tensor
    confidence_logits: Tensor | None


class Drafter:
    """A prepared draft model and the pool that holds its context."""

    def __init__(self, model: DraftModel, pool: KVPool) -> None:
        self.model, self.pool = model, pool
        self.slot_program = SlotProgram.of(model.markov_head)

    @torch.inference_mode()
    def draft(self, blocks: Sequence[DraftBlock], choose: Choose) -> Drafts:
        """Draft a block for each request.

        Args:
            choose: picks the tokens of one slot; called for slot 0, 1, ... with what was chosen before. A `Round` may
                do it in kernels instead.
        """
        hidden = self._hidden(blocks)
        by_slot = hidden.transpose(0, 1)
        logits = self.model.lm_head(by_slot.flatten(0, 1)).float().unflatten(0, by_slot.shape[:2])
        anchors = tensor_on(self.model.device, [block.anchor_id for block in blocks])
        draft_ids, embedded = self._in_kernels(logits, anchors, choose) or self._choose(
            by_slot, logits, anchors, choose
        )
        confidence = None
        if self.model.confidence_head is not None:
            confidence = self.model.confidence_head(hidden, embedded)
        return Drafts(draft_ids, confidence)

    def _choose(
        self, by_slot: Tensor, logits: Tensor, previous: Tensor, choose: Choose
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens [R, K], and embeddings [R, K, r] of those before them, left to right.

        Args:
            by_slot: [K, R, D] backbone states.
            logits: [K, R, V] of the LM head; the head's biases are added to them.
            previous: [R] tokens before the first slot.
        """
        head, rows = self.model.markov_head, len(previous)
        state = head.start(rows) if head is not None else None
        draft_ids = previous.new_empty(rows, len(by_slot))
        embeddings = []
        for slot, own in enumerate(logits):
            if head is not None:
                embedded = head.embed(previous)
                latent, state = head.step(embedded, by_slot[slot], state)
                head.add_bias_(own, latent)
                embeddings.append(embedded)
            previous = choose(slot, own, draft_ids[:, :slot])
            draft_ids[:, slot] = previous
        return draft_ids, torch.stack(embeddings, 1) if embeddings else None

    def _in_kernels(self, logits: Tensor, anchors: Tensor, choose: Choose) -> tuple[Tensor, Tensor] | None:
        """The same in one call; None where there is more to do than kernels can."""
        if self.slot_program is None or not isinstance(choose, Round):
            return None
        choice = choose.in_kernels(len(logits))
        if choice is None:
            return None
        ids, embedded = self.slot_program.run(logits, anchors, choice)
        choose.drew_from(logits)
        return ids.T.clamp_min(0), embedded.transpose(0, 1)

    def _hidden(self, blocks: Sequence[DraftBlock]) -> Tensor:
        """Backbone states [R, K, D]; rows past a request's own slots are zero."""
        size, model = self.pool.page_size, self.model
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        segments = []
        for block in blocks:
            span = range(block.position, block.position + block.num_slots)
            segments.append(Segment(len(ids), len(span), span[-1], block.pages, causal=False))
            ids += [block.anchor_id, *[model.config.mask_token_id] * (len(span) - 1)]
            positions += span
            slots += [block.pages[p // size] * size + p % size for p in span]
        block_ids, places, targets = tensor_on(model.device, [ids, positions, slots])
        flat = model.block_hidden(FlatBatch(block_ids, places, targets, segments), self.pool)
        longest = max(block.num_slots for block in blocks)
        if len(ids) == longest * len(blocks):
            return flat.view(len(blocks), longest, -1)
        hidden = flat.new_zeros(len(blocks), longest, flat.shape[-1])
        for row, segment in enumerate(segments):
            hidden[row, : segment.count] = flat[segment.start : segment.start + segment.count]
        return hidden

    def absorb(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write the draft's context of committed tokens: features [N, m * D], positions and slots [N]."""
        self.model.write_context(features, positions, slots, self.pool)
