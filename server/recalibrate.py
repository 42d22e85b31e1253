"""`--recalibrate-online`: the calibration is refitted in service, from blocks that a coin chose to verify in full."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections import deque
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
        self._folder = tempfile.TemporaryDirectory(prefix="dspark-recalibrate-")
        self._records: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._new = 0
        self._fit: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        return Path(self._folder.name)

    def observe(self, rounds: Rounds) -> None:
        """Keep what was verified in full; start a fit when there is enough, and take over one that is done."""
        if rounds.logits is not None:
            for row, request in enumerate(rounds.requests):
                if self.policy.in_full(request):
                    self._keep(rounds, row)
        if self._fit is not None:
            self._take_over()
        elif self._new >= self.every:
            self._start()

    def _keep(self, rounds: Rounds, row: int) -> None:
        request, logits = rounds.requests[row], rounds.logits
        assert logits is not None
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
        path = self.folder / "calibration" / "records.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in self._records))
        path.with_name("records.jsonl.settings.json").write_text(json.dumps({"origin": self.origin.as_json()}))
        command = [sys.executable, "-m", "calibration.cli", "fit", "--output", str(self.folder)]
        with (self.folder / "log").open("wb") as log:
            self._fit = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def _take_over(self) -> None:
        assert self._fit is not None
        if (code := self._fit.poll()) is None:
            return
        self._fit = None
        if code:
            text = (self.folder / "log").read_text(errors="replace").strip().splitlines() or [""]
            logger.warning("recalibration failed, the calibration stays as it was: %s", text[-1])
            return
        try:
            self.policy.calibration = load_calibration(self.folder / CALIBRATION_FILE, self.origin)
        except CheckpointError as error:
            logger.warning("recalibration failed, the calibration stays as it was: %s", error)
            return
        logger.info("recalibrated from %d rounds verified in full", len(self._records))
