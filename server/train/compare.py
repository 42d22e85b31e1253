"""`dspark-train compare`: recipes trained on the same data with the same seed and windows, and what each accepts."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dspark_core.checkpoint.files import write_atomically
from dspark_core.errors import CheckpointError
from dspark_core.train.config import FitConfig
from dspark_core.train.log import FILE as LOG_FILE
from dspark_core.train.records import Prompt, read_lines, read_prompts
from dspark_core.train.trainer import fit
from server.config import ServerConfig
from server.loader import load_engine
from server.train.evaluate import Answer, answer_prompts, mean_length, select, summarise
from server.train.settings import ARMS, CompareConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

RESAMPLES = 2000
_OWN = ("prompts", "arms", "temperatures", "max_tokens", "limit")


@dataclass(frozen=True)
class Measured:
    """An arm's figures at one temperature.

    Attributes:
        lengths: acceptance length of every bootstrap sample of the prompts (mean of the domains).
    """

    found: dict[str, dict[str, Any]]
    lengths: NDArray[np.float64]

    @property
    def length(self) -> float:
        return mean_length(self.found)


def compare(config: CompareConfig) -> dict[str, Any]:
    """Train and measure every arm; writes compare.json, compare.md and compare.png into the output folder.

    Arms that are trained already are taken as they are; an interrupted one is resumed.

    Raises:
        CheckpointError: data, target or prompts cannot be used.
    """
    from matplotlib.figure import Figure  # missing, it is known before the training and not after

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CheckpointError("compare runs in one process, found WORLD_SIZE above 1; train its arms with fit instead")
    output = Path(config.output)
    prompts = select(read_prompts(Path(config.prompts)), config.limit)
    validations, measured = {}, {}
    for arm in config.arms:
        logger.info("arm %s", arm)
        folder = fit(arm_settings(config, arm))
        validations[arm] = _last_validation(folder)
        measured[arm] = measure_arm(folder, config, prompts)
    result = {
        "settings": json.loads(config.model_dump_json()),
        "arms": {arm: _arm_json(config.arms[0], arm, measured, validations[arm]) for arm in config.arms},
    }
    content = json.dumps(result, indent=1)
    write_atomically(output / "compare.json", lambda file: file.write(content.encode()))
    page = markdown(result)
    write_atomically(output / "compare.md", lambda file: file.write(page.encode()))
    plot(result, Figure(figsize=(5.5 * len(config.temperatures), 4), layout="constrained"), output / "compare.png")
    print(page)
    return result


def arm_settings(config: CompareConfig, arm: str) -> FitConfig:
    """The settings of an arm's run: those of all, with what it changes; into a folder of its name."""
    values = config.model_dump(exclude=set(_OWN)) | ARMS["paper"] | ARMS[arm]
    return FitConfig(**values | {"output": str(Path(config.output) / arm)})


def measure_arm(folder: Path, config: CompareConfig, prompts: Sequence[Prompt]) -> dict[float, Measured]:
    """Acceptance through the engine, at every temperature."""
    engine = load_engine(
        ServerConfig(ckpt=str(folder), target=config.target, device=config.device, seed=config.seed, verify="full")
    )
    measured = {}
    for temperature in config.temperatures:
        asked = answer_prompts(
            engine, prompts, temperature=temperature, max_tokens=config.max_tokens, where=config.prompts
        )
        answers = list(asked)
        measured[temperature] = Measured(summarise(answers, engine.draft_len), bootstrap(answers, config.seed))
    return measured


def bootstrap(answers: Sequence[Answer], seed: int) -> NDArray[np.float64]:
    """Acceptance length (mean of the domains) of resampled prompts, [RESAMPLES].

    Prompts are drawn within their domain, by the same draws for every arm: `answers` are put in the order of their
    prompts first, so that differences between arms are paired.
    """
    generator = np.random.default_rng(seed)
    lengths = []
    for domain in sorted({answer.domain for answer in answers}):
        requests = sorted((a.request for a in answers if a.domain == domain), key=lambda r: r.prompt_ids)
        counts = np.array([(r.speculation.accepted, r.speculation.rounds) for r in requests], dtype=np.float64)
        drawn = counts[generator.integers(len(counts), size=(RESAMPLES, len(counts)))].sum(1)
        lengths.append(1 + drawn[:, 0] / np.maximum(drawn[:, 1], 1))
    mean: NDArray[np.float64] = np.mean(lengths, axis=0)
    return mean


def interval(values: NDArray[np.float64]) -> list[float]:
    """The middle 95 %."""
    return [float(bound) for bound in np.percentile(values, (2.5, 97.5))]


def _arm_json(
    first: str, arm: str, measured: Mapping[str, Mapping[float, Measured]], validation: dict[str, Any]
) -> dict[str, Any]:
    temperatures = {}
    for temperature, own in measured[arm].items():
        base = measured[first][temperature]
        temperatures[f"{temperature:g}"] = {
            "acceptance_length": own.length,
            "interval": interval(own.lengths),
            "difference": own.length - base.length,
            "difference_interval": interval(own.lengths - base.lengths),
            "domains": own.found,
        }
    return {"changes": ARMS[arm], "validation": validation, "temperatures": temperatures}


def _last_validation(folder: Path) -> dict[str, Any]:
    """The last validation line of a run's log; empty when nothing was held out."""
    lines = [keys.values for keys in read_lines(folder / LOG_FILE) if keys.values.get("kind") == "validation"]
    return lines[-1] if lines else {}


def markdown(result: Mapping[str, Any]) -> str:
    """The comparison as a table."""
    arms: Mapping[str, Any] = result["arms"]
    temperatures = list(next(iter(arms.values()))["temperatures"])
    first = next(iter(arms))
    columns = ["arm", *(f"length, T={t}" for t in temperatures), *(f"against {first}, T={t}" for t in temperatures)]
    columns += ["validation tv", "confidence loss", "confidence bias"]
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    for name, arm in arms.items():
        cells = [name]
        cells += [_with_interval(arm["temperatures"][t], "acceptance_length", "interval", "") for t in temperatures]
        cells += [
            _with_interval(arm["temperatures"][t], "difference", "difference_interval", "+") if name != first else ""
            for t in temperatures
        ]
        validation = arm["validation"]
        cells += [
            f"{validation[key]:.3f}" if key in validation else ""
            for key in ("tv", "confidence_loss", "confidence_bias")
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Acceptance length: mean of the domains, bonus token included. Brackets: 95 % bootstrap intervals over",
    ]
    lines += ["prompts, paired for the differences.", "", *_positions_table(arms, temperatures)]
    return "\n".join(lines) + "\n"


def _positions_table(arms: Mapping[str, Any], temperatures: Sequence[str]) -> list[str]:
    """Rows of conditional acceptance by position, the domains pooled; a dash where a position was never reached."""
    rows = {
        (name, t): pooled_acceptance(arm["temperatures"][t]["domains"])
        for t in temperatures
        for name, arm in arms.items()
    }
    positions = range(1, 1 + max(len(shares) for shares in rows.values()))
    lines = [
        f"| accepted, if all before were | {' | '.join(map(str, positions))} |",
        f"| --- |{' --- |' * len(positions)}",
    ]
    for (name, t), shares in rows.items():
        lines.append(f"| {name}, T={t} | {' | '.join('-' if math.isnan(s) else f'{s:.2f}' for s in shares)} |")
    return lines


def _with_interval(row: Mapping[str, Any], value: str, bounds: str, sign: str) -> str:
    low, high = row[bounds]
    return f"{row[value]:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def plot(result: Mapping[str, Any], figure: Figure, path: Path) -> None:
    """Conditional acceptance by position of every arm, one panel a temperature."""
    arms: Mapping[str, Any] = result["arms"]
    temperatures = list(next(iter(arms.values()))["temperatures"])
    panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    for panel, temperature in zip(panels, temperatures, strict=True):
        for name, arm in arms.items():
            shares = pooled_acceptance(arm["temperatures"][temperature]["domains"])
            panel.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
        panel.set(title=f"temperature {temperature}", xlabel="position in the block", ylim=(0, 1))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("accepted, if all before were")
    panels[0].legend()
    figure.savefig(path, dpi=120)


def pooled_acceptance(domains: Mapping[str, Any]) -> list[float]:
    """Conditional acceptance by position over all domains; NaN where a position was never reached."""
    decided = np.sum([row["decided_by_position"] for row in domains.values()], axis=0)
    accepted = np.sum(
        [
            np.multiply([s or 0.0 for s in r["acceptance_by_position"]], r["decided_by_position"])
            for r in domains.values()
        ],
        axis=0,
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        shares: list[float] = (accepted / decided).tolist()
    return shares
