"""The numbers beside the verdicts of kv-2026 follow from its data, and are those that its page shows."""

from __future__ import annotations

import math
import re

import pytest

from qerl_core.statistics import Estimate
from qerl_studies.commands.check import check_study
from tests.scripts import ROOT, script

STUDY = ROOT / "studies" / "kv-2026"
BESIDE = script("studies/kv-2026/beside.py")
NUMBER = r"[-+]?\d+\.\d+"
INTERVAL = re.compile(rf"({NUMBER}) \[({NUMBER}), ({NUMBER})\]")


def test_the_page_beside_is_made_from_the_data() -> None:
    assert BESIDE.page(STUDY) == (STUDY / "results" / "beside.md").read_text()


def test_every_interval_of_the_page_is_a_result() -> None:
    """Of its own sign, or of the other where words say it."""
    results = "".join((STUDY / "results" / name).read_text() for name in ("beside.md", "rounded.md")).replace("×", "x")
    found = {tuple(map(float, one)) for one in INTERVAL.findall(results.replace("[x", "[").replace(", x", ", "))}
    shown = [tuple(map(float, one)) for one in INTERVAL.findall((STUDY / "README.md").read_text())]
    rounded = {tuple(round(number, digits) for number in one) for one in found for digits in (1, 3)}
    assert len(shown) > 20 and [one for one in shown if one not in rounded] == []


def test_arms_are_complete_on_six_bases() -> None:
    arms = BESIDE.by_arm(STUDY)
    five = ("bf16", "kv8-truncated", "kv4", "kv4-truncated", "mxfp8")
    assert {*five} <= {*arms} and all(sorted(arms[arm]) == [13, 14, 15, 16, 17, 18] for arm in five)


def test_its_first_claim_is_the_one_that_was_registered_before_the_runs() -> None:
    told = check_study(STUDY)
    assert "6 of 6 units, look at 6 reached" in told and told.endswith("30 runs in data/, not published")


@pytest.mark.parametrize(("scale", "text"), [(100.0, "+1.0 [-"), (None, "x1.0 [")])
def test_ratios_are_factors_and_differences_have_signs(scale: float | None, text: str) -> None:
    estimate = Estimate(math.log(1.01) if scale is None else 0.01, 0.02, 4, 3)
    assert BESIDE.shown(estimate, scale, 1).startswith(text)
