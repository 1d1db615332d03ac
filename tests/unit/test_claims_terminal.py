"""On a terminal `claims` shows those that the runs touch, and says how many others there are; files have all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from qerl_studies.claims.claim import ClaimResult
from qerl_studies.commands.claims import is_touched, main

RUNS = Path(__file__).parents[1] / "assets" / "runs"  # of 12 steps on a CPU, of BF16 and NVFP4 with noise and without
TINY = Path(__file__).parents[2] / "studies" / "tiny"  # of 100 steps, where RUNS are too short to be judged
TOUCHED, OTHERS = ("1. 4-bit", "4. AQN", "12. Less memory"), ("5. Exponential", "9. The reverse", "13. NVFP4 with LoRA")


@pytest.mark.parametrize("everything", [False, True])
def test_claims_without_runs_are_folded(everything: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(RUNS), "--out", str(tmp_path), *(["--all"] if everything else [])])
    shown = capsys.readouterr().out
    assert all(f"| {claim}" in shown for claim in TOUCHED)
    assert [f"| {claim}" in shown for claim in OTHERS] == [everything] * len(OTHERS)
    assert ("7 of 13 claims" in shown and "--all" in shown) != everything
    assert all(claim in (tmp_path / "claims.md").read_text() for claim in (*TOUCHED, *OTHERS))


def test_columns_are_explained_where_an_effect_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for runs, explained in ((TINY, True), (RUNS, False)):
        main([str(runs), "--out", str(tmp_path)])
        shown = capsys.readouterr().out.splitlines()
        assert any(line.startswith("detectable: ") for line in shown) == explained
        assert ("words of verdicts: the first lines of claims.md, or docs/claims.md#verdicts" in shown) == explained


def test_files_that_are_not_written_are_not_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(TINY), "--out", str(tmp_path), "--papers", "literature"])
    assert "words of verdicts: docs/claims.md#verdicts" in capsys.readouterr().out.splitlines()
    assert not (tmp_path / "claims.md").exists()


@pytest.mark.parametrize(
    ("reason", "touched"),
    [
        ("no runs", False),
        ("no runs; no runs", False),
        ("no runs of nvfp4; no runs", False),
        ("no runs in the primary setting, which lacks bf16 with lora.rank=32 (there: 16); no runs", True),
        ("", True),
    ],
)
def test_a_claim_of_which_runs_are_in_another_setting_is_touched(reason: str, touched: bool) -> None:
    assert is_touched(cast(ClaimResult, SimpleNamespace(voting=[], reason=reason))) == touched


def test_runs_without_a_pair_touch_no_claim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = [str(path) for path in sorted(RUNS.iterdir()) if "bf16-none" in path.name]
    main([*alone, "--out", str(tmp_path)])
    assert "0 of 13 claims" in capsys.readouterr().out
