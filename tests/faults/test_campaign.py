"""A few faults of the campaign, that it can tell a lost run, and that the page has what it recorded."""

from __future__ import annotations

import csv
import gzip
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
SAMPLE = ["--faults", "3", "--kinds", "kill before", "power", "failing disk"]


def campaign(programs: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [programs / "python", "-m", "tests.faults.campaign", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_a_sample_of_faults(programs: Path) -> None:
    done = campaign(programs, *SAMPLE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| all | 3 |" in done.stdout


@pytest.mark.slow
def test_each_kind_survives_a_fault_that_does_no_harm(programs: Path) -> None:
    """One in which a run does not would lose, or refuse, whatever happens to it, and so test nothing."""
    done = campaign(programs, "--harmless")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| all | 26 | 26 | 0 | 0 | 0 |" in done.stdout


def test_the_page_of_a_campaign_is_not_its_record(programs: Path, tmp_path: Path) -> None:
    done = campaign(programs, "--out", tmp_path / "faults.csv")
    assert done.returncode == 2 and "is the name of the record beside it" in done.stderr
    assert not [*tmp_path.iterdir()]


@pytest.fixture(autouse=True)
def campaign_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_the_page_has_the_table_of_what_was_recorded() -> None:
    from tests.faults.campaign import BEGIN, END, table

    with gzip.open(PAGE.with_name("faults.csv.gz"), "rt", newline="") as file:
        rows = [(row["fault"], row["result"]) for row in csv.DictReader(file)]
    assert len({kind for kind, _ in rows}) >= 20 and not any(result == "lost" for _, result in rows)
    assert table(rows) in PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def test_the_page_has_the_table_of_the_runs_that_shared_a_card() -> None:
    from tests.faults.card import Result, table

    with open(PAGE.with_name("shortages.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    results = [
        Result(row["card"], int(row["runs"]), row["shares"] == "True", row["plant"], row["result"]) for row in rows
    ]
    assert sum(result.plant != "undisturbed" for result in results) == 37
    assert not any("lost" in result.result for result in results) and max(float(row["gap"]) for row in rows) < 5e-5
    assert table(results) in PAGE.read_text()


def test_other_numbers_tracebacks_and_silence_are_losses(tmp_path: Path) -> None:
    from tests.faults.attempt import HUNG, Ended
    from tests.faults.run import Case, Lost, checked, numbers

    folder = tmp_path / "runs" / "run"
    adapter = folder / "checkpoints" / "step_000001" / "adapter" / "adapter_model.safetensors"
    adapter.parent.mkdir(parents=True)
    for name in ("metrics.jsonl", "rollouts.jsonl", "eval.json"):
        (folder / name).write_text('{"time": 1, "loss": 1}\n')
    adapter.write_text("a")
    case = Case(tmp_path, numbers(folder), tmp_path)
    with pytest.raises(Lost, match=r"without done\.json"):
        case.require_numbers()
    (folder / "done.json").touch()
    (folder / "metrics.jsonl").write_text('{"time": 2, "loss": 1}\n')
    case.require_numbers()
    for file, lost in ((adapter, "adapters"), (folder / "metrics.jsonl", "metrics, adapters")):
        file.write_text('{"time": 1, "loss": 2}\n')
        with pytest.raises(Lost, match=f"other numbers: {lost}"):
            case.require_numbers()
    for ended, lost in (
        (Ended(1, "Traceback (most recent call last):\nValueError"), "traceback"),
        (Ended(-9, f"step 1\n{HUNG}"), "hung"),
    ):
        with pytest.raises(Lost, match=lost):
            checked(ended)
    for ended in (Ended(1, ""), Ended(3, "error")):
        with pytest.raises(Lost, match="exit code"):
            case.in_words(ended, 1)


def test_a_campaign_goes_on_behind_what_it_has_recorded(tmp_path: Path) -> None:
    from tests.faults.campaign import Records
    from tests.faults.kinds import Fault
    from tests.faults.run import SURVIVED, Outcome

    def fault(place: str) -> Fault:
        return Fault("signal", place, lambda case: SURVIVED)

    file = tmp_path / "new" / "faults.csv"
    records = Records(file, resume=False)
    records.add(fault("a"), SURVIVED, 1.25)
    records.add(fault('b, "quoted"'), Outcome("refused", "error: two\nlines"), 2.0)
    records.add(fault("c"), SURVIVED, 3.0)
    file.write_bytes(file.read_bytes()[:-6])  # a kill in the last line
    again = Records(file, resume=True)
    assert again.happened() == {("signal", "a"), ("signal", 'b, "quoted"')}
    assert [row["said"] for row in again.rows] == ["", "error: two lines"]
    again.add(fault("c"), SURVIVED, 3.0)
    assert len(Records(file, resume=True).rows) == 3
    assert Records(file, resume=False).rows == [] == Records(file, resume=True).rows


def test_runs_of_a_card_are_compared_up_to_where_their_texts_part(tmp_path: Path) -> None:
    import json

    from tests.faults.card import apart

    def run(name: str, texts: str, *norms: float) -> Path:
        folder = tmp_path / name / "runs" / "run"
        folder.mkdir(parents=True)
        rollouts = [{"step": step, "completion": text} for step, text in enumerate(texts, 1)]
        metrics = [{"kind": "train", "step": step, "grad_norm": norm} for step, norm in enumerate(norms, 1)]
        for file, rows in (("rollouts", rollouts), ("metrics", metrics)):
            (folder / f"{file}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return tmp_path / name

    alone = run("alone", "abc", 1.0, 2.0, 3.0)
    assert apart(alone, alone) == (0, 0.0)
    assert apart(alone, run("rounded", "abc", 1.0, 2.0, 3.03)) == (0, pytest.approx(0.01, rel=0.02))
    assert apart(alone, run("parted", "abx", 1.0, 1.0, 9.0)) == (3, 0.5)
    assert apart(alone, run("shorter", "ab", 1.0, 2.0)) == (1, float("inf"))


def test_half_the_rows_may_round_numbers_otherwise_and_nothing_else(tmp_path: Path) -> None:
    import json

    from tests.faults.run import EPSILON, ROUNDINGS, Case, Lost, roundings

    assert roundings({"a": [1.0, "x", None]}, {"a": [1.0 + 4 * EPSILON, "x", None]}) == pytest.approx(4, rel=1e-3)
    assert roundings(1e-8, 0.0) < 1 and roundings(100.0, 100.0 + 100 * EPSILON) == pytest.approx(1, rel=1e-3)
    for other in ({"a": [1.0, "y", None]}, {"b": []}, {"a": [1.0]}, {"a": [1.0, "x", 0]}):
        assert roundings({"a": [1.0, "x", None]}, other) == float("inf")

    expected = {"metrics": [{"loss": 1.0, "tokens": 3}], "rollouts": "7", "evaluation": '{"k": 2.0}', "adapters": {}}
    case = Case(tmp_path, expected, tmp_path)
    case.folder.mkdir(parents=True)
    (case.folder / "done.json").touch()

    def wrong(loss: float, tokens: int = 3, text: str = "7") -> str:
        (case.folder / "metrics.jsonl").write_text(json.dumps({"loss": loss, "tokens": tokens}))
        (case.folder / "rollouts.jsonl").write_text(text)
        (case.folder / "eval.json").write_text(expected["evaluation"])
        try:
            case.require_numbers(rounded=True)
        except Lost as lost:
            return str(lost)
        return ""

    assert wrong(1.0 + 8 * EPSILON) == "" and "metrics" in wrong(1.0 + 2 * ROUNDINGS * EPSILON)
    assert "metrics" in wrong(1.0, tokens=4) and "rollouts" in wrong(1.0, text="8")
    wrong(1.0 + EPSILON)
    with pytest.raises(Lost, match="metrics"):
        case.require_numbers()
