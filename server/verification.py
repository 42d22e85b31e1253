"""Which length policy is in force, and the measurements it goes by: from settings and files."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dspark_core import __version__
from dspark_core.checkpoint.calibration import CALIBRATION_FILE, Calibration, load_calibration
from dspark_core.checkpoint.files import cache_folder, locked
from dspark_core.checkpoint.fingerprint import fingerprint
from dspark_core.checkpoint.origin import Origin
from dspark_core.checkpoint.references import DEMO
from dspark_core.checkpoint.step_cost import STEP_COST_FILE, load_step_cost, save_step_cost
from dspark_core.errors import CheckpointError
from dspark_core.kernels import have_kernels
from dspark_core.step_cost import StepCost
from server.auto_policy import AutoPolicy
from server.config import ServerConfig
from server.engine import Engine
from server.policy import FixedLength, LengthPolicy, Threshold
from server.profile import VERSION, profile
from server.recalibrate import REFITTED, OnlineRecalibration

logger = logging.getLogger(__name__)

OFF = "off"


@dataclass(frozen=True)
class Models:
    """Where the models of an engine came from.

    Attributes:
        target, draft: their folders.
        ckpt: what the user called the draft.
        origin: what measurements of them are marked with.
    """

    target: Path
    draft: Path
    ckpt: str
    origin: Origin

    @classmethod
    def of(cls, config: ServerConfig, engine: Engine, target: Path, draft: Path) -> Models:
        origin = Origin.of(
            target=fingerprint(target),
            draft=fingerprint(draft),
            draft_len=engine.draft_len,
            dtype=engine.target.dtype,
            weights=config.cpu_weights,
            device=engine.target.device,
        )
        return cls(target, draft, config.ckpt, origin)

    @property
    def folder(self) -> Path:
        """Where `dspark-calibrate` writes."""
        return measured_folder(self.ckpt, self.draft, self.origin.draft)

    def candidates(self, name: str) -> list[Path]:
        """Files about this draft: where `dspark-calibrate` writes, then beside it."""
        return [folder / name for folder in dict.fromkeys((self.folder, self.draft)) if (folder / name).is_file()]


def measured_folder(ckpt: str, draft: Path, name: str) -> Path:
    """Where measurements of a draft lie: in its folder if that is the user's own, else in the cache.

    Args:
        ckpt: what the user called it.
        name: its fingerprint.
    """
    own = ckpt != DEMO and Path(ckpt).expanduser().is_dir()
    return draft if own else cache_folder() / "calibration" / name


def versions() -> dict[str, str]:
    """Of what numbers may depend on."""
    return {"dspark": __version__, "torch": str(torch.__version__), "numpy": np.__version__}


def choose_policy(config: ServerConfig, engine: Engine, models: Models) -> tuple[LengthPolicy, dict[str, str]]:
    """The policy that the settings ask for, and what to tell people about it.

    Raises:
        CheckpointError: a file named by the user does not fit, or a threshold is asked of a draft without confidence.
    """
    kind, _, value = config.verify.partition("=")
    if config.recalibrate_online and (kind != "auto" or config.seed is not None):
        raise CheckpointError("--recalibrate-online: needs --verify auto, without --seed")
    if kind == "auto" and config.seed is not None:
        text = "whole blocks, for --seed asks for the same texts in every run"
        return LengthPolicy(), {"verification": text}
    if kind == "full":
        return LengthPolicy(), {"verification": "whole blocks"}
    if kind == OFF:
        return FixedLength(0), {"verification": "nothing is drafted"}
    if kind not in ("auto", "threshold"):
        return FixedLength(int(kind)), {"verification": f"{min(int(kind), engine.draft_len)} tokens of every block"}
    assert engine.drafter is not None
    has_confidence = engine.drafter.model.confidence_head is not None
    calibration = find_calibration(config, models) if has_confidence else None
    told = {"calibration": calibration.source if calibration else "none, the draft has no confidence head"}
    if kind == "threshold":
        if calibration is None:
            raise CheckpointError(
                f"--verify {config.verify}: {models.draft} has no confidence head; use auto, full or N"
            )
        text = f"what survives with a probability of {value} or more"
        return Threshold(float(value), calibration), {"verification": text, **told}
    cost, source = find_step_cost(config, engine, models)
    text = "as far as pays, by confidence" if calibration else "as far as pays, by earlier rounds"
    policy = AutoPolicy(cost, calibration)
    if config.recalibrate_online:
        if calibration is None:
            raise CheckpointError(f"--recalibrate-online: {models.draft} has no confidence head")
        engine.observers.append(OnlineRecalibration(policy, models.origin).observe)
        told["calibration"] += REFITTED
    return policy, {"verification": text, **told, "step costs": source}


def find_calibration(config: ServerConfig, models: Models) -> Calibration:
    """The calibration named by the user, else the one beside the draft or in the cache, else none."""
    raw = Calibration.raw(models.origin.draft_len)
    if config.calibration == OFF:
        return raw
    if config.calibration:
        return load_calibration(Path(config.calibration).expanduser(), models.origin)
    for path in models.candidates(CALIBRATION_FILE):
        try:
            return load_calibration(path, models.origin)
        except CheckpointError as error:
            logger.warning("%s. It is not used", error)
    logger.warning("no calibration: raw confidence is used; dspark-calibrate --ckpt %s makes one", config.ckpt)
    return raw


def find_step_cost(config: ServerConfig, engine: Engine, models: Models) -> tuple[StepCost, str]:
    """Step costs named by the user, else those beside the draft, else measured now or at an earlier start here."""
    if config.step_cost:
        given = Path(config.step_cost).expanduser()
        return load_step_cost(given, models.origin), str(given)
    for beside in models.candidates(STEP_COST_FILE):
        try:
            return load_step_cost(beside, models.origin), str(beside)
        except CheckpointError as error:
            logger.warning("%s. It is not used", error)
    key = hashlib.blake2b(json.dumps(_conditions(engine, models)).encode(), digest_size=8).hexdigest()
    path = cache_folder() / "step_cost" / f"{key}.json"
    if path.is_file():
        try:
            return load_step_cost(path, models.origin), f"measured at an earlier start ({path})"
        except CheckpointError as error:
            logger.warning("%s. Costs are measured anew", error)
    found = profile(engine)
    if found.busy:
        logger.warning("the machine was busy while costs were measured: they are measured again at the next start")
        return found.cost, "measured at start, on a busy machine"
    try:
        with locked(path, on_wait=lambda: None):
            save_step_cost(path, found.cost, models.origin, versions(), {"spread": found.spread})
    except OSError as error:
        logger.warning("%s: measured step costs could not be kept (%s)", path, error.strerror)
    return found.cost, "measured at start"


def _conditions(engine: Engine, models: Models) -> list[object]:
    """What costs measured at start depend on, besides the machine's mood."""
    sizes = [engine.max_num_seqs, engine.pool.page_size, engine.max_model_len, engine.pool.num_pages]
    kernels = _kernels(engine)
    return [VERSION, models.origin.as_json(), versions(), sizes, kernels]


def _kernels(engine: Engine) -> str:
    """Which kernels run here."""
    if engine.target.device.type != "cpu" or not have_kernels():
        return ""
    from dspark_core.kernels.library import source_key  # needs llvmlite

    return source_key()
