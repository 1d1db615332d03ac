"""A few faults of the campaign, that it can tell a lost run, and that the page has what it recorded."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
SAMPLE = ["--faults", "3", "--kinds", "kill before", "power", "failing disk"]


@pytest.mark.slow
def test_a_sample_of_faults() -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.faults.campaign", *SAMPLE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| all | 3 |" in done.stdout


@pytest.fixture(autouse=True)
def campaign_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_the_page_has_the_table_of_what_was_recorded() -> None:
    from tests.faults.campaign import BEGIN, END, table

    with open(PAGE.with_name("faults.csv"), newline="") as file:
        rows = [(row["fault"], row["result"]) for row in csv.DictReader(file)]
    assert len({kind for kind, _ in rows}) >= 20 and not any(result == "lost" for _, result in rows)
    assert table(rows) in PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


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
