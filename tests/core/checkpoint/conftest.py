"""A miniature demo release, and the real demo tokenizer, loaded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dspark_core.checkpoint.demo import DemoRelease
from dspark_core.checkpoint.references import resolve_target
from dspark_core.checkpoint.tokenizer import Tokenizer
from tests.core.checkpoint.fake_release import write_release


@pytest.fixture(scope="session")
def demo() -> tuple[Tokenizer, Any]:
    """Ours and that of Transformers, from the demo target's folder."""
    folder = resolve_target("demo")
    return Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DemoRelease:
    """A tiny release whose wheel lies in the test's own folder."""
    made, wheel = write_release(tmp_path)
    monkeypatch.setenv("DSPARK_DEMO_WHEEL", str(wheel))
    return made


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache folder that does not exist yet."""
    return tmp_path / "cache"
