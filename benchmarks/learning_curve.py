"""Draw what a training run learnt: expected acceptance length against blocks and answer tokens trained.

    python -m benchmarks.learning_curve OUT.png RUN [RUN ...]

A run is a folder of `dspark-train fit`. Points are its validations (held-out prompts, teacher forced), so that runs on
more or fewer data can be laid over each other; the last one of each is printed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def read_curve(run: Path) -> list[dict[str, Any]]:
    """Validation lines of a run, each with the blocks and supervised positions trained until then."""
    settings = json.loads((run / "fit.json").read_text(encoding="utf-8"))
    per_step = settings["num_anchors"] * settings["batch_size"] * settings["accumulation"]
    positions, curve = 0.0, []
    for line in map(json.loads, (run / "log.jsonl").read_text(encoding="utf-8").splitlines()):
        if line["kind"] == "train":
            positions += line["positions"]
        else:
            curve.append(line | {"blocks": line["step"] * per_step, "trained": positions})
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    args = parser.parse_args()
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    last = {}
    for run in args.runs:
        curve = read_curve(run)
        for panel, axis in zip(panels, ("blocks", "trained"), strict=True):
            for name, style in (("expected_acceptance_length", "-"), ("expected_acceptance_length_greedy", "--")):
                label = f"{run.name}, {'greedy' if name.endswith('greedy') else 'temperature 1'}"
                panel.plot([p[axis] for p in curve], [p[name] for p in curve], style, marker=".", label=label)
        last[run.name] = curve[-1]
    panels[0].set(xlabel="blocks trained", ylabel="expected acceptance length, held out")
    panels[1].set(xlabel="supervised answer tokens trained, with repetition")
    for panel in panels:
        panel.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(args.output, dpi=120)
    print(json.dumps({"benchmark": "learning_curve", "last": last}))


if __name__ == "__main__":
    main()
