"""What changes a request's scores before they become probabilities: penalties, biases, bans and a grammar.

Each row of a block sees the tokens before it, those of earlier slots included, as if they had been decoded plainly.
The draft's rows are changed like the target's, so that it proposes what may stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dspark_core.devices import tensor_on
from dspark_core.grammar import Constraint
from dspark_core.sampling import SamplingParams

NEVER = float("-inf")


@dataclass(slots=True)  # one for each request in every step
class RowSource:
    """One request's part in a round.

    Attributes:
        params: its sampling parameters.
        key: of its random stream; with a seed, a pure function of seed and choice index.
        round: number of this round, for draws that are fresh in every round.
        position: absolute position of the token that slot 0 predicts.
        prompt_ids, output_ids: tokens so far, read only when the request is penalised.
        banned_ids, banned_slots: tokens that must not be chosen, in so many slots from the first.
        constraint: the grammar that its text follows.
    """

    params: SamplingParams
    key: int
    round: int
    position: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    banned_ids: Sequence[int] = ()
    banned_slots: int = 0
    constraint: Constraint | None = None

    @property
    def adjusted(self) -> bool:
        """Whether its scores are changed at all."""
        banned = self.banned_slots > 0 and len(self.banned_ids) > 0
        return self.params.penalised or bool(self.params.logit_bias) or banned or self.constraint is not None


class Adjustments:
    """All of them for one request in one round, in this order: penalties, biases, bans, grammar.

    Args:
        source: the request.
        device: of the logits.
    """

    def __init__(self, source: RowSource, device: torch.device) -> None:
        self.source, self.device = source, device
        self._penalties = Penalties(source, device) if source.params.penalised else None
        self._banned_ids: Tensor | None = None
        self._masks: dict[tuple[int, ...], Tensor] = {}  # by block; drafting and verification ask the same

    def apply_(self, logits: Tensor, block_ids: Tensor, *, first: int = 0) -> None:
        """Change logits [n, V] of rows first, first + 1, ... of a block, in place.

        Args:
            block_ids: tokens of the block; row j sees the first j of them, besides prompt and output.
        """
        if self._penalties:
            logits.copy_(self._penalties.apply(logits, block_ids, first=first))
        if self.source.params.logit_bias:
            ids, values = self._bias
            logits[:, ids] += values
        block = tuple(block_ids.tolist()) if self.source.constraint else ()
        for row in range(len(logits)):
            slot = first + row
            banned = slot < self.source.banned_slots
            if self.source.constraint:
                mask = self._mask_after(self.source.constraint, block[:slot])
                if banned and (left := mask.index_fill(0, self._banned(logits), NEVER)).amax() == 0:
                    mask = left  # else the text is whole, and has no other way than to end
                logits[row].add_(mask)
            elif banned and len(ids := self._banned(logits)) < logits.shape[-1]:  # something must remain to be chosen
                logits[row, ids] = NEVER

    @cached_property
    def _bias(self) -> tuple[Tensor, Tensor]:
        """Ids, and what is added to their scores."""
        ids, values = zip(*self.source.params.logit_bias, strict=True)
        return tensor_on(self.device, list(ids)), tensor_on(self.device, list(values), torch.float32)

    def _banned(self, logits: Tensor) -> Tensor:
        """Banned ids, those that have a score."""
        if self._banned_ids is None:
            self._banned_ids = tensor_on(self.device, [i for i in self.source.banned_ids if i < logits.shape[-1]])
        return self._banned_ids

    def _mask_after(self, constraint: Constraint, block: tuple[int, ...]) -> Tensor:
        if block not in self._masks:
            self._masks[block] = constraint.mask(block).to(self.device)
        return self._masks[block]


class Penalties:
    """Presence, frequency and repetition penalties of one request in one round.

    Args:
        source: its parameters and tokens so far.
        device: of the logits.
    """

    def __init__(self, source: RowSource, device: torch.device) -> None:
        self.params = source.params
        self.prompt = tensor_on(device, list(source.prompt_ids))
        self.output = tensor_on(device, list(source.output_ids))
        self._counts: tuple[Tensor, Tensor] | None = None

    def apply(self, logits: Tensor, block_ids: Tensor, *, first: int = 0) -> Tensor:
        """Penalised logits [n, V]; arguments as of `Adjustments.apply_`."""
        vocab = logits.shape[-1]
        if self._counts is None:
            in_prompt = torch.bincount(self.prompt, minlength=vocab)[:vocab] > 0
            self._counts = in_prompt, torch.bincount(self.output, minlength=vocab)[:vocab]
        in_prompt, base = self._counts
        counts = base.repeat(len(logits), 1)
        for place, token in enumerate(block_ids.tolist()):
            counts[max(place + 1 - first, 0) :, token] += 1
        params, generated = self.params, counts > 0
        repeated = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(generated | in_prompt, repeated, logits)
        return logits - params.frequency_penalty * counts - params.presence_penalty * generated
