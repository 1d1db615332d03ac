"""The pages of the pilot on released models, made again from what is committed, and the rule that they apply."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from qerl_bench.studies.design.design import read_design
from qerl_bench.studies.runs.comparable import load_runs
from tests.scripts import ROOT, script

PILOT = ROOT / "studies" / "real-2026" / "pilot"
PAGES = script("studies/real-2026/pilot.py")


@pytest.mark.parametrize("name", PAGES.folders_of("rates"))
def test_pages_come_out_again(name: str) -> None:
    page = PAGES.rates_page(load_runs(PAGES.folders_of("rates")[name]), PILOT / "data" / name / "unfinished.csv")
    assert (PILOT / "results" / name / "rates.md").read_text() == page


def ended(rate: float, quant: str, early: float, late: float) -> Any:
    """A run of 40 steps with 2,560 late completions, and these rewards."""
    options = {"optim.lr": rate, "quant.name": quant, "rollout.prompts_per_step": 32, "rollout.group_size": 8}
    rewards = pd.Series([early] * 30 + [late] * 10, index=range(1, 41))
    shares = pd.DataFrame({0: [0.0, 1.0], 40: [1.0, 1.0]})
    return SimpleNamespace(
        option=lambda key: 40 if key == "steps" else options[key],
        series=lambda _kind, _metric: rewards,
        answers=lambda _mode, _column: shares,
        done={},
    )


@pytest.mark.parametrize(
    ("late", "taken"),
    [
        ({1e-5: 0.50, 2e-5: 0.60, 5e-5: 0.55}, "2e-05."),  # the best
        ({1e-5: 0.50, 2e-5: 0.600, 5e-5: 0.595}, "5e-05."),  # of equal ones the largest
        ({1e-5: 0.50, 2e-5: 0.60, 5e-5: 0.30}, "2e-05."),  # not the one that falls below its beginning
        ({5e-5: 0.55, 1e-4: 0.60}, "0.0001; it is the end of the range, so 0.0002 is run too."),
        ({1e-4: 0.55, 2e-4: 0.60}, "0.0002."),
    ],
)
def test_the_rule_takes_the_largest_of_the_best_rates(late: dict[float, float], taken: str, tmp_path: Path) -> None:
    runs = [ended(rate, quant, 0.4, reward) for rate, reward in late.items() for quant in ("bf16", "nvfp4")]
    assert f"The rule takes {taken}" in PAGES.rates_page(runs, tmp_path / "none")
    half = [*runs, ended(3e-4, "bf16", 0.4, 0.9)]  # a rate counts with both formats
    assert f"The rule takes {taken}" in PAGES.rates_page(half, tmp_path / "none")


@pytest.mark.parametrize("path", sorted(PILOT.glob("*.yaml")), ids=lambda path: path.stem)
def test_designs_use_copies_that_the_study_does_not(path: Path) -> None:
    assert min(read_design(path).bases) > 100
