"""docs/cli.md says what the programs say."""

from __future__ import annotations

import tomllib

from tests.help_pages import PATH, PROGRAMS, document


def test_the_pages_are_those_of_the_programs() -> None:
    assert PATH.read_text(encoding="utf-8") == document(), "python -m tests.help_pages writes it anew"


def test_every_program_has_its_pages() -> None:
    project = tomllib.loads((PATH.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert sorted(PROGRAMS) == sorted(project["scripts"])
