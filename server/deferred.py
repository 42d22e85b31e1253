"""The draft's context of requests that are not drafting just now: written later, many tokens at a time.

A token's context costs the draft almost as much as many tokens' together. So the features of tokens that were decoded
plainly wait until the request drafts again, or until they fill a page, which others may then share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dspark_core.devices import tensor_on
from dspark_core.draft.drafter import Drafter
from server.request import Request

HELD = 32  # rows of memory held for one that is wanted


@dataclass(slots=True)
class Committed:
    """Consecutive committed tokens of a request: the first one's position, their slots, their features [n, m * D]."""

    position: int
    slots: list[int]
    features: Tensor


class DeferredContext:
    """Keeps features until their context is wanted."""

    def __init__(self) -> None:
        self._waiting: WeakKeyDictionary[Request, list[Committed]] = WeakKeyDictionary()

    def keep(self, request: Request, tokens: Committed) -> None:
        """Let these wait. Of features that the next step may overwrite, or that hold many rows, a copy is kept."""
        features = tokens.features
        if features.is_cuda or features.untyped_storage().nbytes() > HELD * features.nbytes:
            features = features.clone()
        waiting = self._before(request, tokens.position)
        waiting.append(Committed(tokens.position, tokens.slots, features))
        self._waiting[request] = waiting

    def take(self, request: Request, position: int) -> list[Committed]:
        """What waits just before `position`, which is to be written now."""
        waiting = self._before(request, position)
        self._waiting.pop(request, None)
        return waiting

    def _before(self, request: Request, position: int) -> list[Committed]:
        """What a request left that was pre-empted since is void."""
        waiting = self._waiting.get(request, [])
        return waiting if waiting and waiting[-1].position + len(waiting[-1].slots) == position else []


def write_context(drafter: Drafter, parts: Sequence[Committed]) -> None:
    """Give the draft the context of committed tokens."""
    if parts:
        positions = [part.position + i for part in parts for i in range(len(part.slots))]
        slots = [slot for part in parts for slot in part.slots]
        where = tensor_on(parts[0].features.device, [positions, slots])
        drafter.absorb(torch.cat([part.features for part in parts]), where[0], where[1])
