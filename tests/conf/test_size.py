"""What a checkout weighs: 22 MB. The study on released models has 3.8 of them, the fair test 2.8, what earlier versions
stored 1.5. Of the rest, programs made 6.4 (tables, pictures, notebooks), and people wrote 7.8: this grows with what the
harness does, and somebody reads each line of it. A mend that was left out for 2 kB of it cost more than they do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from qerl_studies.report.sessions import pictures_on

ROOT = Path(__file__).resolve().parents[2]
BOUGHT = "studies/real-2026/"  # card time, which no test repeats: copies of two sizes, further arms, looks
FAIR = "studies/fair-2026/"  # card time too: its first part has 0.4 MB a size, and parts that train 0.06 a copy
STORED = "tests/assets/stored/"  # never made anew
WRITTEN, MADE = "written", "made"  # of all other files
WORDS = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".sh", ".cff"}


def test_a_checkout_stays_small() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout")
    sizes = {BOUGHT: 0, FAIR: 0, STORED: 0, WRITTEN: 0, MADE: 0}
    for name in filter(None, listed.stdout.split("\0")):
        other = WRITTEN if Path(name).suffix in WORDS else MADE
        place = next((folder for folder in (BOUGHT, FAIR, STORED) if name.startswith(folder)), other)
        sizes[place] += (ROOT / name).stat().st_size if (ROOT / name).is_file() else 0
    assert sizes[WRITTEN] < 7.9e6 and sizes[MADE] < 6.5e6 and sizes[STORED] < 1.5e6
    assert sizes[BOUGHT] < 3.8e6 and sizes[FAIR] < 3.0e6


def test_every_figure_of_a_study_is_shown_on_a_page() -> None:
    pages = [ROOT / "README.md", *(page for folder in ("docs", "studies") for page in (ROOT / folder).rglob("*.md"))]
    assert {*(ROOT / "studies").rglob("*.svg")} <= {picture for page in pages for picture in pictures_on(page)}
