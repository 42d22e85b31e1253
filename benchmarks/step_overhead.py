"""What the engine adds to the models: wall time of steps against the model forwards inside them.

    python -m benchmarks.step_overhead [--cpu-weights exact] [--force]

Timed as forwards: the target's pass, the draft's backbone, its LM head, its sequential and confidence heads, and the
writing of its context. The rest is scheduling, layout, sampling, verification, detokenising. Decoding steps only.

Where one call runs the sequential head and chooses tokens in between, what its forwards alone take, one by one, is
measured beforehand.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import (
    Machine,
    chat_ids,
    conditions,
    demo_engine,
    load_prompts,
    make_parser,
    require_quiet_machine,
)
from dspark_core.draft.heads import MarkovHead
from dspark_core.sampling import SamplingParams
from server.engine import Engine
from server.request import RequestParams

BATCHES = (1, 16)


class Stopwatch:
    """Seconds spent in the calls it watches, and rows of the target's passes.

    Attributes:
        target: seconds of the target's passes alone.
        warm: whether steps are timed by now.
    """

    def __init__(self) -> None:
        self.seconds, self.target, self.rows, self._depth, self.warm = 0.0, 0.0, 0, 0, False

    def watched(self, call: Callable[..., Any], *, target: bool = False) -> Callable[..., Any]:
        """The same call, timed; a call inside another is not counted twice."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    taken = time.perf_counter() - start
                    self.seconds += taken
                    if target:
                        self.target += taken
                        self.rows += len(args[0].token_ids)

        return run

    def counted(self, call: Callable[..., Any], head: MarkovHead) -> Callable[..., Any]:
        """The same call of a `SlotProgram`, which counts for as long as the head's forwards in it take."""
        seconds: dict[torch.Size, float] = {}

        def run(logits: Tensor, *args: Any) -> Any:
            if logits.shape not in seconds:
                assert not self.warm, f"blocks of another shape in a timed step: {tuple(logits.shape)}"
                seconds[logits.shape] = head_seconds(head, logits.clone())
            self.seconds += seconds[logits.shape]
            return call(logits, *args)

        return run


def head_seconds(head: MarkovHead, logits: Tensor) -> float:
    """What a vanilla head's forwards for the slots of logits [K, R, V] take after something else filled the caches."""
    previous, hidden, passes = torch.zeros(logits.shape[1], dtype=torch.int64), torch.empty(0), torch.ones(20_000_000)
    found = []
    for _ in range(15):
        passes.add_(1)
        start, state = time.perf_counter(), head.start(len(previous))
        for own in logits:
            latent, state = head.step(head.embed(previous), hidden, state)
            head.add_bias_(own, latent)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


@contextmanager
def watch(engine: Engine) -> Iterator[Stopwatch]:
    """Time the engine's model calls for a while."""
    watchers: list[tuple[Any, str]] = [(engine.target, "forward")]
    if engine.drafter:
        draft = engine.drafter.model
        watchers += [(draft, "block_hidden"), (draft, "write_context"), (draft.lm_head, "forward")]
        if draft.markov_head:
            watchers += [(draft.markov_head, name) for name in ("embed", "step", "add_bias_")]
        if draft.confidence_head:
            watchers.append((draft.confidence_head, "forward"))
    stopwatch = Stopwatch()
    for owner, name in watchers:
        call = getattr(owner, name)
        object.__setattr__(owner, name, stopwatch.watched(call, target=owner is engine.target))
    program = engine.drafter.slot_program if engine.drafter else None
    if engine.drafter and program:
        assert engine.drafter.model.markov_head is not None
        program.run = stopwatch.counted(program.run, engine.drafter.model.markov_head)  # type: ignore[method-assign]
    try:
        yield stopwatch
    finally:
        for owner, name in watchers:
            object.__delattr__(owner, name)
        if program:
            del program.run


def measure(engine: Engine, batch: int, temperature: float, speculative: bool, steps: int) -> dict[str, float]:
    """Decode `batch` requests side by side and time `steps` steps in which all of them decode."""
    params = RequestParams(SamplingParams(temperature=temperature), ignore_eos=True, speculative=speculative)
    prompts = load_prompts()
    requests = []
    for index in range(batch):
        ids = chat_ids(engine.tokenizer, prompts[index % len(prompts)]["prompt"])
        requests.append(engine.make_request(ids, params))
        engine.add(requests[-1])
    while any(request.num_generated < 3 for request in requests):
        engine.step()
    wall = 0.0
    with watch(engine) as stopwatch:
        engine.step()  # whatever is measured at its first use
        stopwatch.seconds, stopwatch.target, stopwatch.rows, stopwatch.warm = 0.0, 0.0, 0, True
        before = sum(request.num_generated for request in requests)
        for _ in range(steps):
            start = time.perf_counter()
            engine.step()
            wall += time.perf_counter() - start
            assert len(engine.scheduler.running) == batch, "a request ended or was preempted: use fewer steps"
    tokens = sum(request.num_generated for request in requests) - before
    context = sum(len(request.tokens) for request in requests)
    for request in requests:
        engine.abort(request)
    return {
        "wall_ms": wall / steps * 1e3,
        "forwards_ms": stopwatch.seconds / steps * 1e3,
        "target_ms": stopwatch.target / steps * 1e3,
        "ratio": wall / stopwatch.seconds,
        "target_rows": stopwatch.rows / steps,
        "tokens_per_step": tokens / steps,
        "context": context,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    load = require_quiet_machine(args.force)
    engine = demo_engine(args.cpu_weights)
    machine = Machine.measured()
    measure(engine, 2, 0.0, True, 3)  # warms up
    results = []
    head = "".join(f"{name:>14}" for name in ("step ms", "forwards ms", "ratio", "target ms", "of its floor"))
    print(f"{'batch':>6}{'T':>4}{'':>13}{head}")
    for batch in BATCHES:
        for temperature in (0.0, 1.0):
            for speculative in (False, True):
                row = measure(engine, batch, temperature, speculative, args.steps)
                ceiling = machine.pass_seconds(engine, row["target_rows"], row["context"])
                kind = "speculative" if speculative else "plain"
                print(f"{batch:6}{temperature:4.0f}{kind:>13}{row['wall_ms']:14.1f}{row['forwards_ms']:14.1f}", end="")
                print(f"{row['ratio']:14.3f}{row['target_ms']:14.1f}{row['target_ms'] / ceiling / 1e3:14.2f}")
                name = {"batch": batch, "temperature": temperature, "speculative": speculative}
                results.append(name | row | {"target_floor_ms": ceiling * 1e3})
    result = {"benchmark": "step_overhead", "cpu_weights": args.cpu_weights, "results": results}
    print(json.dumps(result | {"conditions": conditions(load)}))


if __name__ == "__main__":
    main()
