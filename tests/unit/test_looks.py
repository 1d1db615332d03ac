"""Before a look at primary contrasts no command shows a number of an arm, and after it none of a later base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from qerl_bench.commands import gates, study
from qerl_bench.conduct import runner
from qerl_core.checks import ConfigError
from qerl_studies.commands import claims, collect, compare, figure, matrix, plan, publish, report, verdicts
from qerl_studies.design.looks import at_last_look, seen_runs, shown_runs
from qerl_studies.design.sessions import read_study
from qerl_studies.report.sessions import beside
from qerl_studies.runs.find import chosen_runs
from tests.scripts import ROOT

REAL = ROOT / "studies" / "real-2026" / "05b"
LATER = "2026-11-27*"  # sessions after the first, which has the eight bases of the first look
JUDGED = ROOT / "studies" / "fp16"
Command = Callable[[list[str]], None]


def with_looks(looks: dict[int, float], folder: Path) -> Path:
    """The first session of REAL in `folder`, as if it had been designed with these looks."""
    shutil.copytree(REAL, folder, ignore=shutil.ignore_patterns("results", LATER))
    design = yaml.safe_load((folder / "study.yaml").read_text())
    design["primary"]["looks"] = looks
    (folder / "study.yaml").write_text(yaml.safe_dump(design))
    return folder


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that has had no look."""
    return with_looks({9: 0.02, 12: 0.04}, tmp_path_factory.mktemp("studies") / "early")


@pytest.fixture(scope="module")
def packed(early: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in one folder, as `qerl-bench study out=FOLDER` packs it."""
    folder = tmp_path_factory.mktemp("packed") / "out"
    (session,) = (early / "data").iterdir()
    shutil.copytree(session, folder)
    shutil.copy(early / "study.yaml", folder)
    return folder


@pytest.mark.parametrize("place", ["early", "session", "packed"])
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (claims.main, ["{}", "out=out"]),
        (collect.main, ["{}", "out=out", "csv=true"]),
        (compare.main, ["{}", "{}"]),
        (figure.main, ["reward", "{}", "out=out"]),
        (matrix.main, ["{}", "out=out"]),
        (plan.main, ["{}"]),
        (publish.main, ["{}", "out=out"]),
        (report.main, ["{}", "out=out"]),
        (study.main, ["init=out", "model=tiny", "task=gsm8k", "contrast=quant=bf16,nvfp4", "minutes=1e4", "runs={}"]),
    ],
    ids=lambda value: value.__module__.rpartition(".")[2] if callable(value) else "",
)
def test_commands_that_read_runs_leave_out_those_that_no_look_sees(
    command: Command,
    words: list[str],
    place: str,
    early: Path,
    packed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = {"early": early, "packed": packed, "session": next((early / "data").iterdir())}[place]
    monkeypatch.chdir(tmp_path)
    named = packed if place == "packed" else early
    with pytest.raises(ConfigError, match=f"24 runs of {named} are left out.*look.*study_report"):
        command([word.format(folder) for word in words])
    assert capsys.readouterr().out == "" and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("place", ["early", "session", "packed", "inside"])
def test_verdicts_have_no_record_of_it(
    place: str,
    early: Path,
    packed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = next((early / "data").iterdir())
    monkeypatch.chdir(session)
    folder = {"early": early, "packed": packed, "session": session, "inside": Path()}[place]
    name = "out" if place == "packed" else "early"
    with pytest.raises(ConfigError, match=f"^{name} has no verdict.*no look.*primary.md"):
        verdicts.main([str(folder), f"out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()
    verdicts.main([str(folder), str(JUDGED), f"out={tmp_path / 'out'}"])
    assert [*json.loads((tmp_path / "out/claims.json").read_text())["studies"]] == ["fp16"]
    assert capsys.readouterr().err.startswith(f"{name} has no verdict")


def test_gates_of_training_are_open_until_the_look(early: Path, tmp_path: Path) -> None:
    (session,) = (early / "data").iterdir()
    with pytest.raises(SystemExit):
        gates.main([str(early / "study.yaml"), f"runs={session}", f"out={tmp_path}"])
    found = {one["gate"]: one for one in json.loads((tmp_path / "gates.json").read_text())["gates"]}
    trained = [found[gate] for gate in ("gain where complete", "end above half time")]
    assert [(one["word"], one["value"], one["bases"]) for one in trained] == [("open", None, 0)] * 2
    assert found["pass@1 of the base"]["bases"] == 8


@pytest.mark.parametrize(("looks", "bases"), [({9: 0.02}, 0), ({8: 0.02}, 8)])
def test_so_are_those_that_a_study_prints_and_packs(
    looks: dict[int, float], bases: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although its reference is finished on all bases that were probed."""
    made = read_study(with_looks(looks, tmp_path / "study"))
    monkeypatch.setattr(runner, "finished_runs", lambda *_: made.runs)
    found = {one.gate: one for one in runner.gates_so_far(made.design, [*made.probes.values()])}
    gate = found["gain where complete"]
    assert gate.bases == bases and (gate.word == "open") is (bases == 0)


def test_others_are_shown_beside_it_and_it_is_named(early: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown_runs([JUDGED]) == chosen_runs([JUDGED])
    assert shown_runs([JUDGED, early]) == chosen_runs([JUDGED])
    assert capsys.readouterr().err.startswith(f"24 runs of {early} are left out")


def test_after_a_look_its_bases_are_shown_and_no_later_one(tmp_path: Path) -> None:
    folder = with_looks({4: 0.02, 12: 0.04}, tmp_path / "later")
    whole = read_study(folder)
    seen = at_last_look(whole)
    assert seen is not None and {base for _, base, _ in seen.runs} == {1, 2, 3, 4}
    assert {*shown_runs([folder])} == {run.path for run in seen.runs.values()} and len(seen.runs) == 12
    assert seen_runs(whole) == seen.runs
    with pytest.raises(ConfigError, match="after its last look"):
        publish.main([str(folder), f"out={tmp_path / 'out'}"])
    assert {*shown_runs([REAL])} == {*chosen_runs([REAL])}


def test_no_other_study_is_pooled_with_it(early: Path) -> None:
    other = shutil.copytree(early, early.parent / "other")
    assert beside(read_study(other)) == []
    design = yaml.safe_load((early / "study.yaml").read_text())
    plain = shutil.copytree(early, early.parent / "plain")
    (plain / "study.yaml").write_text(yaml.safe_dump({key: design[key] for key in design if key != "primary"}))
    assert beside(read_study(other)) == [plain]
