"""The draft's context of committed tokens: written at once where it is wanted, else later, many tokens at a time.

A token's context costs the draft almost as much as many tokens' together. So the features of tokens that were decoded
plainly wait until their request drafts again, ends or is sent back, or until they are many. Pages whose context waits
are not shared yet.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from dspark_core.devices import tensor_on
from dspark_core.draft.drafter import Drafter
from server.kv import KVMemory
from server.request import Request

# Tokens that wait at most: of one request, so that no step takes much longer than others, and of all together, for
# memory's sake.
MOST, MOST_OF_ALL = 128, 1024
HELD = 8  # rows of memory held for one that is wanted


@dataclass(slots=True)
class Committed:
    """Consecutive committed tokens of a request: the first one's position, their slots, their features' first row.

    Attributes:
        step_features: [N, m * D] of all rows of their step.
        later: their context need not be written in that step.
    """

    position: int
    slots: list[int]
    step_features: Tensor
    row: int
    later: bool

    @property
    def features(self) -> Tensor:
        """[n, m * D], of these tokens alone."""
        return self.step_features[self.row : self.row + len(self.slots)]


class DraftContext:
    """Keeps features until their context is written, and then lets others find the pages.

    Attributes:
        caught_up: tokens whose context was written later, since somebody last looked (`take_caught_up`).
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory, self.caught_up = memory, 0
        self._waiting: dict[Request, list[Committed]] = {}
        self._size: dict[Request, int] = {}

    def size(self, request: Request) -> int:
        """Tokens of it whose context is still to be written."""
        return self._size.get(request, 0)

    def add(self, request: Request, tokens: Committed) -> None:
        """Take what a step has committed, after what waits already.

        Of features that wait, and that the next step may overwrite or that hold many rows, a copy is kept.
        """
        expected = request.table.draft_context_len + self.size(request)
        assert tokens.position == expected, "the draft's context has a hole"
        features = tokens.step_features
        if tokens.later and (features.is_cuda or len(features) > HELD * len(tokens.slots)):
            tokens = Committed(tokens.position, tokens.slots, tokens.features.clone(), 0, later=True)
        self._waiting.setdefault(request, []).append(tokens)
        self._size[request] = self.size(request) + len(tokens.slots)

    def drop(self, request: Request) -> None:
        """Nobody is going to want it."""
        self._waiting.pop(request, None)
        self._size.pop(request, None)

    def due(self) -> list[Request]:
        """Those that are to be written now: that do not wait, of which too much waits, or all if that is too much.

        All, for one after the other would be one in nearly every step of many requests; and no such step's time tells.
        """
        if sum(self._size.values()) > MOST_OF_ALL:
            return list(self._size)
        waiting = self._waiting.items()
        return [request for request, parts in waiting if not parts[-1].later or self._size[request] >= MOST]

    def take_caught_up(self) -> int:
        count, self.caught_up = self.caught_up, 0
        return count

    def close(self, drafter: Drafter | None, requests: Collection[Request]) -> None:
        """These are about to give their pages back: write what waits if others can find it, else drop it."""
        if self._memory.cache:
            self.write(drafter, requests)
        for request in requests:
            self.drop(request)

    def write(self, drafter: Drafter | None, requests: Collection[Request]) -> None:
        """Give the draft the context of these, as far as it waits."""
        parts = list(chain.from_iterable(self._waiting.get(request, ()) for request in requests))
        if drafter is None or not parts:
            return
        self.caught_up += sum(len(part.slots) for part in parts if part.later)
        positions = [part.position + i for part in parts for i in range(len(part.slots))]
        slots = [slot for part in parts for slot in part.slots]
        where = tensor_on(parts[0].step_features.device, [positions, slots])
        drafter.absorb(torch.cat([part.features for part in parts]), where[0], where[1])
        for request in requests:
            if request in self._waiting:
                self._memory.publish(request.table, request.tokens, draft_context=True)
                self.drop(request)
