"""A registered claim: what is fixed, and that nothing of it changes unseen."""

from __future__ import annotations

import datetime
import json
import re
import shutil
from pathlib import Path

import pytest

from qerl_bench.__main__ import main
from qerl_core.checks import ConfigError
from qerl_core.process.arguments import whole
from qerl_studies.claims.registration import (
    REGISTERED,
    Registration,
    content_hash,
    read_registration,
    register,
)
from qerl_studies.commands.check import check_study
from tests.run_folders import write_run

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
    assert made.margin == "2.0 %" and re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:]{8}\+00:00", made.date)
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
    began = datetime.datetime.fromtimestamp(1.79e9, datetime.UTC)
    dated(began.isoformat())
    with pytest.raises(ConfigError, match="SHA-256"):  # what was changed here, and not when it began
        check_study(study)
    for late in ((began + datetime.timedelta(seconds=1)).isoformat(), "2999-01-01"):
        dated(late)
        with pytest.raises(ConfigError, match=f"began before the registration of {re.escape(late)}"):
            check_study(study)


@pytest.mark.parametrize("place", ["runs/a", "session/runs/a"])
def test_a_folder_with_runs_is_refused(place: str, claim: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "study" / place, "steps: 1\n", [])
    with pytest.raises(ConfigError, match=f"has {place} already"):
        register(claim, 3, [3], tmp_path / "study")
    assert not (tmp_path / "study" / REGISTERED).exists()


def test_wrong_words_are_refused_in_a_sentence(
    claim: Path, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"out={tmp_path / 'other'}"
    assert "in order" in refused(capsys, "register", str(claim), out, "units=4", "looks=4,2")
    assert "units=4" in refused(capsys, "register", str(claim), out, "units=4", "looks=2")
    assert "units must be" in refused(capsys, "register", str(claim), out, "units=1")
    assert "there is no file" in refused(capsys, "register", str(tmp_path / "none.yaml"), out, "units=4")
    assert "is there already" in refused(capsys, "register", str(claim), f"out={study}", "units=4")
    shutil.copy(claim, tmp_path / "first_entropy.yaml")
    assert "called claim" in refused(capsys, "register", str(tmp_path / "first_entropy.yaml"), out, "units=4")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "tidy.parquet").touch()
    assert "before its runs" in refused(capsys, "register", str(claim), f"out={tmp_path / 'full'}", "units=4")
    claim.write_text(CLAIM.replace("expected: less", "expected: much"))
    assert "expected" in refused(capsys, "register", str(claim), out, "units=4")
    assert not (tmp_path / "other").exists()


# --- carried along ---------------------------------------------------------------------------------------------------

EXAMPLE = ROOT / "community" / "example-smoke"


def with_runs(study: Path) -> Path:
    """A registered study whose runs are those of the example."""
    for file in ("settings.json", "tidy.parquet", "answers.parquet"):
        shutil.copy(EXAMPLE / file, study / file)
    record = json.loads((study / REGISTERED).read_text())
    record.pop("seal")
    made = Registration(**record | {"date": "2026-01-01"} | {key: tuple(record[key]) for key in ("contrasts", "looks")})
    (study / REGISTERED).write_text(json.dumps(record | {"date": made.date, "seal": made.seal}))
    return study


CHANGES = {
    "the claim": ("claim/first_entropy.yaml", "margin: 1.02", "margin: 1.03", "changed after it was registered"),
    "what it takes values from": (
        "claim/shared/learning.yaml",
        "from: 40",
        "from: 30",
        "changed after it was registered",
    ),
    "the record": (REGISTERED, '"2.0 %"', '"9.0 %"', "seal is of other content"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_published_copy_has_the_registration_and_is_refused_if_that_changed(
    what: str, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "published"
    assert main(["publish", str(with_runs(study)), f"out={out}", "mixed_code=true"]) == 0
    made = read_registration(study)
    assert read_registration(out) == made and (made.margin, made.units, made.looks) == ("2.0 %", 3, (2, 3))
    assert made.seal[:16] in (out / "README.md").read_text() and made.seal[:16] in check_study(out)
    name, old, new, said = CHANGES[what]
    text = (out / name).read_text()
    assert text.count(old) >= 1
    (out / name).write_text(text.replace(old, new, 1))
    assert said in refused(capsys, "check", str(out))


def test_a_published_copy_without_its_registration_or_with_another_is_refused(
    study: Path, claim: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "published"
    assert main(["publish", str(with_runs(study)), f"out={out}", "mixed_code=true"]) == 0
    kept = (out / REGISTERED).read_text()
    (out / REGISTERED).unlink()
    assert REGISTERED in refused(capsys, "check", str(out))
    (out / REGISTERED).write_text(kept)
    claim.write_text(CLAIM.replace("margin: 1.02", "margin: 1.5"))
    assert main(["register", str(claim), f"out={tmp_path / 'later'}", "units=3"]) == 0
    shutil.copytree(with_runs(tmp_path / "later") / "claim", out / "claim", dirs_exist_ok=True)
    shutil.copy(tmp_path / "later" / REGISTERED, out / REGISTERED)
    assert "SHA-256" in refused(capsys, "check", str(out)), "sealed in itself, and another than was published"


def test_nothing_is_published_of_a_claim_that_changed(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = with_runs(study) / "claim" / "first_entropy.yaml"
    file.write_text(file.read_text().replace("margin: 1.02", "margin: 1.03"))
    said = refused(capsys, "publish", str(study), f"out={tmp_path / 'published'}", "mixed_code=true")
    assert "changed after it was registered" in said and not (tmp_path / "published").exists()


def trl_runs(root: Path) -> Path:
    for place, arm in enumerate(("bf16", "fp8")):
        for seed in range(3):
            folder = root / f"{arm}-s{seed}"
            folder.mkdir(parents=True)
            history = [{"step": step, "reward": 0.1 * seed + 0.2 * place + 0.01 * step * seed} for step in (1, 2)]
            (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    return root


@pytest.mark.parametrize("place", ["study", "runs"])
def test_an_import_carries_the_registration_from_its_study_or_from_the_runs(
    place: str, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if place == "runs":
        study = study.rename(tmp_path / "runs")
    (study / "claim" / "another.yaml").write_text("title: mine\n")
    made, runs, out = read_registration(study), trl_runs(tmp_path / "runs"), tmp_path / "study"
    words = ["import", "trl", str(runs), f"out={out}", "model=m", "task=t"]
    assert main(words) == 0
    assert read_registration(out) == made and made.seal[:16] in capsys.readouterr().out
    assert made.seal[:16] in (out / "verdict.md").read_text()
    told = check_study(out)
    assert "6 runs of 2 arms, reported; registered on" in told and "3 of 3 units, look at 3 reached" in told
    assert "when 6 runs began is not known" in told
    assert (study / "claim" / "another.yaml").is_file(), "what else lies in the folder stays"
    file = out / "claim" / "first_entropy.yaml"
    file.write_text(file.read_text().replace("expected: less", "expected: more"))
    assert "changed after it was registered" in refused(capsys, "check", str(out))


def test_an_import_beside_a_claim_that_changed_or_with_two_is_refused(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = trl_runs(tmp_path / "runs")
    words = ["import", "trl", str(runs), f"out={study}", "model=m", "task=t"]
    shutil.copytree(study / "claim", runs / "claim")
    record = json.loads((study / REGISTERED).read_text())
    record.pop("seal")
    other = Registration(**record | {"units": 4} | {key: tuple(record[key]) for key in ("contrasts", "looks")})
    (runs / REGISTERED).write_text(json.dumps(record | {"units": 4, "seal": other.seal}))
    assert "two claims" in refused(capsys, *words)
    (runs / REGISTERED).unlink()
    file = study / "claim" / "first_entropy.yaml"
    file.write_text(file.read_text().replace("margin: 1.02", "margin: 1.03"))
    assert "changed after it was registered" in refused(capsys, *words)
    assert {path.name for path in study.iterdir()} == {"claim", REGISTERED}


def test_a_registration_of_somebody_unfolds_nothing_and_leads_nowhere(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = trl_runs(tmp_path / "runs")
    shutil.copytree(study, runs, dirs_exist_ok=True)
    words = ["import", "trl", str(runs), f"out={tmp_path / 'out'}", "model=m", "task=t"]
    file = runs / "claim" / "first_entropy.yaml"
    file.write_text("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n")
    assert "alias" in refused(capsys, *words)
    file.unlink()
    (tmp_path / "secret.yaml").write_text(CLAIM)
    file.symlink_to(tmp_path / "secret.yaml")
    assert "outside" in refused(capsys, *words)
    file.unlink()
    (tmp_path / "secret.yaml").write_text("a: 1\n")
    file.write_text(CLAIM.replace("shared/learning", "../../secret"))
    assert "changed after it was registered" in refused(capsys, *words)
    assert not (tmp_path / "out").exists()


def test_a_claim_takes_values_from_files_of_ones_own_which_are_kept(claim: Path, tmp_path: Path) -> None:
    (claim.parent / "usual.yaml").write_text("defaults: [shared/learning]\nfamily: mine\n")
    claim.write_text(CLAIM.replace("[shared/learning]", "[usual]").replace("family: mine ", "# "))
    assert main(["register", str(claim), f"out={tmp_path / 'study'}", "units=3"]) == 0
    shutil.rmtree(claim.parent)
    assert "no runs yet" in check_study(tmp_path / "study")
    file = tmp_path / "study" / "claim" / "usual.yaml"
    file.write_text(file.read_text().replace("mine", "yours"))
    with pytest.raises(ConfigError, match="changed after it was registered"):
        check_study(tmp_path / "study")
    file.unlink()
    with pytest.raises(ConfigError, match="missing"):
        check_study(tmp_path / "study")


def test_a_copy_of_a_claim_of_ours_is_what_is_checked_and_not_ours(tmp_path: Path) -> None:
    ours = ROOT / "conf" / "claim" / "jet-rl.yaml"
    assert main(["register", str(ours), f"out={tmp_path / 'study'}", "units=3"]) == 0
    copy = tmp_path / "study" / "claim" / "jet-rl.yaml"
    assert copy.read_text() == ours.read_text()
    copy.write_text(copy.read_text() + "\nmargin: 7\n" if "margin" not in copy.read_text() else re.sub(
        r"(?m)^margin: \S+", "margin: 7", copy.read_text()))  # fmt: skip
    with pytest.raises(ConfigError, match="changed after it was registered"):
        check_study(tmp_path / "study")
