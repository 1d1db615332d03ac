"""Repeating the study on released models: its files, and what is expected of further copies."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from qerl_core.checks import ConfigError
from qerl_studies.design.sessions import Sessions
from qerl_studies.report.sessions import read_once
from tests.scripts import ROOT, script

REPEAT, AGAIN = script("studies/real-2026/repeat.py"), script("studies/real-2026/again.py")
REAL = ROOT / "studies" / "real-2026"


def with_copies(study: Sessions, *copies: int) -> Sessions:
    return replace(study, runs={cell: run for cell, run in study.runs.items() if cell[1] in copies})


def test_copies_of_the_same_kind_fall_into_the_interval_in_95_of_100_repetitions() -> None:
    draw, inside = np.random.default_rng(0), []
    for _ in range(4000):
        low, high = REPEAT.expected(draw.normal(-0.05, 0.02, 8), 2)
        inside.append(low < draw.normal(-0.05, 0.02, 2).mean() < high)
    assert np.mean(inside) == pytest.approx(0.95, abs=0.012)


def test_the_table_has_the_committed_effect_the_interval_and_the_own_mean() -> None:
    study = read_once(REAL / "05b")
    page = REPEAT.compared(study, with_copies(study, 2, 5))
    rows = [line.split(" | ") for line in page.splitlines()]
    committed = (REAL / "05b/results/primary.md").read_text()
    for name in ("noise", "format"):
        (row,) = (row for row in rows if row[0].startswith(f"| {name}:"))
        effect, interval = row[1].split(" ", 1)
        assert effect in committed and interval in committed
        assert row[4] == "inside |"
    assert "expected of 2" in page


def test_before_a_look_nothing_is_compared() -> None:
    study = read_once(REAL / "05b")
    page = REPEAT.compared(with_copies(study, 1, 2, 3), study)
    assert "no look" in page and "|" not in page
    with pytest.raises(ConfigError, match="no copy has all arms"):
        REPEAT.compared(study, with_copies(study, 99))


def test_another_file_than_that_of_the_study_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "model.gguf"
    with pytest.raises(ConfigError, match=r"no file .*model\.gguf"):
        REPEAT.checked(other, "0" * 64)
    other.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"model\.gguf has the SHA-256 .* the study's has 1d9614"):
        REPEAT.main(["05b", f"model={other}", f"out={tmp_path / 'out'}"])


def test_questions_are_written_as_their_authors_wrote_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": "How much is 2 £ twice?", "answer": "2*2=4\n#### 4"}]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_args, **_kwargs: rows))
    folder = REPEAT.fetched_questions(tmp_path / "data")
    line = '{"question": "How much is 2 \\u00a3 twice?", "answer": "2*2=4\\n#### 4"}\n'
    assert [(folder / f"gsm8k_{part}.jsonl").read_text() for part in ("train", "test")] == [line, line]


def test_the_digests_of_models_are_those_of_the_first_look() -> None:
    page = (REAL / "first-look.md").read_text()
    for _, _, sha256 in REPEAT.MODELS.values():
        assert sha256[:16] in page


@pytest.mark.parametrize("size", sorted(AGAIN.PAIRS))
def test_second_runs_are_those_of_their_page(size: str) -> None:
    made = AGAIN.section(size, *AGAIN.PAIRS[size])
    assert made in (REAL / "again.md").read_text()
    assert made.count("\n|") == 2 + 4  # four copies
