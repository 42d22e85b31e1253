"""Who runs in the next step, with how many tokens and draft slots."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from server.kv import KVMemory
from server.policy import LengthPolicy, plan_step
from server.prefix_cache import Content
from server.request import Request

# A prefill chunk never gets smaller than this, however many requests decode beside it.
MIN_CHUNK = 32
# Rows of a prompt that are scored in one pass: each holds a number for every token of the vocabulary.
MAX_SCORED = 256


@dataclass(frozen=True)
class Work:
    """One request's part in a step: the next `num_tokens` of its pending tokens, then `num_slots` drafts.

    `decides`: the step reaches the request's last token, so that a new one is chosen.
    """

    request: Request
    num_tokens: int
    num_slots: int
    decides: bool

    @property
    def prefills(self) -> bool:
        """Whether its tokens are of a prompt, or of a text that is computed again."""
        return self.num_tokens > 1 or not self.decides

    @property
    def num_scored(self) -> int:
        """Rows, from its first on, that score a token of the prompt for a client who asked."""
        if self.request.params.prompt_logprobs is None:
            return 0
        return max(0, min(self.num_tokens, len(self.request.prompt_ids) - 1 - self.request.table.kv_len))


class RequestScheduler:
    """First come, first served. Decoding requests run in every step; prompts share what the budget leaves.

    A prompt that does not fit into a step leaves a quarter of its room to those behind it.

    Args:
        memory: pages to reserve from.
        draft_len: K, or 0 without a draft.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of a step, as far as prompts are concerned.

    Attributes:
        before_preemption: called with each request that is sent back, while it still has its pages.
        num_preemptions: requests sent back to the queue, in all.
        prefix_queries, prefix_hits: tokens of admitted requests that were looked for in the prefix cache, and found.
    """

    def __init__(self, memory: KVMemory, *, draft_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.memory, self.draft_len = memory, draft_len
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.policy = LengthPolicy()
        self.before_preemption: Callable[[Request], object] = lambda _: None
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = self.prefix_queries = self.prefix_hits = 0

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
        decoding = [request for request in self.running if request.pending == 1]
        limits = [self.num_slots(request) for request in decoding]
        slots = plan_step(self.policy, decoding, limits, self._prefill_tokens(len(decoding))) if decoding else []
        pairs = zip(decoding, slots, strict=True)
        work = [item for request, num_slots in pairs if (item := self._decode(request, num_slots))]
        preempted = len(self.waiting) > waiting_before
        budget = max(self.max_num_batched_tokens - sum(w.num_tokens + w.num_slots for w in work), MIN_CHUNK)
        prefilling = [request for request in self.running if request.pending > 1]
        started: set[Content] = set()
        while budget > 0:
            if prefilling:
                request = prefilling.pop(0)
            elif not preempted and self._admit():
                request = self.running[-1]
            else:
                break
            if item := self._chunk(request, budget, started):
                work.append(item)
                budget -= item.num_tokens
        if budget > 0:
            self._fill(work, budget)
        self.prefix_hits = self.memory.shared_tokens  # in between it also goes down: what was found in vain
        return work

    def _prefill_tokens(self, decoding: int) -> int:
        """Tokens of prompts that the next pass is going to have room for, as if nobody drafted."""
        pending = sum(request.pending for request in self.running if request.pending > 1)
        if self.waiting and len(self.running) < self.max_num_seqs:
            first = self.waiting[0]
            if self.memory.pages_for(len(first.tokens)) <= self.memory.num_free:
                pending += first.pending
        return min(pending, max(self.max_num_batched_tokens - decoding, MIN_CHUNK))

    def _chunk(self, request: Request, budget: int, started: set[Content]) -> Work | None:
        """The next part of a prompt: what is cached is skipped, and what is being computed for another waited for.

        Args:
            started: pages that this step's prompts are filling; joined by this one's.
        """
        keeps = self.keeps_context(request)
        if self.reads_cache(request):
            self.memory.share(request.table, request.tokens, draft_context=keeps)
            if self.memory.wanted(request.table, request.tokens, draft_context=keeps) in started:
                return None  # in the next step it is there
            if page := self.memory.next_page(request.table, request.tokens, draft_context=keeps):
                started.add(page)
        if request.pending > budget >= MIN_CHUNK:
            budget -= budget // 4  # for those behind it: a short prompt does not wait until a long one is through
        return self._part(request, budget)

    def _part(self, request: Request, budget: int) -> Work:
        size = min(request.pending, budget)
        if request.params.prompt_logprobs is not None:
            size = min(size, MAX_SCORED)
        return Work(request, size, 0, decides=size == request.pending)

    def _fill(self, work: list[Work], budget: int) -> None:
        """Give room that nobody behind it needed back to the first prompt that left some."""
        for place, item in enumerate(work):
            if not item.decides:
                work[place] = self._part(item.request, item.num_tokens + budget)
                return

    def reads_cache(self, request: Request) -> bool:
        """Whether pages of others serve this request: not where every token of its prompt is to be scored."""
        return self.memory.cache is not None and request.params.prompt_logprobs is None

    def keeps_context(self, request: Request) -> bool:
        """Whether the draft's context is kept for this request: others can never draft, and save the work.

        Decided when it is first asked, and for good: a context has no holes.
        """
        if request.keeps_context is None:
            params = request.params
            request.keeps_context = (
                self.draft_len > 0 and params.speculative and (params.whole_blocks or self.policy.may_draft(request))
            )
        return request.keeps_context

    def _decode(self, request: Request, slots: int) -> Work | None:
        if request not in self.running:  # pre-empted by one before it
            return None
        while not self.memory.reserve(request.table, request.table.kv_len + 1 + slots):
            if slots:  # nobody is sent back for the sake of a draft
                slots = 0
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return None
        return Work(request, 1, slots, decides=True)

    def num_slots(self, request: Request) -> int:
        """Most draft slots of the next round: none is proposed that `max_tokens` or the context end would cut off."""
        if not self.keeps_context(request):
            return 0
        return max(0, min(self.draft_len, request.max_tokens - request.num_generated - 1))

    def _admit(self) -> bool:
        """Let the first waiting request run if there is a place, and memory for its tokens and its first block."""
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return False
        request = self.waiting[0]
        if self.reads_cache(request):
            self.memory.share(request.table, request.tokens, draft_context=self.keeps_context(request))
        if not self.memory.reserve(request.table, len(request.tokens) + self.num_slots(request)):
            self.memory.shared_tokens -= request.table.kv_len  # found in vain
            self.memory.release(request.table)
            return False
        self.running.append(self.waiting.popleft())
        request.admitted = request.admitted or time.monotonic()
        self.prefix_queries += len(request.tokens) if self.reads_cache(request) else 0
        return True

    def _preempt(self, request: Request) -> None:
        """Take a request's memory; it waits at the front and computes its tokens again later."""
        self.before_preemption(request)
        self.memory.release(request.table)
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1
