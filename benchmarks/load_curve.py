"""Throughput against load: plain decoding, whole blocks, fixed lengths, a static threshold, and what the server does.

    python -m benchmarks.load_curve [--draft demo|scripted] [--temperature 0] [--cpu-weights exact] [--plots docs]

At every load each way to decode answers the same prompts of mixed domains in the same order, as many at once as the
load says, until it has given a number of tokens. The ways take turns, a few steps each: what else the machine
does then falls on all alike. Steps that hold a prompt are left out. Plain decoding has no draft and no taps. "ours" is
the default, --verify auto. What follows "±" is one standard error of a ratio, where
there are tokens enough to tell.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import (
    Machine,
    conditions,
    demo_engine,
    make_parser,
    require_quiet_machine,
)
from benchmarks.scripted import ScriptedDrafter, acceptance, coins
from benchmarks.ways import MAX_TOKENS, Tally, Way, all_prompts, compare, measure, twin
from dspark_core.checkpoint.calibration import Calibration
from dspark_core.sampling import SamplingParams
from server.auto_policy import AutoPolicy
from server.engine import Engine
from server.policy import FixedLength, LengthPolicy, Threshold
from server.request import Request, RequestParams

LOADS = (1, 2, 4, 8, 16, 32)
FIXED = range(1, 7)
CHANCES = (0.95, 0.85, 0.7)  # of the scripted draft's slots, by prompt
THRESHOLD = 0.5


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


def show(load: int, tallies: dict[str, Tally], ceiling: float) -> dict[str, Any]:
    """Print a line; returns how ours compares with plain decoding and with the best of all others."""
    speeds = {way: tally.tokens / tally.seconds for way, tally in tallies.items()}
    best_fixed = max((way for way in tallies if way.startswith("fixed")), key=speeds.__getitem__)
    best = max((way for way in tallies if way != "ours"), key=speeds.__getitem__)
    ours = tallies["ours"].row(load)
    compared: dict[str, Any] = {"best": best}
    for name, way in (("plain", "plain"), ("best", best)):
        compared[f"of_{name}"], compared[f"error_of_{name}"] = compare(tallies["ours"], tallies[way], MAX_TOKENS * load)
    print(f"{load:>5}", end="")
    for way in ("plain", "full", best_fixed, "threshold", "ours"):
        print(f"{speeds[way]:10.1f}", end="")
    print(f"  {best_fixed[6:]:>5}{ours['verify_length']:8.2f}{ours['skipped']:9.1%}", end="")
    for name in ("plain", "best"):
        error = compared[f"error_of_{name}"]
        print(f"{compared[f'of_{name}']:9.3f}" + (" " * 8 if error is None else f" ± {error:.3f}"), end="")
    print(f"{ceiling:9.0f}", flush=True)
    return compared


def ways_of(engine: Engine, load: int, temperature: float, auto: AutoPolicy) -> dict[str, Way]:
    """All ways to decode that are compared, by name."""
    assert auto.calibration is not None
    policies: dict[str, LengthPolicy | None] = {
        "plain": None,
        "full": LengthPolicy(),
        **{f"fixed {length}": FixedLength(length) for length in FIXED},
        "threshold": Threshold(THRESHOLD, auto.calibration),
        "ours": auto,
    }
    sampling = SamplingParams(temperature=temperature)
    return {name: Way(engine, load, sampling, policy) for name, policy in policies.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--draft", default="demo", choices=("demo", "scripted"))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=2000, help="of every way at loads up to 4; more at others")
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
    answers = None
    if args.draft == "scripted":
        raw = Calibration.raw(engine.draft_len)  # its confidence is calibrated as it is
        calibration = replace(raw, acceptance=acceptance(CHANCES, engine.draft_len))
        answers = answers_of(engine)
    print(f"{args.draft} draft, temperature {args.temperature:g}, {args.cpu_weights} weights; tokens/s")
    head = "".join(f"{name:>10}" for name in ("plain", "full", "fixed", "threshold", "ours"))
    print(f"{'load':>5}{head}  fixed  length  skipped           /plain            /best  ceiling")
    results: dict[int, Any] = {}
    compared: dict[int, Any] = {}
    for load in loads:
        ways = ways_of(engine, load, args.temperature, AutoPolicy(auto.cost, calibration))
        for way in ways.values():
            if answers is not None and way.engine.drafter is not None:
                way.engine.drafter = ScriptedDrafter(way.engine, answers, coins(CHANCES, engine.draft_len))
        measure(ways, round(args.tokens * max(1.0, load / 4)))
        results[load] = {name: way.tally.row(load) for name, way in ways.items()}
        tallies = {name: way.tally for name, way in ways.items()}
        compared[load] = show(load, tallies, load / machine.pass_seconds(engine, load))
    result = {
        "benchmark": "load_curve",
        "draft": args.draft,
        "temperature": args.temperature,
        "cpu_weights": args.cpu_weights,
        "calibration": calibration.source,
        "results": results,
        "ours": compared,
        "conditions": conditions(load_average),
    }
    if args.plots:
        from benchmarks.load_plots import plot

        plot(Path(args.plots), result)
    print(json.dumps(result, allow_nan=False))


if __name__ == "__main__":
    main()
