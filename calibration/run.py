"""What the commands of `dspark-calibrate` do."""

from __future__ import annotations

import datetime as dt
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from calibration.collect import RECORDS_FILE, collect, read_records
from calibration.records import joined
from calibration.settings import DEFAULT_PROMPTS, CalibrateConfig
from calibration.split import Split, fit_split, of_regime
from calibration.sts import evaluate, raw
from dspark_core.checkpoint.calibration import (
    CALIBRATION_FILE,
    Calibration,
    CalibrationReport,
    Scaling,
    save_calibration,
)
from dspark_core.checkpoint.fingerprint import fingerprint
from dspark_core.checkpoint.origin import Origin
from dspark_core.checkpoint.references import resolve_draft
from dspark_core.checkpoint.step_cost import STEP_COST_FILE, save_step_cost
from dspark_core.errors import CheckpointError
from dspark_core.keys import Keys
from dspark_core.sampling import Regime
from server.config import ServerConfig
from server.engine import Engine
from server.loader import load_engine
from server.profile import Profile, profile
from server.verification import measured_folder, versions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Places:
    """Where things lie: what the server reads, and beside it what people read."""

    folder: Path

    @property
    def work(self) -> Path:
        """Records and report."""
        return self.folder / "calibration"

    @property
    def records(self) -> Path:
        return self.work / RECORDS_FILE


def places_of(config: CalibrateConfig) -> Places:
    """Raises CheckpointError if there is no such draft."""
    if config.output:
        return Places(Path(config.output).expanduser())
    draft = resolve_draft(config.ckpt)
    return Places(measured_folder(config.ckpt, draft, fingerprint(draft)))


def load(config: CalibrateConfig) -> tuple[Engine, Origin]:
    """An engine that verifies whole blocks, and what its measurements are marked with."""
    engine = load_engine(
        ServerConfig(
            ckpt=config.ckpt,
            target=config.target,
            dtype=config.dtype,
            cpu_weights=config.cpu_weights,
            device=config.device,
            draft_len=config.draft_len,
            max_num_seqs=config.max_num_seqs,
            seed=config.seed,
            verify="full",
        )
    )
    assert engine.origin is not None, "it has a draft"
    return engine, engine.origin


def run_profile(config: CalibrateConfig, places: Places, engine: Engine, origin: Origin) -> Profile:
    """Measure steps and write step_cost.json."""
    with tqdm(desc="profile", unit="step") as bar:

        def show(done: int, total: int) -> None:
            bar.total, bar.n = total, done
            bar.update(0)

        found = profile(engine, config.contexts, config.repeats, show)
    details = {
        "spread": found.spread,
        "seconds": {" ".join(map(str, key)): seconds for key, seconds in found.medians.items()},
        "date": _today(),
    }
    places.folder.mkdir(parents=True, exist_ok=True)
    save_step_cost(places.folder / STEP_COST_FILE, found.cost, origin, versions(), details)
    if found.busy:
        logger.warning("times of one and the same step differ widely: the machine was busy, measure again")
    return found


def run_collect(config: CalibrateConfig, places: Places, engine: Engine, origin: Origin) -> int:
    """Complete the records."""
    return collect(config, engine, places.records, origin.as_json())


def run_fit(config: CalibrateConfig, places: Places) -> Split:
    """Fit temperatures on a part of the records, judge them by the others, write calibration.json."""
    split = read_split(config, places)
    # The standard keys are of the ratio rule; where nobody sampled, of what there is.
    usual: Regime = "ratio" if "ratio" in split.fits else next(iter(split.fits))
    judged = of_regime(split.judged, usual)
    before, after = (
        [row.ece for row in evaluate(judged, calibrator, np.random.default_rng(config.seed), bins=config.bins)]
        for calibrator in (raw(judged.draft_len), split.fits[usual].calibrator)
    )
    report = CalibrationReport(
        dataset=config.prompts or f"{DEFAULT_PROMPTS.name} of dspark",
        num_samples=len(split.fitted_on),
        temperatures=split.fits[usual].temperatures,
        ece_before=before,
        ece_after=after,
        details={
            "date": _today(),
            "method": split.method,
            "max_tokens": config.max_tokens,
            "temperatures": list(config.temperatures),
        },
    )
    scalings = {regime: Scaling(c.scales, c.biases) for regime, c in split.chosen.items()}
    scalings.setdefault("ratio", scalings[usual])
    shares = acceptance(split)
    shares.setdefault("ratio", shares[usual])
    calibration = Calibration(scalings, shares)
    save_calibration(places.folder / CALIBRATION_FILE, calibration, report, read_origin(places), versions())
    return split


def read_split(config: CalibrateConfig, places: Places) -> Split:
    """Read the records and fit; nothing is written."""
    records = read_records(places.records, read_origin(places).draft_len)
    return fit_split(records, config.held_out, config.method, bins=config.bins, seed=config.seed)


def acceptance(split: Split) -> dict[Regime, tuple[float, ...]]:
    """By regime, [K] share of the drafts at a position that were accepted, where all before them were.

    A round of 0.5 besides, so that a position nobody reached has a share, too.
    """
    records = joined([split.fitted_on, split.judged])
    shares: dict[Regime, tuple[float, ...]] = {}
    for regime in split.fits:
        own, slots = of_regime(records, regime), np.arange(records.draft_len)
        judged, stood = (slots < count[:, None] for count in (own.decided, own.accepted))
        shares[regime] = tuple(((stood.sum(0) + 0.5) / (judged.sum(0) + 1)).tolist())
    return shares


def read_origin(places: Places) -> Origin:
    """What the records were collected with."""
    path = places.records.with_name(places.records.name + ".settings.json")
    if not path.is_file():
        raise CheckpointError(f"{places.records}: there are no records; make some: dspark-calibrate collect")
    origin: dict[str, Any] = Keys.of_file(path).get("origin", dict)
    try:
        return Origin(**origin)
    except TypeError:
        raise CheckpointError(f"{path}: key 'origin' is {origin!r}, expected what dspark-calibrate writes") from None


def conditions(config: CalibrateConfig, places: Places) -> dict[str, str]:
    """What the figures of a report were measured with."""
    origin = read_origin(places)
    return {
        "draft": f"{config.ckpt} ({origin.draft})",
        "target": f"{config.target or 'as the draft names it'} ({origin.target})",
        "draft_len": str(origin.draft_len),
        "dtype": origin.dtype,
        "machine": f"{origin.machine}, {origin.threads} threads" if origin.threads else origin.machine,
        "prompts": config.prompts or f"{DEFAULT_PROMPTS.name} of dspark",
        "date": _today(),
        **versions(),
    }


def _today() -> str:
    return dt.datetime.now(dt.UTC).date().isoformat()
