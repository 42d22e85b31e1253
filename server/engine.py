"""The engine: one step schedules, drafts, verifies and delivers for all requests at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark_core.checkpoint.origin import Origin
from dspark_core.checkpoint.tokenizer import Tokenizer
from dspark_core.draft.drafter import DraftBlock, Drafter
from dspark_core.grammar import GrammarCompiler
from dspark_core.kernels import NO_CHOICE
from dspark_core.models.attention import FlatBatch, Segment
from dspark_core.models.decoder import TargetModel
from dspark_core.models.kv_cache import KVPool
from dspark_core.randomness import derive_key
from dspark_core.sampler import Round
from server.deferred import Committed, DraftContext
from server.kv import KVMemory
from server.layout import Layout, lay_out, read_back
from server.limits import check_limits
from server.logprobs import score_prompts, token_logprobs
from server.outcomes import Drafted, rounds_of, step_outcome
from server.policy import LengthPolicy, Rounds, StepOutcome, admit_step
from server.request import Delta, Request, RequestParams
from server.scheduler import RequestScheduler, Work

Outcome = tuple[Request, Delta]


@dataclass
class EngineParts:
    """What an engine is made of.

    Attributes:
        target, pool: prepared target and the pool of its keys and values.
        drafter: prepared draft with its own pool of as many pages, or None for plain decoding only.
        eos_token_ids: ids that end a text.
        vocab_size: ids below this may be asked for and emitted.
        seed: makes the server's unseeded requests reproducible, in order of arrival.
        info: what was loaded, for people.
    """

    target: TargetModel
    pool: KVPool
    drafter: Drafter | None
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_model_len: int
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    prefix_cache: bool = True
    seed: int | None = None
    info: dict[str, str] = field(default_factory=dict)


class Engine:
    """Continuous batching with exact speculative decoding. Not thread-safe: one thread calls everything.

    Between steps, for every running request: `kv_len <= len(tokens) - 1`, with equality while it decodes, and the
    draft's context covers the same positions if the request may draft, but for those that wait (`context`).
    """

    def __init__(self, parts: EngineParts) -> None:
        self.target, self.pool, self.drafter = parts.target, parts.pool, parts.drafter
        self.device = self.target.device
        self.tokenizer, self.eos_token_ids, self.vocab_size = (
            parts.tokenizer,
            parts.eos_token_ids,
            parts.vocab_size,
        )
        self.max_model_len, self.max_num_seqs, self.info = parts.max_model_len, parts.max_num_seqs, parts.info
        self.draft_len = self.drafter.model.config.draft_len if self.drafter else 0
        self.taps = self.drafter.model.config.target_layer_ids if self.drafter else ()
        self.memory = KVMemory(self.pool.num_pages, self.pool.page_size, prefix_cache=parts.prefix_cache)
        if self.memory.capacity < self.max_model_len:
            raise ValueError(f"KV memory holds {self.memory.capacity} tokens, expected {self.max_model_len} or more")
        self.scheduler = RequestScheduler(
            self.memory,
            draft_len=self.draft_len,
            max_num_seqs=parts.max_num_seqs,
            max_num_batched_tokens=parts.max_num_batched_tokens,
        )
        self.observers: list[Callable[[Rounds], None]] = []
        self.step_observers: list[Callable[[StepOutcome], None]] = []
        self.reads_confidence = False  # for observers, where the policy does not
        self.origin: Origin | None = None  # what measurements of it are marked with, where that is known
        self.context = DraftContext(self.memory)
        self.scheduler.before_preemption = lambda request: self.context.close(self.drafter, [request])
        self.grammars = GrammarCompiler(self.tokenizer, self.eos_token_ids, self.vocab_size)
        self._entropy = parts.seed if parts.seed is not None else int.from_bytes(os.urandom(8), "big")
        self._num_requests = 0
        self._nothing_drafted = Drafted(torch.empty(0, 0, dtype=torch.int64, device=self.device), (), None)

    @property
    def policy(self) -> LengthPolicy:
        """How far drafts go; may be exchanged between steps."""
        return self.scheduler.policy

    @policy.setter
    def policy(self, policy: LengthPolicy) -> None:
        self.scheduler.policy = policy

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def make_request(self, prompt_ids: Sequence[int], params: RequestParams) -> Request:
        """Check a request against the model's limits. Touches nothing of the engine's running state.

        Raises:
            RequestError: empty prompt, ids outside the vocabulary, a stop id outside it, too long.
        """
        check_limits(prompt_ids, params, vocab_size=self.vocab_size, limit=self.max_model_len)
        room = self.max_model_len - len(prompt_ids)
        self._num_requests += 1
        sampling = params.sampling
        if sampling.seed is not None:
            key = derive_key("seed", sampling.seed, params.choice_index)
        else:
            key = derive_key("request", self._entropy, self._num_requests)
        return Request(
            prompt_ids=list(prompt_ids),
            params=params,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            stop_ids=params.stop_token_ids | (frozenset() if params.ignore_eos else self.eos_token_ids),
            key=key,
            detokenizer=self.tokenizer.detokenizer(),
        )

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def abort(self, request: Request) -> Delta | None:
        """End a request and free its place at once; None if it had ended already."""
        if request.finished:
            return None
        self._remove(request)
        return request.abort()

    def fail_running(self, message: str) -> list[Outcome]:
        """End every running request with an error, after a step that raised."""
        outcomes = [(request, self._fail(request, message)) for request in list(self.scheduler.running)]
        self.memory.clear_cache()  # who knows what that step wrote
        return outcomes

    def self_test(self) -> None:
        """Raise if the target cannot run at all. Uses page 0: only while no request is running."""
        assert not self.scheduler.running, "a self-test would overwrite the memory of running requests"
        self.memory.clear_cache()
        self.memory.soil([0])
        place = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.target(FlatBatch(place, place, place, [Segment(0, 1, 0, [0])]), self.pool)

    @torch.inference_mode()
    def step(self) -> list[Outcome]:
        """Run every scheduled request once: schedule, draft, verify, deliver, commit."""
        started = time.perf_counter()
        work = sorted(self.scheduler.schedule(), key=lambda item: (item.num_slots == 0, not item.decides))
        if not work:
            return []
        self._clear(self.memory.take_soiled())
        drafting = [item for item in work if item.num_slots]
        plain = [item for item in work if item.decides and not item.num_slots]
        draft_round = self._round(drafting)
        prefill_tokens = sum(item.num_tokens for item in work if item.prefills)
        drafted = self._draft(drafting, draft_round, prefill_tokens)
        layout = lay_out(work, drafted.ids, drafted.verify_lens, self.pool.page_size, self.device)
        tap = self.taps if any(self.scheduler.keeps_context(item.request) for item in work) else ()
        output = self.target(layout.batch, self.pool, logit_rows=layout.logit_rows, tap=tap)
        logits = output.logits[: layout.num_deciding]
        parts: list[Tensor] = []
        rows = sum(drafted.verify_lens) + len(drafted.verify_lens)
        if draft_round:
            parts = [drafted.ids.flatten(), *draft_round.verify(logits[:rows], drafted.ids, drafted.verify_lens)]
        if plain_round := self._round(plain):
            parts.append(plain_round.next_ids(logits[rows:]))
        emitted = read_back(parts, drafted=len(drafting))
        score_prompts(work, layout, output.logits[layout.num_deciding :])
        outcomes = self._deliver(work, drafted, emitted, logits)
        self._commit(work, layout, emitted, output.features)
        caught_up = self.context.take_caught_up()
        taken = step_outcome(work, layout, caught_up, prefill_tokens, time.perf_counter() - started)
        self._tell(rounds_of(drafting, drafted), taken)
        return outcomes

    def _tell(self, rounds: Rounds | None, taken: StepOutcome) -> None:
        """Let the policy, and whoever else watches, learn from a step."""
        if rounds:
            for observe in (self.policy.observe, *self.observers):
                observe(rounds)
        for observe_step in (self.policy.observe_step, *self.step_observers):
            observe_step(taken)

    def _round(self, items: Sequence[Work]) -> Round | None:
        return Round([item.request.source() for item in items], self.device) if items else None

    def _draft(self, items: Sequence[Work], draft_round: Round | None, prefill_tokens: int) -> Drafted:
        """Propose blocks, and decide how much of each is sent to the target."""
        if draft_round is None or self.drafter is None:
            return self._nothing_drafted
        self.context.write(self.drafter, [item.request for item in items])
        blocks = [
            DraftBlock(item.request.tokens[-1], item.request.table.kv_len, item.num_slots, item.request.table.pages)
            for item in items
        ]
        drafts = self.drafter.draft(blocks, draft_round)
        wanted = self.policy.reads_confidence or self.reads_confidence or any(i.request.params.detail for i in items)
        logits, confidence = drafts.confidence_logits if wanted else None, None
        if logits is not None and self.policy.admits_by_confidence:
            logits = logits.cpu()  # a wait for the device; else they come with the result, when it has waited anyway
            confidence = logits.double().numpy()
        requests, slots = [item.request for item in items], [item.num_slots for item in items]
        lens = admit_step(self.policy, requests, slots, confidence, prefill_tokens)
        return Drafted(drafts.draft_ids, lens, logits)

    def _deliver(
        self, work: Sequence[Work], drafted: Drafted, emitted: list[list[int]], logits: Tensor
    ) -> list[Outcome]:
        """Give each deciding request its tokens; one whose scores are not finite ends with an error."""
        outcomes: list[Outcome] = []
        row = 0
        for index, tokens in enumerate(emitted):
            item, verified = work[index], drafted.verified(index)
            rows = slice(row, row + verified + 1)
            row = rows.stop
            if tokens[-1] == NO_CHOICE:
                self.memory.forget(item.request.table)  # an earlier part of the prompt may be to blame
                outcomes.append((item.request, self._fail(item.request, "the target's scores are not finite")))
                continue
            accepted = self._append(item, verified, tokens, logits[rows])
            if item.request.params.detail:
                block = drafted.block(index, item, self.policy.calibration)
                item.request.keep_detail(*block, verified, accepted)
            if delta := item.request.take_delta():
                outcomes.append((item.request, delta))
        return outcomes

    def _append(self, item: Work, verified: int, tokens: list[int], logits: Tensor) -> int:
        """Returns how many drafts were delivered."""
        request = item.request
        request.rounds += 1
        taken = request.append(tokens, token_logprobs(logits, tokens, request.params.logprobs))
        accepted = min(taken, len(tokens) - 1)
        if item.num_slots:
            decided = accepted if taken < len(tokens) else min(accepted + 1, verified)
            request.count_round(drafted=item.num_slots, verified=verified, accepted=accepted, decided=decided)
        return accepted

    def _commit(self, work: Sequence[Work], layout: Layout, emitted: list[list[int]], features: Tensor | None) -> None:
        """Declare the rows of tokens that stand valid, and give their features to the draft, now or later."""
        for index, item in enumerate(work):
            request, table = item.request, item.request.table
            if request.error:
                continue
            size = item.num_tokens + (len(emitted[index]) - 1 if item.num_slots else 0)
            size = min(size, request.pending)  # a text may end before the last draft that stands
            position = table.kv_len
            self.memory.commit(table, size)
            self.memory.rollback(table, len(request.tokens))
            if not self.scheduler.keeps_context(request) or features is None:
                self.memory.publish(table, request.tokens, draft_context=False)
                continue
            first, later = layout.starts[index], item.num_tokens == 1 and not item.num_slots
            slots = layout.slots[first : first + size]
            self.context.add(request, Committed(position, slots, features, first, later))
        self.context.write(self.drafter, self.context.due())
        ended = [item.request for item in work if item.request.finished]
        self.context.close(self.drafter, ended)
        for request in ended:
            self.scheduler.remove(request)

    def _remove(self, request: Request) -> None:
        self.context.drop(request)
        self.scheduler.remove(request)

    def _fail(self, request: Request, message: str) -> Delta:
        self._remove(request)
        return request.fail(message)

    def _clear(self, pages: list[int]) -> None:
        """Zero pages that change hands: masked positions must not hold NaN, since 0 * NaN is NaN."""
        if pages:
            self.pool.clear(pages)
            if self.drafter is not None:
                self.drafter.pool.clear(pages)
