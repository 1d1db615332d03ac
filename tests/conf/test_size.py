"""What a checkout weighs: 15.0 MB, studies 7.9 of these, their figures 2.3 of those."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from qerl_bench.studies.report.sessions import pictures_on

ROOT = Path(__file__).resolve().parents[2]


def test_a_checkout_stays_small() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert sum(file.stat().st_size for file in files if file.is_file()) < 15.2e6


def test_every_figure_of_a_study_is_shown_on_a_page() -> None:
    pages = [ROOT / "README.md", *(page for folder in ("docs", "studies") for page in (ROOT / folder).rglob("*.md"))]
    assert {*(ROOT / "studies").rglob("*.svg")} <= {picture for page in pages for picture in pictures_on(page)}
