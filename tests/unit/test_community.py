"""The studies in community/ are whole, and the table of their verdicts follows from them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from qerl_core.checks import ConfigError
from qerl_studies.commands import matrix
from qerl_studies.commands.check import check_study, studies_in

ROOT = Path(__file__).parents[2]
COMMUNITY = ROOT / "community"


@pytest.mark.parametrize("study", studies_in(COMMUNITY), ids=lambda path: path.name)
def test_each_study_is_whole_and_listed(study: Path) -> None:
    assert "complete" in check_study(study)
    assert f"[{study.name}]({study.name}/README.md)" in (COMMUNITY / "README.md").read_text()


def test_the_matrix_follows_from_the_studies(tmp_path: Path) -> None:
    results = ROOT / "studies"
    matrix.main([str(COMMUNITY), str(results / "tiny"), str(results / "h200"), "--out", str(tmp_path)])
    assert (tmp_path / "matrix.md").read_text() == (COMMUNITY / "matrix.md").read_text()


def test_studies_of_one_name_are_refused_and_runs_can_be_left_out(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(ROOT / "tests" / "assets" / "runs", tmp_path / name / "runs")
    with pytest.raises(ConfigError, match=r"called runs.*another name"):
        matrix.main([str(tmp_path / "a"), str(tmp_path / "b"), f"out={tmp_path}"])
    with pytest.raises(ConfigError, match=r"except x.*none of the 8 runs"):
        matrix.main([str(tmp_path / "a"), f"out={tmp_path}", "except=x"])


def test_a_folder_without_studies_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="publish"):
        studies_in(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match=r"settings\.json.*missing"):
        check_study(studies_in(tmp_path)[0])
