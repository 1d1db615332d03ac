"""The pages of the first look at released models, made again from what is committed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from qerl_bench.conduct.archive import ANSWERS
from qerl_core.checks import ConfigError
from qerl_studies.claims.primary import effect_on
from qerl_studies.design.design import read_design
from qerl_studies.design.sessions import Sessions, read_probes, read_study
from qerl_studies.report.probe_page import markdown
from qerl_studies.report.sessions import read_once
from tests.scripts import ROOT, script

STUDY = ROOT / "studies" / "real-2026"
LOOK = STUDY / "first-look"
SESSIONS = sorted(path.name for path in (LOOK / "data").iterdir())


@pytest.mark.parametrize("name", SESSIONS)
def test_pages_come_out_again(name: str) -> None:
    data, results = LOOK / "data" / name, LOOK / "results" / name
    probes, pages = read_probes(data), script("studies/real-2026/first_look.py").pages_of(data)
    assert pages and {path.name: path.read_text() for path in results.glob("*.md")} == pages
    assert pages.get("probes.md") == markdown(probes)


@pytest.mark.parametrize("name", [name for name in SESSIONS if (LOOK / "data" / name / ANSWERS).is_file()])
def test_answers_are_those_that_probes_count(name: str) -> None:
    rows: Any = pd.read_parquet(LOOK / "data" / name / ANSWERS)
    right = rows.groupby(["base", "quant", "temperature"])[["correct", "lenient"]].sum()
    for probe in read_probes(LOOK / "data" / name):
        for quant, found in probe["formats"].items():
            for at, counted in found["temperatures"].items():
                each = right.loc[probe["base"], quant, float(at)]
                assert [each["correct"], each["lenient"]] == [sum(counted["correct"]), sum(counted["lenient"])]


def test_effects_of_the_page_are_those_of_its_tables() -> None:
    page = (STUDY / "README.md").read_text().partition("## Before training")[2]
    tables = "".join(path.read_text() for path in STUDY.glob("*/results/*/*.md"))
    effects = re.findall(r"[x+-]?\d+\.\d+ \[[^\]]+\]", page)
    assert len(effects) > 40 and [one for one in effects if one not in tables] == []
    assert [one for one in re.findall(r"x1\.\d{3}", page) if one not in tables] == []


def effect(each: Any) -> tuple[float, ...]:
    """Mean and 95 % interval over copies."""
    return tuple(map(float, (np.mean(each), *stats.t.interval(0.95, len(each) - 1, np.mean(each), stats.sem(each)))))


def of_single_copies() -> set[tuple[float, ...]]:
    """What the page says of some copies or steps alone: contrasts in points, differences of rewards."""
    chosen = {"05b": [(9, 10, 11, 12)], "15b": [(1, 2, 3, 4, 5, 6, 8, 10, 11, 12), (8, 10, 11, 12)]}
    return set().union(*(of_copies(read_once(STUDY / size), copies) for size, copies in chosen.items()))


def of_copies(study: Sessions, chosen: Sequence[Sequence[int]]) -> set[tuple[float, ...]]:
    primary = study.design.primary
    assert primary is not None
    found = {
        effect(100 * effect_on(study, primary, contrast, copies).by_unit)
        for copies in chosen
        for contrast in primary.contrasts
    }
    reward = {
        arm: pd.DataFrame({base: study.runs[arm, base, 0].series("train", "reward/mean") for base in range(1, 13)})
        for arm in primary.arms
    }
    noise, form = (reward[treated] - reward[control] for treated, control in primary.contrasts.values())
    return found | {effect(noise.loc[5:8].mean()), effect(form.loc[33:40].mean() - form.loc[1:8].mean())}


def test_effects_of_the_look_are_those_of_its_pages_rounded() -> None:
    """Where the page says "3.0 points less [1.4, 4.7]", or per cent of a ratio, its pages have the number itself."""
    looked = (STUDY / "README.md").read_text().partition("## Before training")[0]
    beside = (*STUDY.glob("*/questions.md"), STUDY / "again.md")
    pages = "".join(path.read_text() for path in (*STUDY.glob("*/results/*.md"), *beside))
    number = r"[×x+]?(-?\d+(?:\.\d+)?(?:e-\d+)?)"
    measured = re.findall(rf"{number} \|? ?\[{number}, {number}\]", pages)
    ways = (lambda x: x, lambda x: -x, lambda x: 100 * x, lambda x: 100 * (x - 1), lambda x: 100 * (1 - x))
    found = {tuple(way(float(x)) for x in one) for one in measured for way in ways}
    found |= {(mean, high, low) for mean, low, high in found}
    found |= of_single_copies()
    found |= {tuple(-x for x in (mean, high, low)) for mean, low, high in found}
    said = re.findall(rf"{number}(?: points| %)?(?: less[a-z ]*| lower)? \[{number}, {number}\]", looked)
    assert len(said) > 10
    ends = np.array([*found])
    for one in said:
        half = 0.501 * 10.0 ** -max(len(x.partition(".")[2]) for x in one)  # of the last digit that the page has
        assert (np.abs(ends - [float(x) for x in one]) <= half).all(axis=1).any(), one


def test_the_page_of_questions_comes_out_again() -> None:
    pages = script("studies/real-2026/questions.py").pages()
    assert pages and {path: path.read_text() for path in STUDY.glob("*/questions.md")} == pages


def test_questions_are_taken_from_what_runs_of_the_session_answered(tmp_path: Path) -> None:
    script_of = script("studies/real-2026/questions.py")
    runs = read_study(STUDY / "05b").runs
    ((copy, run),) = [(copy, run) for (arm, copy, _), run in runs.items() if (arm, copy) == ("nvfp4-noise", 9)]
    record = {"step": 40, "value": 0.123456, "stderr": None, "truncated": 0.5, "n": 256}
    for place, metrics in ((run.path.name, ("eval/pass_at_k", "eval/gain_sampled")), ("stranger", ())):
        (file := tmp_path / place / "t1" / "eval.json").parent.mkdir(parents=True)
        file.write_text(json.dumps([record | {"metric": metric} for metric in metrics]))
    with pytest.raises(ConfigError, match="is of no run of"):
        script_of.asked_of(tmp_path, run.path.parent)
    (tmp_path / "stranger" / "t1" / "eval.json").unlink()
    (row,) = script_of.asked_of(tmp_path, run.path.parent).to_numpy().tolist()
    assert row == [copy, "nvfp4-noise", "t1", 40, "pass_at_k", "0.1235", "", "0.5", 256]


@pytest.mark.parametrize("path", sorted(LOOK.glob("*.yaml")), ids=lambda path: path.stem)
def test_designs_can_be_read(path: Path) -> None:
    design = read_design(path)
    assert len(design.units) in (2, 4, 12, 16) and "bf16" in design.formats
