"""`--recalibrate-online`: the calibration is refitted in service, from blocks that a coin chose to verify in full."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from dspark_core.checkpoint.calibration import CALIBRATION_FILE, load_calibration
from dspark_core.checkpoint.origin import Origin
from dspark_core.errors import CheckpointError
from server.auto_policy import AutoPolicy
from server.policy import Rounds

logger = logging.getLogger(__name__)

SHARE = 1 / 32  # of the rounds that draft; the coin falls before anything is drafted
KEPT = 6000  # newest rounds
EVERY = 1000  # of them between one fit and the next
LEAST = 300  # of a regime, for its fit to be taken over
REFITTED = ", refitted in service"
PACKAGES = Path(__file__).resolve().parents[1]


class OnlineRecalibration:
    """Collects rounds that were verified in full and lets `dspark-calibrate fit` work on them, in a process of its own.

    Add `observe` to the engine's observers. A new calibration counts from the next step on: a block is never judged by
    what it itself has taught.

    Args:
        policy: gets the coins, and the calibrations.
        every: rounds between one fit and the next.
    """

    def __init__(self, policy: AutoPolicy, origin: Origin, *, share: float = SHARE, every: int = EVERY) -> None:
        assert policy.calibration is not None
        policy.full_share = share
        self.policy, self.origin, self.every = policy, origin, every
        self._records: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._new = 0
        self._folder: Path | None = None
        self._fit: subprocess.Popen[bytes] | None = None

    def observe(self, rounds: Rounds) -> None:
        """Keep what was verified in full; start a fit when there is enough, and take over one that is done."""
        if rounds.logits is not None:
            for row, request in enumerate(rounds.requests):
                if self.policy.in_full(request):
                    self._keep(rounds, row)
        if self._fit is None and self._new < self.every:
            return
        try:
            if self._fit is None:
                self._start()
            else:
                self._take_over()
        except (OSError, CheckpointError) as error:  # a full disk is no reason to fail a request
            logger.warning("recalibration failed, the calibration stays as it was: %s", error)

    def _keep(self, rounds: Rounds, row: int) -> None:
        request, logits = rounds.requests[row], rounds.logits
        assert logits is not None
        if rounds.verified[row] < rounds.drafted[row]:
            return
        self._new += 1
        self._records.append(
            {
                "id": str(self._new),
                "prompt": request.key % 2**31,
                "domain": "live",
                "regime": request.params.sampling.regime,
                "temperature": request.params.sampling.temperature,
                "rounds": [
                    {
                        "logits": logits[row, : rounds.drafted[row]].tolist(),
                        "decided": int(rounds.decided[row]),
                        "accepted": int(rounds.accepted[row]),
                    }
                ],
            }
        )

    def _start(self) -> None:
        self._new = 0
        if self._folder is None or not self._folder.is_dir():
            self._folder = Path(tempfile.mkdtemp(prefix="dspark-recalibrate-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        path = self._folder / "calibration" / "records.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in self._records))
        path.with_name("records.jsonl.settings.json").write_text(json.dumps({"origin": self.origin.as_json()}))
        command = [sys.executable, "-m", "calibration.cli", "fit", "--output", str(self._folder)]
        with (self._folder / "log").open("wb") as log:
            # From the folder that holds our packages: a user's own may have a `calibration` too.
            self._fit = subprocess.Popen(command, cwd=PACKAGES, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def _take_over(self) -> None:
        assert self._fit is not None
        assert self._folder is not None
        if (code := self._fit.poll()) is None:
            return
        self._fit = None
        if code:
            text = (self._folder / "log").read_text(errors="replace").strip().splitlines() or [""]
            raise CheckpointError(text[-1])
        found, old = load_calibration(self._folder / CALIBRATION_FILE, self.origin), self.policy.calibration
        assert old is not None
        # A way of sampling that was hardly used here keeps what was known of it.
        counts = Counter(record["regime"] for record in self._records)
        new = {regime: scaling for regime, scaling in found.regimes.items() if counts[regime] >= LEAST}
        source = f"{old.source.removesuffix(REFITTED)}{REFITTED}"
        self.policy.calibration = replace(old, regimes={**old.regimes, **new}, source=source)
        logger.info("recalibrated %s from %d rounds verified in full", ", ".join(new) or "nothing", len(self._records))
