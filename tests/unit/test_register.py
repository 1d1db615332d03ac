"""A registered claim: what is fixed, and that nothing of it changes unseen."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from qerl_bench.__main__ import main
from qerl_core.checks import ConfigError
from qerl_core.process.arguments import whole
from qerl_studies.claims.registration import REGISTERED, Registration, content_hash, read_registration
from qerl_studies.commands.check import check_study

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "own-claim.md").read_text()
CLAIM = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)[0]


@pytest.fixture
def claim(tmp_path: Path) -> Path:
    file = tmp_path / "mine" / "claim" / "first_entropy.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(CLAIM)
    return file


@pytest.fixture
def study(claim: Path, tmp_path: Path) -> Path:
    assert main(["register", str(claim), f"out={tmp_path / 'study'}", "units=3", "looks=2,3"]) == 0
    return tmp_path / "study"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main([*words])
    assert end.value.code == 2
    return whole(capsys.readouterr().err)


def test_what_is_fixed_is_written_and_printed(claim: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tmp_path / "study"
    assert main(["register", str(claim), f"out={study}", "units=3", "looks=2,3"]) == 0
    made = read_registration(study)
    assert (made.units, made.looks, made.expected, made.contrasts) == (3, (2, 3), "less", ("nvfp4 - bf16",))
    assert made.margin == "2.0 %" and re.fullmatch(r"20\d\d-\d\d-\d\d", made.date)
    assert (study / "claim" / "first_entropy.yaml").read_text() == CLAIM
    assert made.seal in capsys.readouterr().out
    assert "no look reached; no runs yet" in check_study(study)


def test_comments_change_nothing_and_values_do(claim: Path) -> None:
    before = content_hash(claim)
    claim.write_text(f"# a comment\n{CLAIM}")
    assert content_hash(claim) == before
    claim.write_text(CLAIM.replace("margin: 1.02", "margin: 1.03"))
    assert content_hash(claim) != before
    claim.write_text(CLAIM.replace("expected: less", "expected: more"))
    assert content_hash(claim) != before


@pytest.mark.parametrize(
    "change",
    [("margin: 1.02", "margin: 1.03"), ("expected: less", "expected: more"), ("gates: []", "gates: [learned]")],
)
def test_a_claim_that_changed_is_refused(change: tuple[str, str], study: Path) -> None:
    file = study / "claim" / "first_entropy.yaml"
    file.write_text(file.read_text().replace(*change))
    with pytest.raises(ConfigError, match="changed after it was registered"):
        check_study(study)


def test_a_claim_that_is_missing_and_a_record_that_changed_are_refused(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads((study / REGISTERED).read_text())
    (study / REGISTERED).write_text(json.dumps(record | {"margin": "9.0 %"}))
    assert "seal" in refused(capsys, "check", str(study))
    (study / REGISTERED).write_text(json.dumps({key: record[key] for key in record if key != "looks"}))
    assert "exactly the keys" in refused(capsys, "check", str(study))
    outside = record | {"claim": "../../mine/claim/first_entropy"}
    outside.pop("seal")
    forged = Registration(**outside | {key: tuple(outside[key]) for key in ("contrasts", "looks")})
    (study / REGISTERED).write_text(json.dumps(outside | {"seal": forged.seal}))
    assert "is missing" in refused(capsys, "check", str(study)), "a name leads to no other place"
    (study / REGISTERED).write_text(json.dumps(record))
    (study / "claim" / "first_entropy.yaml").unlink()
    assert "is missing" in refused(capsys, "check", str(study))


def test_runs_from_before_are_refused_and_looks_are_counted(study: Path) -> None:
    """A registration of a later day is too late for runs that say when they began."""
    example = ROOT / "community" / "example-smoke"
    for file in example.iterdir():
        shutil.copy(file, study / file.name)
    record = json.loads((study / REGISTERED).read_text())
    record.pop("seal")

    def dated(day: str) -> None:
        made = Registration(**record | {"date": day} | {key: tuple(record[key]) for key in ("contrasts", "looks")})
        (study / REGISTERED).write_text(json.dumps(record | {"date": day, "seal": made.seal}))

    dated("2026-01-01")
    told = check_study(study)
    assert "9 runs of 3 settings, complete; registered on 2026-01-01" in told and "3 of 3 units, look at 3" in told
    assert "when 9 runs began is not known" in told
    settings = json.loads((study / "settings.json").read_text())
    for run in settings["runs"].values():
        run["started"] = 1.79e9
    (study / "settings.json").write_text(json.dumps(settings))
    dated("2999-01-01")
    with pytest.raises(ConfigError, match="began before 2999-01-01"):
        check_study(study)


def test_wrong_words_are_refused_in_a_sentence(
    claim: Path, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"out={tmp_path / 'other'}"
    assert "in order" in refused(capsys, "register", str(claim), out, "units=4", "looks=4,2")
    assert "units=4" in refused(capsys, "register", str(claim), out, "units=4", "looks=2")
    assert "units must be" in refused(capsys, "register", str(claim), out, "units=1")
    assert "is no claim" in refused(capsys, "register", str(tmp_path / "none.yaml"), out, "units=4")
    assert "is there already" in refused(capsys, "register", str(claim), f"out={study}", "units=4")
    shutil.copy(claim, tmp_path / "first_entropy.yaml")
    assert "called claim" in refused(capsys, "register", str(tmp_path / "first_entropy.yaml"), out, "units=4")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "tidy.parquet").touch()
    assert "before its runs" in refused(capsys, "register", str(claim), f"out={tmp_path / 'full'}", "units=4")
    claim.write_text(CLAIM.replace("expected: less", "expected: much"))
    assert "expected" in refused(capsys, "register", str(claim), out, "units=4")
    assert not (tmp_path / "other").exists()
