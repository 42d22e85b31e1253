"""The draft's context of requests that are not drafting just now: written later, many tokens at a time.

A token's context costs the draft almost as much as many tokens' together. So the features of tokens that were decoded
plainly wait until the request drafts again, or until they fill a page, which others may then share.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dspark_core.devices import tensor_on
from dspark_core.draft.drafter import Drafter
from server.request import Request


class DeferredContext:
    """Features of committed tokens, by request.

    Args:
        drafter: whose context it is.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._waiting: WeakKeyDictionary[Request, tuple[int, list[Tensor]]] = WeakKeyDictionary()

    def keep(self, request: Request, position: int, features: Tensor) -> None:
        """Remember the features [n, m * D] of tokens from `position` on."""
        start, parts = self._before(request, position)
        self._waiting[request] = start, [*parts, features.clone()]

    def absorb(self, rows: Iterable[tuple[Request, int, Tensor | None]]) -> None:
        """Write the context of some requests: what waits, then the features of tokens from a position on, if any."""
        features: list[Tensor] = []
        positions: list[int] = []
        slots: list[int] = []
        size = self.drafter.pool.page_size
        for request, position, own in rows:
            start, parts = self._before(request, position)
            self._waiting.pop(request, None)
            parts = parts if own is None else [*parts, own]
            span = range(start, start + sum(len(part) for part in parts))
            features += parts
            positions += span
            slots += [request.table.pages[p // size] * size + p % size for p in span]
        if features:
            where = tensor_on(features[0].device, [positions, slots])
            self.drafter.absorb(torch.cat(features), where[0], where[1])

    def _before(self, request: Request, position: int) -> tuple[int, list[Tensor]]:
        """First position and features of what waits just before `position`; what a pre-empted request left is void."""
        start, parts = self._waiting.get(request, (position, []))
        return (start, parts) if start + sum(len(part) for part in parts) == position else (position, [])
