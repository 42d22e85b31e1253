"""The log of a run: `log.jsonl`, a line for every report, and the same as TensorBoard scalars."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from dspark_core.checkpoint.files import write_atomically
from dspark_core.train.records import read_lines

logger = logging.getLogger(__name__)

FILE = "log.jsonl"


class RunLog:
    """Opened at the step a run starts or resumes from; lines of later steps, written before a kill, are dropped."""

    def __init__(self, output: Path, step: int) -> None:
        self.path = output / FILE
        kept = _kept(self.path, step) if self.path.exists() else []
        content = "".join(json.dumps(line) + "\n" for line in kept)
        write_atomically(self.path, lambda file: file.write(content.encode()))
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _board(output / "tensorboard", step)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """One report of `kind` (train, validation) after `step` steps."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        if self._board is None:
            return
        for name, value in values.items():
            for k, number in enumerate(value if isinstance(value, list) else [value]):
                tag = f"{kind}/{name}/{k}" if isinstance(value, list) else f"{kind}/{name}"
                self._board.add_scalar(tag, number, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _kept(path: Path, step: int) -> list[dict[str, Any]]:
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]  # a kill may have torn the last line
    if len(whole) < len(text):
        write_atomically(path, lambda file: file.write(whole))
    return [keys.values for keys in read_lines(path) if keys.get("step", int) <= step]


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning("tensorboard is not installed (pip install 'dspark[train]'): only %s is written", FILE)
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)
