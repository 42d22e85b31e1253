"""What it costs to choose lengths: milliseconds of plan, admit and observe by requests, on made-up rounds of 7 slots.

    python -m benchmarks.schedule_cost [--force]

No model runs. The aim is under 1 ms for 256 requests; the ceiling beside it is one pass over as many numbers in NumPy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks.common import conditions, require_quiet_machine
from dspark_core.checkpoint.calibration import Calibration
from dspark_core.schedule import choose_draft_lens, choose_verify_lens
from dspark_core.step_cost import CostCurves, StepCost
from server.auto_policy import TOGETHER, AutoPolicy
from server.policy import Rounds
from server.request import Request, RequestParams

REQUESTS, SLOTS = (1, 4, 16, 64, 256), 7
TOKENS = [*range(1, 9), 16, 32, 64, 128, 256, 512, 1024, 2048]
# Such as a GPU has: flat at first, in stairs, then a slope.
SECONDS = [0.010 + 0.0005 * (tokens // 64) + 4e-6 * max(tokens - 256, 0) for tokens in TOKENS]
CURVES = CostCurves(TOKENS, SECONDS, [1, 256], [0.0008, 0.001], [0.001, 0.0015], SLOTS)


def milliseconds(run: Callable[[], object], repeats: int = 30) -> float:
    """Median time of a call."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def measure(count: int) -> dict[str, float]:
    """Milliseconds of everything a step asks of the policy, and of the two choices alone."""
    source = np.random.default_rng(count)
    policy = AutoPolicy(StepCost(CURVES), Calibration.raw(SLOTS))
    requests = [Request([1], RequestParams(), 1000, frozenset(), i, None) for i in range(count)]  # type: ignore[arg-type]
    limits, logits = [SLOTS] * count, source.normal(1, 2, (count, SLOTS))
    accepted = source.integers(0, SLOTS + 1, count)
    full = np.full(count, SLOTS)
    rounds = Rounds(requests, logits, full, full, np.minimum(accepted + 1, SLOTS), accepted)
    survival = (1 / (1 + np.exp(-logits))).cumprod(-1)
    seconds = CURVES.verify_seconds(count + np.arange(count * SLOTS + 1.0))
    policy.observe(rounds)
    slots = policy.plan(requests, limits, 0)

    def observe() -> None:  # learns once
        for _ in range(TOGETHER):
            policy.observe(rounds)

    def plan() -> None:
        policy.history.rounds += 1  # something has been learnt: no answer from before
        policy.plan(requests, limits, 0)

    return {
        "requests": count,
        "plan_ms": milliseconds(plan),
        "admit_ms": milliseconds(lambda: policy.admit(requests, slots, logits, 0)),
        "observe_ms": milliseconds(observe) / TOGETHER,
        "choose_draft_lens_ms": milliseconds(lambda: choose_draft_lens(survival, limits, CURVES)),
        "choose_verify_lens_ms": milliseconds(lambda: choose_verify_lens(survival, limits, seconds)),
        "ceiling_ms": milliseconds(survival.sum),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--force", action="store_true", help="run on a busy machine")
    load = require_quiet_machine(parser.parse_args().force)
    results = [measure(count) for count in REQUESTS]
    print("".join(f"{name:>24}" for name in results[0]))
    for row in results:
        print("".join(f"{value:>24.3f}" if name != "requests" else f"{value:>24}" for name, value in row.items()))
    print(json.dumps({"benchmark": "schedule_cost", "results": results, "conditions": conditions(load)}))


if __name__ == "__main__":
    main()
