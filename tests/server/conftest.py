"""What tests of the server get besides."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of its own for what a server measures and for calibrations: nothing outside it decides a test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("server.verification.cache_folder", lambda: folder)
    monkeypatch.setattr("server.profile.BUSY", float("inf"))  # the machine that tests run on often is
    return folder
