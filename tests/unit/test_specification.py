"""Specification curves: their numbers against an independent recomputation, and the page that quotes them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes

from qerl_core.checks import ConfigError
from qerl_core.statistics import Estimate
from qerl_studies.claims.evaluate import evaluate_claims
from qerl_studies.claims.registry import QERL, claims_of
from qerl_studies.claims.specification import Specification, specifications
from qerl_studies.figures.specification import specification_curve, specification_table
from qerl_studies.runs.measure import gained, late_mean
from tests.scripts import script

planted_runs = script("studies/planting/planting.py").planted_runs
ROOT = Path(__file__).parents[2]
CLAIMS = claims_of(QERL)
STUDIES = ROOT / "studies"
NVFP4, NOISE, PLAIN = "Higher final accuracy than 16-bit LoRA", "AQN adds to it", "Noise helps without quantization"
# (study, claim, specification): bases, effect, low, high, from a review that computed them with code of its own
REVIEWED = {
    ("worlds-2026", NVFP4, "sampled, end, pooled"): (60, -1.14, -1.46, -0.83),
    ("worlds-2026", NVFP4, "greedy, end, pooled"): (60, -0.41, -0.92, 0.11),
    ("worlds-2026", NVFP4, "sampled, end"): (16, -1.29, -1.70, -0.88),
    ("worlds-2026", NOISE, "sampled, end"): (16, -1.18, -1.67, -0.70),
    ("worlds-2026", NOISE, "sampled, end, pooled"): (44, -1.77, -2.27, -1.27),
    ("worlds-2026", NOISE, "greedy, end, pooled"): (44, -1.69, -2.47, -0.92),
    ("literature-2026", PLAIN, "sampled, end, pooled"): (28, -2.36, -3.10, -1.62),
    ("literature-2026", PLAIN, "greedy, end, pooled"): (28, -1.87, -3.01, -0.73),
    ("worlds-2026-25m", NVFP4, "sampled, end"): (12, -1.03, -2.06, -0.01),
    ("worlds-2026-25m", NOISE, "sampled, end"): (12, -3.36, -4.49, -2.24),
    ("shortcut-2026-doses", NOISE, "sampled, end"): (16, 6.69, 2.61, 10.78),
    ("shortcut-2026-doses", NOISE, "greedy, end"): (16, 4.1, -1.7, 9.8),
    ("shortcut-2026", NVFP4, "sampled, end, pooled"): (32, 1.5, 0.3, 2.7),
    ("shortcut-2026", NOISE, "sampled, end, pooled"): (48, 5.1, 3.2, 7.0),
}


def curve(study: str) -> pd.DataFrame:
    return pd.read_csv(STUDIES / study / "results" / "specification.csv")


@pytest.mark.parametrize("key", REVIEWED, ids=" ".join)
def test_committed_curves_are_what_others_computed(key: tuple[str, str, str]) -> None:
    study, claim, specification = key
    rows = curve(study)
    (row,) = rows[(rows["claim"] == claim) & (rows["specification"] == specification)].to_dict("records")
    bases, *numbers = REVIEWED[key]
    assert row["units"] == bases
    assert [row[name] for name in ("effect", "low", "high")] == pytest.approx(
        numbers, abs=0.051 if bases == 32 else 0.05
    )


def runs_of(study: str) -> tuple[list[Any], list[Any]]:
    runs = planted_runs(2.0, 6, 1, np.random.default_rng(len(study)))
    return evaluate_claims(CLAIMS, runs), runs


def test_a_pool_has_every_base_once_and_leaves_out_where_a_gate_failed() -> None:
    here, there = runs_of("one"), runs_of("another")
    found = {one.label: one for one in specifications(*here, [there]) if one.claim == NVFP4}
    assert {"sampled, end, other questions", "sampled, end", "sampled, end, pooled"} == {*found}  # no start, not greedy
    assert [one.decides for one in found.values()] == [True, False, False]
    whole, alone, pooled = (one.estimate for one in found.values())
    assert (alone.n, pooled.n) == (6, 12) and whole.value == pytest.approx(alone.value)
    own = {one.label: one for one in specifications(*there, []) if one.claim == NVFP4}["sampled, end"].estimate
    assert pooled.value == pytest.approx((alone.value + own.value) / 2)
    stuck = [replace(run, metrics=run.metrics.copy()) for run in there[1]]
    for run in stuck:
        rows = run.metrics["metric"] == "accuracy"
        run.metrics.loc[rows, "value"] = 0.3
    failed = (evaluate_claims(CLAIMS, stuck), stuck)
    assert "sampled, end, pooled" not in {one.label for one in specifications(*here, [failed]) if one.claim == NVFP4}


def marks_of(ax: Axes) -> list[str]:
    return [marker for line in ax.lines if (marker := str(line.get_marker())) in "oD"]


def words_of(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_the_figure_draws_every_row_of_the_table_with_its_number_of_bases_and_the_verdict() -> None:
    ways = specifications(*runs_of("one"), [runs_of("another")])
    table = specification_table(ways)
    assert len(table) == len(ways) and {"points", "reward"} == {*table["unit"]}
    panels = [ax for ax in specification_curve(ways).axes if ax.get_visible()]
    marks = [mark for ax in panels for mark in marks_of(ax)]
    assert len(marks) == len(ways)
    assert sum(mark == "D" for mark in marks) == table["decides"].sum() > 0
    numbers = sorted(int(word) for ax in panels for word in words_of(ax) if word.isdigit())
    assert numbers == sorted(table["units"]) and {*numbers} == {6, 12}
    verdict = next(one.verdict for one in ways if one.claim == NVFP4)
    titles = [" ".join(reversed(words_of(ax))) for ax in panels]
    assert sum(title.startswith(f"{NVFP4}: nvfp4 - bf16 {verdict} ") for title in titles) == 1


def specification(claim: str, effect: float, contrast: str = "a - b", bases: int = 16, **others: Any) -> Specification:
    measure = next(one.measure for one in CLAIMS if one.title == NVFP4)
    estimate = Estimate(effect, 0.001, bases, bases - 1)
    whole = Specification(claim, "harms", contrast, measure, "sampled, end", False, False, estimate, True)
    return replace(whole, **others)


def panels_of(*ways: Specification) -> list[Axes]:
    return [ax for ax in specification_curve(ways).axes if ax.get_visible()]


def test_claims_about_one_effect_or_its_opposite_share_a_panel() -> None:
    same, opposite = specification("Same", 0.01), specification("Opposite", -0.01, "b - a", verdict="supported")
    (panel,) = panels_of(specification("First", 0.01), same, opposite)
    said = " ".join(reversed(words_of(panel)))
    assert marks_of(panel) == ["D"]
    assert "First: a - b harms Same: a - b harms Opposite: b - a (effects turned round) supported" in said
    assert len(panels_of(specification("First", 0.01), specification("Other", 0.011))) == 2


def test_panels_side_by_side_share_a_scale_unless_one_reaches_much_further() -> None:
    first, second, far = panels_of(*(specification(str(effect), effect) for effect in (0.02, 0.05, -0.4)))
    assert first.get_xlim() == second.get_xlim() != far.get_xlim()
    assert second.get_xlim()[1] > 5 and far.get_xlim()[0] < -40


def test_committed_curves_mark_greedy_answers_too_and_no_gain_from_a_shared_start() -> None:
    for path in STUDIES.glob("*/results/specification.csv"):
        rows = pd.read_csv(path).to_dict("records")
        decides = [row for row in rows if row["decides"]]
        sampled, greedy = (
            {(row["claim"], row["contrast"]) for row in decides if row["specification"].startswith(mode)}
            for mode in ("sampled", "greedy")
        )
        assert sampled == greedy
        assert not any("gain" in row["specification"] for row in decides)
        assert not any("gain" in row["specification"] for row in rows if row["claim"] in (NOISE, PLAIN))
    assert "greedy, gain" in {*curve("worlds-2026")["specification"]}


def test_gains_and_late_means_are_only_of_runs_that_were_asked_often_enough() -> None:
    def run(*steps: int) -> Any:
        answers = pd.DataFrame({step: [0.1 * place, 0.2 * place] for place, step in enumerate(steps)}, index=["a", "b"])
        return SimpleNamespace(name="x", option=lambda _: 64, answers=lambda *_: answers)

    often = run(0, 24, 48, 56, 64)
    assert gained("greedy")(often).tolist() == pytest.approx([0.4, 0.8])
    assert late_mean("greedy")(often).tolist() == pytest.approx([0.35, 0.7])  # of 56 and 64: 48 is three quarters
    with pytest.raises(ConfigError, match="1 times in the last quarter"):
        late_mean("greedy")(run(0, 64))
    with pytest.raises(ConfigError, match="before its first"):
        gained("greedy")(run(32, 64))


# --- the page of changed verdicts ------------------------------------------------------------------------------------

PAGE = STUDIES / "verdicts.md"


def test_the_page_of_changed_verdicts_has_the_words_of_the_reports() -> None:
    rows = re.findall(r"^\| \[([\w-]+)\]\((\S+)\) \| (.*?) \| (.*?) \| (.*?) \| (.*) \|$", PAGE.read_text(), re.M)
    assert len(rows) == 16
    for _, report, claim, before, now, _ in rows:
        text = (STUDIES / report).read_text()
        said = f"### {claim}: {now}\n" if report.endswith("claims.md") else f"| {claim} | "
        assert said in text and before != now
        if report.endswith("literature.md"):
            (line,) = (line for line in text.splitlines() if f"| {claim} |" in line)
            assert f"| **{now}**" in line


def test_every_number_of_that_page_is_in_a_report() -> None:
    reports = "".join(
        file.read_text() for file in (*STUDIES.glob("*/results/claims.md"), *STUDIES.glob("*/results/literature.md"))
    ).replace("×", "")
    changed, pooled = PAGE.read_text().split("## Pooled over studies")
    intervals = re.findall(r"[-+]?\d+\.\d+ \[[-+\d., ]+\]", changed)
    assert len(intervals) > 30 and all(interval in reports for interval in intervals)
    tables = pd.concat([curve(path.parent.parent.name) for path in STUDIES.glob("*/results/specification.csv")])
    numbers = [tables[name] for name in ("effect", "low", "high")]
    shown = {f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]" for mean, low, high in zip(*numbers, strict=True)}
    cells = re.findall(r"[-+]\d+\.\d\d \[[-+\d., ]+\]", pooled)
    assert len(cells) == 15 and {*cells} <= shown
