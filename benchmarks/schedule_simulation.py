"""What the scheduler's choices are worth, without a model and without noise: steps cost what a table says.

    python -m benchmarks.schedule_simulation [--loads 1,2,4,8] [--tokens 3000] [--seeds 8] [--turns N]

Requests whose drafts are right by coins of three chances, as in `benchmarks.load_curve --draft scripted`, and the costs
of passes and drafts as the demo has them on two cores. Each way's tokens a second are divided by plain decoding's.
The ceiling is a scheduler that knows every request's chance and whose choices take no time. With `--turns` all drafts
turn bad after so many tokens, good again after as many more, and so on: what was learnt is wrong then.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean

import numpy as np

from benchmarks.scripted import WRONG, acceptance
from dspark_core.arrays import Floats
from dspark_core.checkpoint.calibration import Calibration
from dspark_core.sampling import SamplingParams
from dspark_core.step_cost import CostCurves, StepCost
from server.auto_policy import AutoPolicy
from server.history import History
from server.policy import FixedLength, LengthPolicy, Rounds, StepOutcome, admit_step, plan_step
from server.request import Request, RequestParams

CHANCES, BAD, SLOTS, TEXT = (0.95, 0.85, 0.7), 0.3, 7, 95
ROWS = [*range(1, 17), 32, 64, 128]
# Milliseconds of a pass over so many rows, and of drafting 1 or 7 slots, by requests; of a step besides, and for each
# request in it; of one that drafts besides, and for each that does; of choosing by the scheduler; share of a pass that
# keeping the draft's context takes.
PASS_MS = [6.7, 8.2, 9.6, 11.8, 13.1, 14.8, 17, 18.6, 23.5, 25, 26.5, 28.5, 30, 31.5, 34, 36.5, 63, 122, 240]
DRAFTERS, FIRST_MS, ALL_MS = [1, 2, 4, 8, 16, 32], [3.6, 3.7, 5.4, 9.5, 18, 35], [7.6, 12, 22, 42, 82, 160]
STEP_MS, DRAFT_MS, CHOICE_MS, CONTEXT_SHARE = (0.5, 0.04), (0.8, 0.1), 0.5, 0.015
COST = StepCost(
    CostCurves(ROWS, np.array(PASS_MS) / 1e3, DRAFTERS, np.array(FIRST_MS) / 1e3, np.array(ALL_MS) / 1e3, SLOTS), 0, 8
)


class Omniscient(History):
    """Knows how often every request's drafts are right."""

    def survival(self, requests: Sequence[Request], *, hope: float = 0.0) -> Floats:
        return np.array([np.full(SLOTS, CHANCES[request.key]).cumprod() for request in requests])

    def correction(self, requests: Sequence[Request]) -> Floats:
        return np.ones(len(requests))


@dataclass
class World:
    """A number of requests at a time, answered one way.

    Args:
        policy: None for plain decoding.
        choice_ms: what choosing takes in a step that drafts.
        turns: after so many tokens drafts turn bad, or good again; 0: never.
    """

    policy: LengthPolicy | None
    load: int
    seed: int
    choice_ms: float = 0.0
    turns: int = 0

    def _chance(self, request: Request) -> float:
        return BAD if self.turns and self.made // self.turns % 2 else CHANCES[request.key]

    def tokens_per_second(self, tokens: int) -> float:
        """Of the first so many tokens."""
        self.source, self.made, running, seconds = np.random.default_rng(self.seed), 0, list[Request](), 0.0
        while self.made < tokens:
            while len(running) < self.load:
                key = int(self.source.integers(len(CHANCES)))
                params = RequestParams(SamplingParams(temperature=0))
                running.append(Request([1], params, TEXT + 1, frozenset(), key, None))  # type: ignore[arg-type]
            seconds += self._step(running)
            running = [request for request in running if not request.finished]
        return self.made / seconds

    def _step(self, running: list[Request]) -> float:
        """One step; its seconds."""
        limits = [min(SLOTS, max(TEXT - request.table.kv_len - 1, 0)) for request in running]
        slots = plan_step(self.policy, running, limits, 0) if self.policy else [0] * self.load
        drafting = [(request, count) for request, count in zip(running, slots, strict=True) if count]
        right, lens, accepted = np.zeros((0, SLOTS), bool), list[int](), np.zeros(0, int)
        requests, counts = [request for request, _ in drafting], [count for _, count in drafting]
        if self.policy and drafting:
            chances = np.array([[self._chance(request)] for request in requests])
            right = self.source.random((len(drafting), SLOTS)) < chances
            logits = self._confidence(right, chances)[:, : max(counts)]
            lens = admit_step(self.policy, requests, counts, logits if self.policy.reads_confidence else None, 0)
            verified = np.arange(SLOTS) < np.array(lens)[:, None]
            accepted = (right & verified).cumprod(-1).sum(-1)
            decided = np.minimum(accepted + 1, lens)
            read = logits if self.policy.reads_confidence else None
            rounds = Rounds(requests, read, np.array(counts), np.array(lens), decided, accepted)
        seconds = self._seconds(self.load + sum(lens), len(drafting), sum(counts))
        for request, more in [*((request, 1) for request in running), *zip(requests, accepted.tolist(), strict=True)]:
            request.table.kv_len += more
            self.made += more
            if request.table.kv_len >= TEXT:
                request.finish_reason = "length"
        if self.policy:
            if drafting:
                self.policy.observe(rounds)
            outcome = StepOutcome(seconds, self.load, len(drafting), self.load + sum(lens), sum(counts), 0, 50.0)
            self.policy.observe_step(outcome)
        return seconds

    def _confidence(self, right: np.ndarray, chances: Floats) -> Floats:
        """Calibrated, and right more often than chance, as that of `benchmarks.scripted.coins`."""
        hint = right ^ (self.source.random(right.shape) < WRONG)
        odds = np.log(chances / (1 - chances))
        found: Floats = odds + np.where(hint, 1, -1) * math.log((1 - WRONG) / WRONG)
        return found

    def _seconds(self, rows: int, drafting: int, slots: int) -> float:
        step, draft = STEP_MS[0] + STEP_MS[1] * self.load, DRAFT_MS[0] + DRAFT_MS[1] * drafting + self.choice_ms
        keeps = CONTEXT_SHARE if isinstance(self.policy, AutoPolicy) and not drafting else 0.0
        passes = COST.seconds(rows, 0, 1, drafting, slots) * (1 + keeps)
        return passes + (step + (draft if drafting else 0.0)) / 1e3


def omniscient() -> AutoPolicy:
    policy = AutoPolicy(COST, Calibration.raw(SLOTS))
    policy.history = Omniscient(SLOTS)
    return policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="1,2,4,8")
    parser.add_argument("--tokens", type=int, default=3000, help="of every way and seed; more at loads above 4")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument(
        "--turns", type=int, default=0, help="tokens after which drafts turn bad, or good again; more at loads above 4"
    )
    args = parser.parse_args()
    raw = Calibration.raw(SLOTS)
    known = replace(raw, acceptance=acceptance(CHANCES, SLOTS))
    ways: dict[str, tuple[Callable[[], LengthPolicy], float]] = {
        **{f"fixed {length}": (partial(FixedLength, length), 0.0) for length in range(1, 6)},
        "uncalibrated": (partial(AutoPolicy, COST, raw), CHOICE_MS),
        "calibrated": (partial(AutoPolicy, COST, known), CHOICE_MS),
    }
    if not args.turns:
        ways["ceiling"] = omniscient, 0.0
    results = {}
    print(f"{'load':>5}{'best fixed':>14}" + "".join(f"{name:>14}" for name in list(ways)[5:]))
    for load in map(int, args.loads.split(",")):
        more, seeds = max(load, 4) / 4, range(args.seeds)
        tokens, turns = round(args.tokens * more), round(args.turns * more)
        plain = mean(World(None, load, seed).tokens_per_second(tokens) for seed in seeds)
        row = {
            name: mean(World(make(), load, seed, choice, turns).tokens_per_second(tokens) for seed in seeds) / plain
            for name, (make, choice) in ways.items()
        }
        results[load] = row
        best = max(value for name, value in row.items() if name.startswith("fixed"))
        print(f"{load:>5}{best:>14.3f}" + "".join(f"{row[name]:>14.3f}" for name in list(ways)[5:]), flush=True)
    print(json.dumps({"benchmark": "schedule_simulation", "of_plain": results}))


if __name__ == "__main__":
    main()
