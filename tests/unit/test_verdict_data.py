"""Verdicts as data, of a study that somebody else published in a folder of their own."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from qerl_core.checks import ConfigError
from qerl_studies.claims.evaluate import evaluate_claims
from qerl_studies.claims.registry import QERL, claims_of
from qerl_studies.commands.verdicts import main as report
from qerl_studies.design.protocol import protocol_commit
from qerl_studies.effects.state import State
from qerl_studies.figures.forest import SHADES
from qerl_studies.figures.verdicts import all_verdicts, in_margins
from qerl_studies.report.verdicts import dose_of, studies_in, verdicts_of
from qerl_studies.runs.comparable import load_runs

RUNS = Path(__file__).parents[2] / "studies" / "tiny" / "data"


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one study, and a pilot in the data of another, which decides nothing."""
    folder = tmp_path_factory.mktemp("others")
    for place in ("mine", "other/data/pilot"):
        shutil.copytree(RUNS, folder / place)
    return folder


@pytest.fixture(scope="module")
def written(others: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("out")
    report([str(others), f"out={out}"])
    assert (out / "verdicts.svg").is_file()
    return (out / "claims.json").read_text()


@pytest.fixture
def content(written: str) -> dict[str, Any]:
    return json.loads(written)


def test_a_record_says_what_the_claim_says(content: dict[str, Any]) -> None:
    assert [*content["studies"]] == ["mine"]
    study = content["studies"]["mine"]
    assert study["runs"] == 312 and study["released"] is False and study["protocol_commit"] is None
    results = evaluate_claims(claims_of(QERL), load_runs([RUNS]))
    expected = {
        (one.claim.title, contrast.contrast.label): (one, contrast)
        for one in results
        for contrast in one.voting
        if contrast.effect
    }
    records = {(one["claim"], one["contrast"]): one for one in content["verdicts"] if one["paper"] == "QeRL"}
    assert records.keys() == expected.keys() and len(records) > 2
    for key, (one, contrast) in expected.items():
        record, measure = records[key], one.claim.measure
        assert contrast.effect is not None
        whole = contrast.effect.whole
        assert record["verdict"] == one.verdict and record["units"]["n"] == whole.n
        assert record["unit"] == ("ratio" if measure.ratio else measure.unit)
        for name, value in (("effect", whole.value), ("low", whole.low), ("high", whole.high)):
            shown = math.exp(value) if measure.ratio else measure.scale * value
            assert record[name] == pytest.approx(shown, rel=1e-5)
        sign = -1 if one.claim.expected == "less" else 1
        assert in_margins(record, record["effect"]) == pytest.approx(sign * whole.value / measure.margin, rel=1e-3)


def test_a_study_with_primary_contrasts_has_records_of_its_last_look_alone() -> None:
    real = Path(__file__).parents[2] / "studies" / "real-2026"
    content = verdicts_of({name: real / name for name in ("05b", "15b")})
    assert [*content["studies"]] == ["05b", "15b"] and len(content["verdicts"]) == 4
    for record in content["verdicts"]:
        page = (
            (real / record["study"] / "results/primary.md")
            .read_text()
            .partition("## 12 bases")[2]
            .partition("## All")[0]
        )
        (row,) = (line for line in page.splitlines() if f": {record['contrast']} |" in line)
        assert f"| {record['effect']:+.2f} | [{record['low']:+.2f}, {record['high']:+.2f}] |" in row
        told = "; ".join(filter(None, (record["word"], record["reason"])))
        assert row.endswith(f"| {record['verdict']} | {told} |") and record["paper"] is None
        assert fmean(base["effect"] for base in record["bases"]) == pytest.approx(record["effect"], rel=1e-4)
        assert all(f"{arm['label']} {arm['level']:.4g}" in page for arm in record["arms"])


def test_arms_have_what_differs_and_the_dose_of_their_noise(content: dict[str, Any]) -> None:
    noise = next(one for one in content["verdicts"] if one["contrast"] == "exp - none" and one["paper"] == "QeRL")
    treated, control = noise["arms"]
    assert (treated["options"]["aqn.name"], control["options"]["aqn.name"]) == ("exp", "none")
    assert treated["dose"] == {"sigma": None, "entropy": None} and control["dose"] is None  # not kept in this study
    runs = load_runs([Path(__file__).parents[1] / "assets" / "runs"])
    noisy = [run for run in runs if run.option("aqn.name") == "exp"]
    largest = fmean(float(run.series("train", "aqn/sigma").max()) for run in noisy)
    assert largest > 0 and dose_of(noisy) == {"sigma": pytest.approx(largest, rel=1e-5), "entropy": None}


def test_released_models_have_a_panel_of_their_own_above(content: dict[str, Any]) -> None:

    def rows() -> list[int]:
        return [len(ax.get_yticks()) for ax in all_verdicts(content).axes]

    made_here = rows()
    assert made_here == [0, len(content["verdicts"]) + 1]
    content["studies"]["mine"]["released"] = True
    assert rows() == made_here[::-1]


@pytest.mark.parametrize(
    ("state", "shade"),
    [
        (State(1), "supported"), (State(-1), "opposite"), (State(1, within=True), "supported"),
        (State(within=True), "within"), (State(), "open"), (State(untested="incomplete"), "open"),
    ],
)  # fmt: skip
def test_verdicts_have_the_color_of_their_state_whatever_their_words(
    state: State, shade: str, content: dict[str, Any]
) -> None:
    for one in content["verdicts"]:
        one |= {"state": {"direction": state.direction, "within": state.within, "untested": state.untested}}
        one["verdict"] = "supported, or what a protocol calls it"
    texts = [text for ax in all_verdicts(content).axes for text in ax.texts if text.get_text().startswith("supported")]
    assert {text.get_color() for text in texts} == {SHADES[shade]} and state.kind == shade


def test_a_record_says_what_its_verdict_is_about() -> None:
    real = Path(__file__).parents[2] / "studies" / "real-2026"
    (full,) = verdicts_of({"05b-more": real / "05b-more"})["verdicts"]
    assert full["answers_to"] == ["NVFP4 with LoRA matches full-parameter training"]
    assert full["look"] == {"bases": 4, "level": 0.05, "planned": [4]}
    assert full["setting"] == {
        "lr": [2e-4, 3e-6], "steps": 40, "quantizer": "rtn", "temperature": 0.6, "top_p": 0.95
    }  # fmt: skip


def test_folders_without_a_study_and_studies_of_one_name_are_refused(others: Path, tmp_path: Path) -> None:
    assert studies_in([others, others / "mine"]) == {"mine": others / "mine"}  # one study, given twice
    with pytest.raises(ConfigError, match=r"no study in .*qerl-bench collect"):
        studies_in([others / "other"])
    shutil.copytree(RUNS, tmp_path / "again" / "mine")
    with pytest.raises(ConfigError, match=r"called mine.*other names"):
        studies_in([others / "mine", tmp_path / "again"])


def test_without_a_protocol_or_git_there_is_no_commit(tmp_path: Path) -> None:
    assert protocol_commit(tmp_path, None) is None
    (tmp_path / "protocol.md").write_text("# What we expect\n")
    assert protocol_commit(tmp_path, 0.0) is None


def test_a_study_whose_own_page_judges_it_is_left_out_and_named(
    others: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(others / "mine", tmp_path / "mine")
    page, paged = tmp_path / "paged", {"mine": folder, "paged": tmp_path / "paged"}
    shutil.copytree(folder, page)
    assert [*verdicts_of(paged)["studies"]] == ["mine", "paged"]
    (page / "study.yaml").write_text("judged_by: page\n")
    assert [*verdicts_of(paged)["studies"]] == ["mine"]
    assert "paged has no verdict: its own page judges it" in capsys.readouterr().err
