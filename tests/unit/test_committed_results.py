"""What is published follows from what is committed: claims pages are made again, letter for letter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from qerl_bench.claims.measure import TRAINED_SHARE
from qerl_bench.gates.report import texts
from qerl_bench.gates.sessions import read_study
from qerl_bench.study.load import load_runs

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
STUDIES = sorted(path.parent for path in RESULTS.glob("*/settings.json"))


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_claims_pages_are_recomputed(study: Path, tmp_path: Path, analysis_script: Any) -> None:
    analysis_script("claims").main([str(study), "--out", str(tmp_path)])
    assert (tmp_path / "claims.md").read_text() == (study / "claims.md").read_text()


@pytest.mark.parametrize("study", [path.parent for path in (ROOT / "docs" / "studies").glob("*/results")])
def test_reports_of_studies_are_recomputed(study: Path) -> None:
    made = texts(read_study(study))
    for name in ("gates.md", "claims.md", "literature.md", "bases.md"):
        assert made[name] == (study / "results" / name).read_text(), name


def test_published_speeds_are_of_steps_that_trained() -> None:
    speeds = [run for study in STUDIES for run in load_runs([study]) if run.environment.get("device") == "cuda"]
    assert len(speeds) >= 9
    for run in speeds:
        assert run.series("train", TRAINED_SHARE).min() > 0.9, run.name


def test_the_decoding_table_of_the_kernels_page_is_the_committed_one() -> None:
    table = pd.read_csv(ROOT / "kernels" / "results" / "h200_decoding.csv").set_index(["batch", "format"])
    page = (ROOT / "kernels" / "README.md").read_text()
    for batch, both in table["decode_tok_s"].unstack().iterrows():
        assert f"| {batch} | {both['nvfp4']:,.0f} | {both['bf16']:,.0f} |" in page
        assert f"{both['nvfp4'] / both['bf16']:.2f}" in page
