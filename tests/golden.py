"""Golden folders: reading them, and comparing what we compute with what they hold."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark_core.checkpoint.load import load_draft, load_target
from dspark_core.draft.backbone import DraftModel
from dspark_core.models.decoder import TargetModel
from dspark_core.windows import Windows, make_windows

# Two float32 implementations sum in different orders: errors near 1e-6 a layer, of values of size 1 to 10. Anything
# wrong (an off-by-one, another norm) shows as 1e-2 or more.
FLOAT32 = 1e-4
EXACT = 0.0  # token ids and masks


class BadFolderError(Exception):
    """A folder that is not of the golden form."""


@dataclass(frozen=True)
class Check:
    """One compared quantity. `deviation` of floats is |found - expected| / max(floor, |expected|)."""

    name: str
    deviation: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.deviation <= self.tolerance  # NaN is a mismatch

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "MISMATCH"
        return f"{verdict:<9}{self.name:<32}{self.deviation:<12.3g}tolerance {self.tolerance:g}"


def compare(name: str, found: Any, expected: Any, tolerance: float = FLOAT32, *, floor: float = 1.0) -> Check:
    """Compare tensors or nested lists of numbers; another shape, or nothing to compare, deviates infinitely.

    Args:
        floor: what an expected size is at least taken for; next to nothing makes the deviation relative.
    """
    a, b = (torch.as_tensor(x).double() for x in (found, expected))
    if a.shape != b.shape or not b.numel():
        return Check(name, float("inf"), tolerance)
    return Check(name, float(((a - b).abs() / b.abs().clamp_min(floor)).max()), tolerance)


@dataclass(frozen=True)
class Golden:
    """A golden folder: models not yet prepared, tensors of train.safetensors, content of expected.json."""

    folder: Path
    train: dict[str, Tensor]
    expected: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Golden:
        """Raises BadFolderError."""
        needed = ("expected.json", "train.safetensors", "target/config.json", "draft/config.json")
        if missing := [name for name in needed if not (folder / name).is_file()]:
            raise BadFolderError(f"missing {', '.join(missing)}")
        expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
        if (family := expected.get("family")) != "qwen3":
            raise BadFolderError(f"expected.json: family is {family!r}, expected 'qwen3'")
        return cls(folder, load_file(folder / "train.safetensors"), expected)

    def load(self) -> tuple[TargetModel, DraftModel]:
        target = load_target(self.folder / "target")
        return target, load_draft(self.folder / "draft", target)

    @property
    def keep(self) -> Tensor:
        return self.train["block_keep_mask"].bool()

    @property
    def anchors(self) -> Tensor:
        """Anchor positions [B, N]; 0 for dummies, whose stored values mean nothing."""
        return self.train["anchor_positions"].where(self.keep, 0)

    def windows(self, draft_len: int) -> Windows:
        return make_windows(self.train["input_ids"], self.train["loss_mask"], self.anchors, self.keep, draft_len)
