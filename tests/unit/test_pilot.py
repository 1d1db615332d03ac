"""The pages of the pilot on released models, made again from what is committed, and the rule that they apply."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from qerl_studies.design.design import read_design
from tests.scripts import ROOT, script

PILOT = ROOT / "studies" / "real-2026" / "pilot"
PAGES = script("studies/real-2026/pilot.py")


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in PAGES.PAGES for name in PAGES.folders_of(kind)])
def test_pages_come_out_again(kind: str, name: str) -> None:
    assert (PILOT / "results" / name / f"{kind}.md").read_text() == PAGES.PAGES[kind](name)


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
        ({2e-5: 0.600, 5e-5: 0.595, 1e-4: 0.50}, "5e-05."),  # of equal ones the largest
        ({1e-5: 0.50, 2e-5: 0.60, 5e-5: 0.30}, "2e-05."),  # not the one that falls below its beginning
        ({5e-5: 0.55, 1e-4: 0.60}, "0.0001; it is the end of the range, so 0.0002 is run too."),
        ({1e-4: 0.55, 2e-4: 0.60}, "0.0002; it is the end of the range, so 0.0004 is run too."),
    ],
)
def test_the_rule_takes_the_largest_of_the_best_rates(late: dict[float, float], taken: str, tmp_path: Path) -> None:
    runs = [ended(rate, quant, 0.4, reward) for rate, reward in late.items() for quant in ("bf16", "nvfp4")]
    assert f"The rule takes {taken}" in PAGES.rates_page(runs, tmp_path / "none")
    half = [*runs, ended(9e-4, "bf16", 0.4, 0.9)]  # a rate counts with both formats
    assert f"The rule takes {taken}" in PAGES.rates_page(half, tmp_path / "none")


@pytest.mark.parametrize(
    ("late", "taken"),
    [
        ({1e-6: 0.40, 3e-6: 0.45, 1e-5: 0.60, 3e-5: 0.50, 1e-4: 0.70}, "1e-05."),  # the spare rate does not count
        ({1e-5: 0.50, 3e-5: 0.60, 1e-4: 0.55}, "3e-05."),
        ({1e-5: 0.50, 3e-5: 0.60, 1e-4: 0.65}, "0.0001; it is the end of the range."),
        ({1e-5: 0.50, 3e-5: 0.60}, "3e-05; it is the end of the range, so 0.0001 is run too."),
    ],
)
def test_full_training_takes_the_last_rate_only_after_the_one_before(
    late: dict[float, float], taken: str, tmp_path: Path
) -> None:
    runs = [ended(rate, "bf16", 0.4, reward) for rate, reward in late.items()]
    assert f"The rule takes {taken}" in PAGES.rates_page(runs, tmp_path / "none", PAGES.SPARE)


def controlled(arm: str, late: float) -> Any:
    """A run of copy 1 in which half of two questions is right before, at half time as many as late."""
    options = {
        "quant.name": arm.partition("-")[0],
        "rollout.temperature": 1.2 if "hot" in arm else 1.0,
        "rollout.group_size": 16 if "group" in arm else 8,
        "reward.name": "random" if "random" in arm else "task",
        "model.dither": 1,
        "optim.lr": 1e-4,
        "steps": 40,
    }
    right = pd.DataFrame({0: [0.0, 1.0], **{step: [late, late] for step in (20, 32, 36, 40)}})
    columns = {"lenient": right, "finished": right * 0 + 1, "tokens": right * 0 + 300}
    return SimpleNamespace(
        option=lambda key: options[key],
        answers=lambda _mode, column: columns[column],
        name=arm,
    )


def test_controls_are_read_by_the_rules() -> None:
    late = {"bf16": 0.75, "bf16-hot": 0.761, "bf16-group16": 0.759, "bf16-random": 0.55}
    page = PAGES.controls_page([controlled(arm, value) for arm, value in late.items()])
    assert page.splitlines()[-1] == "| 1 | +25.0 | +0.0 | 0.20 | +1.1: pays | +0.9: does not |"
    assert PAGES.controls_page([controlled("bf16", 0.75)]).splitlines()[-1] == "| 1 | +25.0 | +0.0 | - | - | - |"


@pytest.mark.parametrize("path", sorted(PILOT.glob("*.yaml")), ids=lambda path: path.stem)
def test_designs_use_copies_that_the_study_does_not(path: Path) -> None:
    assert min(read_design(path).bases) > 100
