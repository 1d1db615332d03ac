"""Studies that have the same two arms, pooled: every base counts once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from qerl_core.checks import ConfigError
from tests.scripts import script

POOLED = script("studies/shortcut-2026-doses/pooled.py")
main, row = POOLED.main, POOLED.row
STUDIES = Path(__file__).parents[2] / "studies"
ARMS = ["--arm", "nvfp4-noise", "--control", "nvfp4"]


def test_each_study_and_all(capsys: pytest.CaptureFixture[str]) -> None:
    """The intervals that the pages of these studies print."""
    main([str(STUDIES / "shortcut-2026"), str(STUDIES / "shortcut-2026-again"), *ARMS])
    first, second, both = capsys.readouterr().out.splitlines()
    assert first.startswith("shortcut-2026: +6.6 points, 95 % [+3.1, +10.1], 16 bases")
    assert second.startswith("shortcut-2026-again: +2.0 points, 95 % [-0.3, +4.3], 16 bases, p = 0.083")
    assert both.startswith("all: +4.3 points, 95 % [+2.2, +6.4], 32 bases")
    main([str(STUDIES / "shortcut-2026-again"), *ARMS])
    assert capsys.readouterr().out.splitlines() == [second]


def test_the_interval_is_students_t() -> None:
    """Of 1, 2, 3: standard error 1 / sqrt(3), and 4.303 is the quantile for two degrees of freedom."""
    assert row("x", [1.0, 2.0, 3.0], 0.95).startswith("x: +2.0 points, 95 % [-0.5, +4.5], 3 bases")
    narrower = 2 - 2.920 / math.sqrt(3)
    assert f"90 % [{narrower:+.1f}, {4 - narrower:+.1f}]" in row("x", [1.0, 2.0, 3.0], 0.9)


@pytest.mark.parametrize(
    ("other", "arms", "message"),
    [
        ("worlds-2026", ARMS, "nvfp4-noise is not the same in all studies.*worlds/outliers"),
        ("shortcut-2026", ["--arm", "noise", "--control", "nvfp4"], "no runs of an arm noise: it has bf16, nvfp4"),
        ("shortcut-2026", [*ARMS, "--confidence", "95"], "--confidence must be between 0 and 1, got 95"),
        ("shortcut-2026-again", ARMS, r"have the bases \[16, 17, .*31\], and a base counts once"),
    ],
)
def test_what_cannot_be_pooled_is_refused(other: str, arms: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main([str(STUDIES / "shortcut-2026-again"), str(STUDIES / other), *arms])
