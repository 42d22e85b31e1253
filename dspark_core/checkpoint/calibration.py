"""`calibration.json`: how probabilities come from confidence logits, by draft position and regime.

The standard keys are those of SGLang's file (`temperatures`, for the ratio rule) and are read from TensorRT-LLM's
(`sts_temperatures`) too. What is ours lies under `dspark`, where other tools do not look: all regimes, and a bias
besides the scale where a temperature alone does not calibrate.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from dspark_core.arrays import Floats
from dspark_core.checkpoint.files import write_atomically
from dspark_core.checkpoint.origin import Origin
from dspark_core.errors import CheckpointError
from dspark_core.keys import Keys
from dspark_core.sampling import REGIMES, Regime

logger = logging.getLogger(__name__)

CALIBRATION_FILE = "calibration.json"
VERSION = 2
_MUST_AGREE = ("target", "draft", "draft_len", "dtype", "device")


@dataclass(frozen=True)
class Scaling:
    """How one regime's confidence comes from its logits: sigmoid(scale * logit + bias), [K] each.

    Sequential Temperature Scaling gives scales of 1 / temperature and no biases.
    """

    scales: tuple[float, ...]
    biases: tuple[float, ...]

    @classmethod
    def by_temperature(cls, temperatures: Sequence[float]) -> Scaling:
        return cls(tuple(1 / value for value in temperatures), (0.0,) * len(temperatures))


@dataclass(frozen=True)
class Calibration:
    """What turns confidence logits into probabilities.

    Attributes:
        regimes: a regime that is not there uses the ratio rule's.
        acceptance: by regime, [K] by position, given that all before it were accepted, as it was when this was
            measured; None if that is not known. What a server goes by before it has seen anything itself.
        source: what to call it.
    """

    regimes: Mapping[Regime, Scaling]
    acceptance: Mapping[Regime, tuple[float, ...]] | None = None
    source: str = "raw confidence"

    @classmethod
    def raw(cls, draft_len: int) -> Calibration:
        """The head's own confidence."""
        return cls({"ratio": Scaling.by_temperature((1.0,) * draft_len)})

    def confidence(self, regimes: Sequence[Regime], logits: Floats) -> Floats:
        """Probability that each slot is accepted, given that those before it are, from raw confidence logits.

        Args:
            regimes: [R] of the requests.
            logits: [R, k], of the first k slots.
        """
        places = {regime: place for place, regime in enumerate(dict.fromkeys(regimes))}  # three at most
        own = [self.regimes.get(regime, self.regimes["ratio"]) for regime in places]
        rows, size = [places[regime] for regime in regimes], logits.shape[1]
        scales, biases = (
            np.array(part)[:, :size][rows] for part in zip(*((s.scales, s.biases) for s in own), strict=True)
        )
        # exp overflows harmlessly: a saturated head is sure. A scale of 0 times infinity is no number, and treated so.
        with np.errstate(over="ignore", invalid="ignore"):
            return cast(Floats, 1 / (1 + np.exp(-(scales * logits + biases))))

    def survival(self, regimes: Sequence[Regime], logits: Floats) -> Floats:
        """Probability that the drafts up to each slot are all accepted: the running product of `confidence`."""
        return cast(Floats, np.cumprod(self.confidence(regimes, logits), -1))


@dataclass(frozen=True)
class CalibrationReport:
    """What was measured while calibrating, for people and other tools.

    Attributes:
        dataset: what the records were made from.
        num_samples: rounds that were fitted on.
        temperatures: [K] of the ratio rule.
        ece_before, ece_after: [K] of the ratio rule without and with these, held out; None if there were no rounds.
        details: anything else that JSON holds.
    """

    dataset: str
    num_samples: int
    temperatures: Sequence[float]
    ece_before: Sequence[float | None]
    ece_after: Sequence[float | None]
    details: Mapping[str, Any] = field(default_factory=dict)


def save_calibration(
    path: Path, calibration: Calibration, report: CalibrationReport, origin: Origin, versions: Mapping[str, str]
) -> None:
    """Write the file, all at once."""
    content = {
        "temperatures": list(report.temperatures),
        "dataset": report.dataset,
        "num_samples": report.num_samples,
        "ece_before": list(report.ece_before),
        "ece_after": list(report.ece_after),
        "dspark": {
            "version": VERSION,
            "regimes": {regime: asdict(scaling) for regime, scaling in calibration.regimes.items()},
            "acceptance": None if calibration.acceptance is None else dict(calibration.acceptance),
            "origin": origin.as_json(),
            "versions": dict(versions),
            "details": dict(report.details),
        },
    }
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def load_calibration(path: Path, origin: Origin) -> Calibration:
    """Read a file of ours, SGLang's or TensorRT-LLM's.

    Raises:
        CheckpointError: it cannot be read, its length or a value does not fit, or it says that it was made for another
            model, block length, number type or device.
    """
    keys = Keys.of_file(path)
    own = keys.get("dspark", dict, None)
    if own is None:
        name = "temperatures" if "temperatures" in keys.values else "sts_temperatures"
        values = keys.numbers(name, origin.draft_len, above=0)
        logger.warning("%s does not say which model it was made for: used as it is, for every regime", path)
        return Calibration({"ratio": Scaling.by_temperature(values)}, source=f"{path} (says nothing of its origin)")
    inner = Keys(own, f"{path}: key 'dspark'")
    if (version := inner.get("version", int)) != VERSION:
        raise CheckpointError(f"{inner.where}: version {version}, expected {VERSION}")
    origin.check(inner.get("origin", dict), path, _MUST_AGREE)
    scalings = _by_regime(inner, "regimes")
    found = {
        regime: _scaling(values, f"{inner.where}: regime '{regime}'", origin.draft_len)
        for regime, values in scalings.items()
    }
    acceptance = None
    if inner.get("acceptance", dict, None) is not None:
        shares = Keys(_by_regime(inner, "acceptance"), f"{inner.where}: acceptance")
        acceptance = {
            cast(Regime, regime): tuple(shares.numbers(regime, origin.draft_len, least=0, most=1))
            for regime in shares.values
        }
    return Calibration(found, acceptance, str(path))


def _by_regime(keys: Keys, name: str) -> dict[Any, Any]:
    """An object with a value for each regime, or some; the ratio rule's, which stands for those without, among them."""
    found: dict[Any, Any] = keys.get(name, dict)
    if unknown := set(found) - set(REGIMES):
        raise CheckpointError(f"{keys.where}: {name}: unknown regime {min(unknown)!r}, expected {', '.join(REGIMES)}")
    if "ratio" not in found:
        raise CheckpointError(f"{keys.where}: {name}: regime 'ratio' is missing")
    return found


def _scaling(values: Any, where: str, draft_len: int) -> Scaling:
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} is a {type(values).__name__}, expected an object")
    keys = Keys(values, where)
    return Scaling(*(tuple(keys.numbers(name, draft_len)) for name in ("scales", "biases")))
