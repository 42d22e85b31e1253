"""Ways to decode the same prompts, timed in turn: what the machine does then falls on all alike."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass, field

import numpy as np

from benchmarks.common import chat_ids, mixed_prompts
from dspark_core.draft.drafter import Drafter
from dspark_core.models.kv_cache import KVPool
from dspark_core.sampling import SamplingParams
from server.engine import Engine, EngineParts
from server.policy import LengthPolicy, Rounds, StepOutcome
from server.request import RequestParams

MAX_TOKENS = 96  # the demo model begins to loop after about so many, and loops flatter
SLICE_SECONDS = 0.15
FEWEST, MOST = 5, 16  # stretches of a run that say something of its spread, and are not alike
LONGEST = 256  # prompt and answer


@dataclass
class Tally:
    """Sums over the steps of one way in which as many requests decoded as the load says."""

    seconds: float = 0.0
    tokens: int = 0
    decoding: int = 0
    drafting: int = 0
    verified: int = 0
    turns: list[tuple[float, int]] = field(default_factory=list)  # seconds and tokens of each

    def row(self, load: int) -> dict[str, float]:
        return {
            "tokens_per_s": self.tokens / self.seconds,
            "per_user": self.tokens / self.seconds / load,
            "acceptance_length": self.tokens / max(self.decoding, 1),
            "verify_length": self.verified / max(self.drafting, 1),
            "verify_budget": self.verified / max(self.decoding, 1) * load,
            "skipped": 1 - self.drafting / max(self.decoding, 1),
        }


class Way:
    """One way to decode: an engine of its own over the same models, and as many requests in it as the load says.

    Args:
        policy: None for plain decoding.
    """

    def __init__(self, base: Engine, load: int, sampling: SamplingParams, policy: LengthPolicy | None) -> None:
        self.load, self.tally = load, Tally()
        self.engine = twin(base, load, with_draft=policy is not None)
        self.steps: list[StepOutcome] = []
        if policy is not None:
            self.engine.policy = policy
        self.engine.step_observers.append(self.steps.append)
        self.engine.observers.append(self._count)
        self.params = RequestParams(sampling, MAX_TOKENS, ignore_eos=True, speculative=policy is not None)
        self.prompts = itertools.cycle(all_prompts(self.engine))
        self._verified = 0

    def _count(self, rounds: Rounds) -> None:
        self._verified += int(rounds.verified.sum())

    def slice(self, enough: int) -> None:
        """Some steps, until a while is over or `enough` tokens are there."""
        begin, scheduler, tally = time.perf_counter(), self.engine.scheduler, self.tally
        seconds, tokens = tally.seconds, tally.tokens
        while time.perf_counter() - begin < SLICE_SECONDS and tally.tokens < enough:
            while len(scheduler.running) + len(scheduler.waiting) < self.load:
                self.engine.add(self.engine.make_request(next(self.prompts), self.params))
            before = [(request, request.num_generated) for request in scheduler.running]
            verified = self._verified
            self.engine.step()
            outcome = self.steps.pop()
            if outcome.prefill_tokens or outcome.decoding != self.load:
                continue
            tally.seconds += outcome.seconds
            tally.tokens += sum(request.num_generated - count for request, count in before)
            tally.decoding += outcome.decoding
            tally.drafting += outcome.drafting
            tally.verified += self._verified - verified
        tally.turns.append((tally.seconds - seconds, tally.tokens - tokens))


def all_prompts(engine: Engine) -> list[list[int]]:
    """Prompts of all domains in turn, three wordings of each."""
    wordings = ("", " Be brief.", " Explain every step.")
    return [chat_ids(engine.tokenizer, content + wording) for wording in wordings for content in mixed_prompts()]


def twin(base: Engine, load: int, *, with_draft: bool) -> Engine:
    """Another engine over the same models, with memory for so many requests."""
    device, dtype, size = base.target.device, base.target.dtype, base.pool.page_size
    pages = (load + 1) * -(-LONGEST // size)
    drafter = None
    if with_draft:
        assert base.drafter is not None
        draft_pool = KVPool.of(base.drafter.model.config.decoder, pages, size, dtype, device)
        drafter = Drafter(base.drafter.model, draft_pool)
    return Engine(
        EngineParts(
            target=base.target,
            pool=KVPool.of(base.target.config, pages, size, dtype, device),
            drafter=drafter,
            tokenizer=base.tokenizer,
            eos_token_ids=base.eos_token_ids,
            vocab_size=base.vocab_size,
            max_model_len=LONGEST,
            max_num_seqs=load,
            max_num_batched_tokens=512,  # a prompt takes one step, so that others are without any
            prefix_cache=False,
        )
    )


def measure(ways: dict[str, Way], tokens: int) -> None:
    """All ways in turn, in an order that changes, until each has given so many tokens."""
    source = random.Random(len(ways))
    while left := [way for way in ways.values() if way.tally.tokens < tokens]:
        for way in source.sample(left, len(left)):
            way.slice(tokens)


def compare(one: Tally, other: Tally, tokens: float) -> tuple[float, float | None]:
    """How many times as fast one is as the other, from as many tokens of the same prompts, and its standard error.

    The error is by the spread over stretches of turns, of those that both took, in which both gave `tokens` at least:
    they should be those of an answer to every request, for turns of the same answers are alike. What the machine did to
    both in the same minute is no error. None with too few stretches.
    """
    ratio = one.tokens / one.seconds / (other.tokens / other.seconds)
    turns = np.array(list(zip(one.turns, other.turns, strict=False)))  # [N, 2 ways, seconds and tokens]
    tokens = max(tokens, turns[..., 1].sum(0).min() / MOST)
    stretches, sums = [], np.zeros((2, 2))
    for turn in turns:
        sums = sums + turn
        if sums[:, 1].min() >= tokens:
            stretches.append(sums)
            sums = np.zeros((2, 2))
    if len(stretches) < FEWEST:
        return ratio, None
    relative = np.array(stretches) / np.mean(stretches, 0)
    faster = (relative[..., 1] - relative[..., 0]) @ (1, -1)
    return ratio, float(ratio * np.std(faster, ddof=1) / len(faster) ** 0.5)
