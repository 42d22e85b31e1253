"""Throughput against load: plain decoding, whole blocks, fixed lengths, a static threshold, and what the server does.

    python -m benchmarks.load_curve [--draft demo|scripted] [--temperature 0] [--cpu-weights exact] [--plots docs]

At every load each way to decode answers the same prompts of mixed domains in the same order, as many at once as the
load says, until it has given a number of tokens. The ways take turns, a few steps each: what else the machine
does then falls on all alike. Steps that hold a prompt are left out. Plain decoding has no draft and no taps. "ours" is
the default, --verify auto.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import (
    Machine,
    chat_ids,
    conditions,
    demo_engine,
    load_prompts,
    make_parser,
    require_quiet_machine,
)
from benchmarks.scripted import ScriptedDrafter, acceptance, coins
from dspark_core.checkpoint.calibration import Calibration
from dspark_core.draft.drafter import Drafter
from dspark_core.models.kv_cache import KVPool
from dspark_core.sampling import SamplingParams
from server.auto_policy import AutoPolicy
from server.engine import Engine, EngineParts
from server.policy import FixedLength, LengthPolicy, Rounds, StepOutcome, Threshold
from server.request import Request, RequestParams

LOADS = (1, 2, 4, 8, 16, 32)
FIXED = (1, 3, 5)
CHANCES = (0.95, 0.85, 0.7)  # of the scripted draft's slots, by prompt
THRESHOLD = 0.5
MAX_TOKENS = 96  # the demo model begins to loop after about so many, and loops flatter
SLICE_SECONDS = 0.15
LONGEST = 256  # prompt and answer


@dataclass
class Tally:
    """Sums over the steps of one way in which as many requests decoded as the load says."""

    seconds: float = 0.0
    tokens: int = 0
    decoding: int = 0
    drafting: int = 0
    verified: int = 0

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
        begin, scheduler = time.perf_counter(), self.engine.scheduler
        while time.perf_counter() - begin < SLICE_SECONDS and self.tally.tokens < enough:
            while len(scheduler.running) + len(scheduler.waiting) < self.load:
                self.engine.add(self.engine.make_request(next(self.prompts), self.params))
            before = [(request, request.num_generated) for request in scheduler.running]
            verified = self._verified
            self.engine.step()
            outcome = self.steps.pop()
            if outcome.prefill_tokens or outcome.decoding != self.load:
                continue
            tally = self.tally
            tally.seconds += outcome.seconds
            tally.tokens += sum(request.num_generated - count for request, count in before)
            tally.decoding += outcome.decoding
            tally.drafting += outcome.drafting
            tally.verified += self._verified - verified


def all_prompts(engine: Engine) -> list[list[int]]:
    """Prompts of all domains in turn, three wordings of each."""
    contents = [item["prompt"] for item in load_prompts()]
    by_domain = contents[0::4] + contents[1::4] + contents[2::4] + contents[3::4]
    wordings = ("", " Be brief.", " Explain every step.")
    return [chat_ids(engine.tokenizer, content + wording) for wording in wordings for content in by_domain]


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


def answers_of(base: Engine) -> dict[tuple[int, ...], list[int]]:
    """What plain decoding answers greedily to every prompt."""
    engine = twin(base, 16, with_draft=False)
    params = RequestParams(SamplingParams(temperature=0), MAX_TOKENS, ignore_eos=True, speculative=False)
    requests: list[Request] = [engine.make_request(ids, params) for ids in all_prompts(engine)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return {tuple(request.prompt_ids): list(request.output_ids) for request in requests}


def measure(ways: dict[str, Way], tokens: int) -> None:
    """All ways in turn, in an order that changes, until each has given so many tokens."""
    source = random.Random(len(ways))
    while left := [way for way in ways.values() if way.tally.tokens < tokens]:
        for way in source.sample(left, len(left)):
            way.slice(tokens)


def show(load: int, rows: dict[str, dict[str, float]], ceiling: float) -> None:
    fixed = {way: row for way, row in rows.items() if way.startswith("fixed")}
    best_fixed = max(fixed, key=lambda way: fixed[way]["tokens_per_s"])
    others = max(row["tokens_per_s"] for way, row in rows.items() if way != "ours")
    ours, plain = rows["ours"], rows["plain"]
    print(f"{load:>5}", end="")
    for way in ("plain", "full", best_fixed, "threshold", "ours"):
        print(f"{rows[way]['tokens_per_s']:10.1f}", end="")
    print(f"  {best_fixed[6:]:>5}{ours['verify_length']:8.2f}{ours['skipped']:9.1%}", end="")
    print(
        f"{ours['tokens_per_s'] / plain['tokens_per_s']:9.3f}{ours['tokens_per_s'] / others:9.3f}{ceiling:9.0f}",
        flush=True,
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--draft", default="demo", choices=("demo", "scripted"))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=1500, help="of every way at a load of one; more at others")
    parser.add_argument("--loads", default=",".join(map(str, LOADS)))
    parser.add_argument("--plots", help="folder for the plots")
    args = parser.parse_args()
    if args.draft == "scripted" and args.temperature:
        parser.error("the scripted draft knows greedy answers alone")
    load_average = require_quiet_machine(args.force)
    machine = Machine.measured()
    loads = [int(load) for load in args.loads.split(",")]
    engine = demo_engine(args.cpu_weights, max_num_seqs=max(loads), max_model_len=1024, verify="auto")
    auto = engine.policy
    assert isinstance(auto, AutoPolicy)
    calibration = auto.calibration or Calibration.raw(engine.draft_len)
    cost = auto.cost  # as the server measured or found it
    answers = None
    if args.draft == "scripted":
        raw = Calibration.raw(engine.draft_len)  # its confidence is calibrated as it is
        calibration = replace(raw, acceptance=acceptance(CHANCES, engine.draft_len))
        answers = answers_of(engine)
    print(f"{args.draft} draft, temperature {args.temperature:g}, {args.cpu_weights} weights; tokens/s")
    head = "".join(f"{name:>10}" for name in ("plain", "full", "fixed", "threshold", "ours"))
    print(f"{'load':>5}{head}  fixed  length  skipped  /plain   /best  ceiling")
    results: dict[int, Any] = {}
    for load in loads:
        policies: dict[str, LengthPolicy | None] = {
            "plain": None,
            "full": LengthPolicy(),
            **{f"fixed {length}": FixedLength(length) for length in FIXED},
            "threshold": Threshold(THRESHOLD, calibration),
            "ours": AutoPolicy(cost, calibration),
        }
        sampling = SamplingParams(temperature=args.temperature)
        ways = {name: Way(engine, load, sampling, policy) for name, policy in policies.items()}
        for way in ways.values():
            if answers is not None and way.engine.drafter is not None:
                way.engine.drafter = ScriptedDrafter(way.engine, answers, coins(CHANCES, engine.draft_len))
        measure(ways, round(args.tokens * max(1.0, load**0.5 / 2)))
        results[load] = {name: way.tally.row(load) for name, way in ways.items()}
        show(load, results[load], load / machine.pass_seconds(engine, load))
    result = {
        "benchmark": "load_curve",
        "draft": args.draft,
        "temperature": args.temperature,
        "cpu_weights": args.cpu_weights,
        "calibration": calibration.source,
        "results": results,
        "conditions": conditions(load_average),
    }
    if args.plots:
        from benchmarks.load_plots import plot

        plot(Path(args.plots), result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
