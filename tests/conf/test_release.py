"""The package, the changelog and the citation tell of one version and one day."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import yaml

from qerl_bench import __version__

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
HEADING, *LINES = next(section for section in SECTIONS if not section.startswith("[Unreleased]")).splitlines()
VERSION, DAY = HEADING.split(" - ")
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_newest_section_is_of_this_version_and_short() -> None:
    assert f"[{__version__}]" == VERSION and len(LINES) <= 40


def test_what_is_cited_is_this_version_and_has_a_day_once_it_is_released() -> None:
    assert CITATION["version"] == __version__
    assert CITATION.get("date-released") == (None if DAY == "unreleased" else date.fromisoformat(DAY))
    assert DAY == "unreleased" or f"Version {__version__} of {DAY}." in (ROOT / "ARTIFACT.md").read_text()
