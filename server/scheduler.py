"""Who runs in the next step, with how many tokens and draft slots."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from server.kv import KVMemory
from server.request import Request

# A prefill chunk never gets smaller than this, however many requests decode beside it.
MIN_CHUNK = 32


@dataclass(frozen=True)
class Work:
    """One request's part in a step: the next `num_tokens` of its pending tokens, then `num_slots` drafts.

    `decides`: the step reaches the request's last token, so that a new one is chosen.
    """

    request: Request
    num_tokens: int
    num_slots: int
    decides: bool


class RequestScheduler:
    """First come, first served. Decoding requests run in every step; prompts share what the budget leaves.

    Args:
        memory: pages to reserve from.
        draft_len: K, or 0 without a draft.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of a step, as far as prompts are concerned.
    """

    def __init__(self, memory: KVMemory, *, draft_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.memory, self.draft_len = memory, draft_len
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it stands, and free its pages."""
        self.memory.release(request.table)
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def schedule(self) -> list[Work]:
        """Decide the next step. Room for whole blocks is reserved here: what is drafted will be verified."""
        waiting_before = len(self.waiting)
        work = [item for request in list(self.running) if (item := self._decode(request))]
        preempted = len(self.waiting) > waiting_before
        budget = max(self.max_num_batched_tokens - sum(w.num_tokens + w.num_slots for w in work), MIN_CHUNK)
        for request in self.running:
            if request.pending > 1 and budget > 0:
                work.append(self._chunk(request, budget))
                budget -= work[-1].num_tokens
        while budget > 0 and not preempted and self._admit():
            work.append(self._chunk(self.running[-1], budget))
            budget -= work[-1].num_tokens
        return work

    @staticmethod
    def _chunk(request: Request, budget: int) -> Work:
        size = min(request.pending, budget)
        return Work(request, size, 0, decides=size == request.pending)

    def _decode(self, request: Request) -> Work | None:
        if request.pending != 1 or request not in self.running:
            return None
        slots = self.num_slots(request)
        while not self.memory.reserve(request.table, request.table.kv_len + 1 + slots):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return None
        return Work(request, 1, slots, decides=True)

    def num_slots(self, request: Request) -> int:
        """Draft slots of the next round: none is proposed that `max_tokens` or the context end would cut off."""
        if not request.params.speculative:
            return 0
        return max(0, min(self.draft_len, request.max_tokens - request.num_generated - 1))

    def _admit(self) -> bool:
        """Let the first waiting request run if there is a place and memory for all its tokens."""
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return False
        request = self.waiting[0]
        if not self.memory.reserve(request.table, len(request.tokens)):
            return False
        self.running.append(self.waiting.popleft())
        return True

    def _preempt(self, request: Request) -> None:
        """Take a request's memory; it waits at the front and computes its tokens again later."""
        self.memory.release(request.table)
        self.running.remove(request)
        self.waiting.appendleft(request)
