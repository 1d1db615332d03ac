"""The pages of the first look at released models, made again from what is committed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from qerl_bench.studies.conduct.packing import ANSWERS
from qerl_bench.studies.design.design import read_design
from qerl_bench.studies.design.sessions import read_probes
from qerl_bench.studies.report.probe_page import markdown
from tests.scripts import ROOT, script

STUDY = ROOT / "studies" / "real-2026"
LOOK = STUDY / "first-look"
SESSIONS = sorted(path.name for path in (LOOK / "data").iterdir())


@pytest.mark.parametrize("name", SESSIONS)
def test_pages_come_out_again(name: str) -> None:
    data, results = LOOK / "data" / name, LOOK / "results" / name
    probes = read_probes(data)
    assert markdown(probes) == (results / "probes.md").read_text()
    page = script("studies/real-2026/first_look.py").answers_page(pd.read_parquet(data / ANSWERS), probes)
    assert page == (results / "answers.md").read_text()


@pytest.mark.parametrize("name", SESSIONS)
def test_answers_are_those_that_probes_count(name: str) -> None:
    rows: Any = pd.read_parquet(LOOK / "data" / name / ANSWERS)
    right = rows.groupby(["base", "quant", "temperature"])[["correct", "lenient"]].sum()
    for probe in read_probes(LOOK / "data" / name):
        for quant, found in probe["formats"].items():
            for at, counted in found["temperatures"].items():
                each = right.loc[probe["base"], quant, float(at)]
                assert [each["correct"], each["lenient"]] == [sum(counted["correct"]), sum(counted["lenient"])]


def test_effects_of_the_page_are_those_of_its_tables() -> None:
    table, _, rest = (STUDY / "README.md").read_text().split("# Released", 1)[1].partition("![")
    tables = "".join(path.read_text() for path in LOOK.glob("results/*/*.md"))
    effects = re.findall(r"[x+-]?\d+\.\d+ \[[^\]]+\]", table)
    assert len(effects) == 18 and [one for one in effects if one not in tables] == []
    assert [one for one in re.findall(r"x1\.\d{3}", rest) if one not in tables] == []


@pytest.mark.parametrize("path", sorted(LOOK.glob("*.yaml")), ids=lambda path: path.stem)
def test_designs_can_be_read(path: Path) -> None:
    design = read_design(path)
    assert len(design.units) in (2, 4, 12, 16) and "bf16" in design.formats
