"""Length policies made of functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from server.policy import Floats, LengthPolicy
from server.request import Request

Plan = Callable[[Sequence[Request], Sequence[int]], list[int]]
Admit = Callable[[Sequence[int], Floats | None], list[int]]


class Lengths(LengthPolicy):
    """Asks functions: draft slots from requests and limits, verify lengths from slots and confidence logits."""

    reads_confidence = True

    def __init__(self, plan: Plan | None = None, admit: Admit | None = None) -> None:
        self._plan, self._admit = plan, admit

    def plan(self, requests: Sequence[Request], limits: Sequence[int], prefill_tokens: int) -> list[int]:
        return self._plan(requests, limits) if self._plan else list(limits)

    def admit(self, requests: Sequence[Request], slots: Sequence[int], logits: Floats | None) -> list[int]:
        return self._admit(slots, logits) if self._admit else list(slots)
