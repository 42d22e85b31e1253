"""`dspark-calibrate report`: how well survival is calibrated before and after the fit, as JSON, a page and plots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from calibration import plots
from calibration.plots import percent, points
from calibration.records import Records
from calibration.reliability import reliability
from calibration.split import Split, of_regime
from calibration.sts import Calibrator, PositionReport, evaluate, raw
from dspark_core.arrays import Floats
from dspark_core.checkpoint.files import write_atomically
from dspark_core.sampling import REGIMES, Regime

if TYPE_CHECKING:
    from server.profile import Profile

VERSION = 1
# The bar: ECE after at most MOST and at most SHARE of before, where ENOUGH blocks or more survived and ENOUGH did not.
ENOUGH, MOST, SHARE = 200, 0.03, 0.5
RARE = 0.05  # of blocks: about 0 for all of them is then hard to tell from a good prediction
THRESHOLDS = np.arange(101) / 100


@dataclass(frozen=True)
class Verdict:
    """What the bar says of one position.

    Attributes:
        status: "inside noise" is a position that was calibrated as well as can be told before, and still is.
        excess: ECE above what the bar allows; None unless it misses.
        reason: in words.
    """

    status: Literal["meets", "misses", "inside noise", "too few"]
    excess: float | None
    reason: str


def judge(before: PositionReport, after: PositionReport) -> Verdict:
    """Hold one position against the bar.

    Noise is the ECE that a perfectly calibrated predictor stays below in 95 % of samples of this size. Where the one
    before is inside its own, there is nothing to halve; what is asked then is that the fit does no harm: at most MOST
    after, or inside the noise still.
    """
    accepted, rejected = after.num_accepted, after.num_rejected
    if min(accepted, rejected) < ENOUGH:
        kind = "accepted" if accepted < ENOUGH else "rejected"
        return Verdict("too few", None, f"fewer than {ENOUGH} {kind}{_rarity(accepted, rejected)}")
    parts = (before.ece, after.ece, before.noise_limit, after.noise_limit)
    old, new, old_noise, noise = (float("nan") if value is None else value for value in parts)
    allowed = min(MOST, SHARE * old)
    if new <= allowed:
        return Verdict("meets", None, f"allowed {percent(allowed)}")
    quiet = old <= old_noise
    if quiet and (new <= MOST or new <= noise):
        return Verdict("inside noise", None, f"a perfect predictor would have shown up to {percent(old_noise)} before")
    allowed = MOST if quiet else allowed
    reason = f"allowed {percent(allowed)}"
    if new <= noise:
        reason += f"; but a perfect predictor shows up to {percent(noise)} at this size"
    return Verdict("misses", new - allowed, reason)


def _rarity(accepted: int, rejected: int) -> str:
    total = max(accepted + rejected, 1)
    if min(accepted, rejected) >= RARE * total:
        return ""
    side = 0 if accepted < rejected else 1
    return f"; {percent(accepted / total)} survive to here: whatever predicts about {side} looks calibrated"


def sweep(records: Records, survival: Floats) -> dict[str, list[float | None]]:
    """What verifying only slots of at least some survival gives, for each of THRESHOLDS.

    Args:
        survival: [N, K] predicted.

    Returns:
        verified, accepted: drafts per round (the bonus token is none); efficiency: accepted / verified, None of none.
        Slots after the end of a text, of which nothing is known, count as neither.
    """
    return _outcome(records, np.stack([survival >= threshold for threshold in THRESHOLDS]))


def fixed_lengths(records: Records) -> dict[str, list[float | None]]:
    """As `sweep`, but for verifying the first 0, 1, .. K slots of every block."""
    slots = np.arange(records.draft_len)
    return _outcome(
        records, np.stack([np.broadcast_to(slots < m, records.logits.shape) for m in range(len(slots) + 1)])
    )


def _outcome(records: Records, chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> dict[str, list[float | None]]:
    """Of choices [C, N, K]."""
    taken = chosen & records.known
    verified, accepted = taken.sum((1, 2)), (taken & records.survived).sum((1, 2))
    return {
        "verified": (verified / len(records)).tolist(),
        "accepted": (accepted / len(records)).tolist(),
        "efficiency": [a / v if v else None for a, v in zip(accepted.tolist(), verified.tolist(), strict=True)],
    }


def write_report(
    folder: Path,
    split: Split,
    *,
    profile: Profile | None = None,
    conditions: Mapping[str, str],
    bins: int = 15,
    resamples: int = 200,
) -> dict[str, Any]:
    """Write report.json, report.html (with all plots in it) and the plots as PNGs; returns what report.json holds.

    Args:
        folder: made if it is not there.
        split: what was fitted; what the server uses of it is held against the bar.
        profile: costs of steps, if they were measured.
        conditions: what the figures were measured with, by name.
        bins: of the calibration error.
        resamples: draws of each interval and noise level.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; nothing was written.
        OSError: the folder cannot be written.
    """
    plots.need()
    report: dict[str, Any] = {
        "version": VERSION,
        "conditions": dict(conditions),
        "method": split.method,
        **_figures(split, bins, resamples),
        "step_cost": None if profile is None else _step_cost(profile),
    }
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    report = json.loads(text)
    files = plots.files(report) | {"report.json": text.encode()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(folder / name, methodcaller("write", content))
    return report


def _figures(split: Split, bins: int, resamples: int) -> dict[str, Any]:
    parts = {r: (of_regime(split.fitted_on, r), of_regime(split.judged, r)) for r in REGIMES}
    judged = [r for r in REGIMES if r in split.fits and len(parts[r][1])]
    return {
        "draft_len": split.judged.draft_len,
        "bins": bins,
        "bar": {"enough": ENOUGH, "most": MOST, "share": SHARE},
        "thresholds": THRESHOLDS.tolist(),
        "regimes": {r: _regime(*parts[r], split, r, bins, resamples) for r in judged},
        "not_judged": [r for r in REGIMES if r not in judged and any(map(len, parts[r]))],
    }


def _regime(
    fitted_on: Records, judged: Records, split: Split, regime: Regime, bins: int, resamples: int
) -> dict[str, Any]:
    fit, method = split.fits[regime], split.method
    calibrators = {"raw": raw(judged.draft_len), "sts": fit.calibrator, "platt": split.platt[regime]}
    everything = _slice("all", "", judged, calibrators, bins, resamples)
    parts = [("domain", name, judged.domain == i) for i, name in enumerate(judged.domains)]
    parts += [("temperature", f"{t:g}", judged.temperature == t) for t in np.unique(judged.temperature)]
    slices = [_slice(by, name, judged.of(rows), calibrators, bins, resamples) for by, name, rows in parts if rows.any()]
    found: dict[str, list[PositionReport]] = everything["positions"]
    errors: list[dict[str, float]] = [
        {m: rows[k].ece or 0.0 for m, rows in found.items() if rows[k].ece is not None} for k in range(judged.draft_len)
    ]
    means = {m: float(np.mean([e[m] for e in errors if e])) for m in calibrators} if any(errors) else {}
    return {
        "rounds": {"fitted_on": len(fitted_on), "judged": len(judged)},
        "prompts": {"fitted_on": len(np.unique(fitted_on.prompt)), "judged": len(np.unique(judged.prompt))},
        "fit": [asdict(position) for position in fit.positions],
        "platt": asdict(calibrators["platt"]),
        "bar": [
            {"position": before.position} | asdict(judge(before, after))
            for before, after in zip(found["raw"], found[method], strict=True)
        ],
        "best": {"by_position": [_least(e) for e in errors], "mean": means, "in_the_mean": _least(means)},
        "slices": [
            part | {"positions": {m: [asdict(row) for row in rows] for m, rows in part["positions"].items()}}
            for part in (everything, *slices)
        ],
        "reliability": {m: _bins(judged, c, bins) for m, c in calibrators.items()},
        "sweep": {m: sweep(judged, c.survival(judged.logits)) for m, c in calibrators.items()},
        "fixed_lengths": fixed_lengths(judged),
    }


def _slice(
    by: str, name: str, judged: Records, calibrators: Mapping[str, Calibrator], bins: int, resamples: int
) -> dict[str, Any]:
    positions = {
        method: evaluate(judged, calibrator, np.random.default_rng(0), bins=bins, resamples=resamples)
        for method, calibrator in calibrators.items()
    }
    return {"by": by, "name": name, "rounds": len(judged), "positions": positions}


def _least(values: Mapping[str, float]) -> str | None:
    return min(values, key=values.__getitem__, default=None)


def _bins(judged: Records, calibrator: Calibrator, bins: int) -> list[list[dict[str, Any]]]:
    """[K] points of a reliability diagram each."""
    survival, known, survived = calibrator.survival(judged.logits), judged.known, judged.survived
    columns = [(survival[rows, k], survived[rows, k]) for k, rows in enumerate(known.T)]
    return [[asdict(point) for point in reliability(p, o, bins=bins)] for p, o in columns]


def _step_cost(profile: Profile) -> dict[str, Any]:
    """Seconds, one entry a step that was measured: what of it, with which context, requests and rows or slots."""
    names = ("kind", "context", "requests", "each", "seconds", "spread")
    rows = [(*key, t, profile.spread[" ".join(map(str, key))]) for key, t in profile.medians.items()]
    return {"steps": [dict(zip(names, row, strict=True)) for row in rows]}


def summary(report: Mapping[str, Any]) -> str:
    """The figures of all held-out rounds as a table for the terminal."""
    head = (
        "regime",
        "position",
        "accepted",
        "rejected",
        "temperature",
        "raw ECE",
        "STS",
        "Platt",
        f"bar, of {report['method'].upper() if report['method'] == 'sts' else 'Platt'}",
    )
    table = [head]
    for regime, part in report["regimes"].items():
        found = part["slices"][0]["positions"]
        for fit, verdict, *rows in zip(part["fit"], part["bar"], *(found[m] for m in plots.METHODS), strict=True):
            counts = (str(rows[0]["num_accepted"]), str(rows[0]["num_rejected"]))
            excess = verdict["excess"]
            status = verdict["status"] + (f" by {points(excess)}" if excess is not None else "")
            errors = [percent(row["ece"]) for row in rows]
            table.append((regime, str(fit["position"]), *counts, f"{fit['temperature']:.3f}", *errors, status))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for cells in table:
        middle = (cell.rjust(width) for cell, width in zip(cells[1:-1], widths[1:-1], strict=True))
        lines.append("  ".join((cells[0].ljust(widths[0]), *middle, cells[-1])))
    return "\n".join(lines)
