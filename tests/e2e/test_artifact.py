"""The first path of ARTIFACT.md, as printed: a run within tolerances; and the commands of README.md, in its folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from qerl_bench.conduct.run_messages import ending
from qerl_bench.config import compose
from qerl_bench.sweep.table import sweep_table
from qerl_core.process.arguments import WIDTH
from qerl_studies.runs.load import Run, load_run
from qerl_studies.tables.terminal import places, render, summary
from tests.conf.test_artifact import PAGE, ROWS, RUNS, commands, numbers
from tests.e2e.test_run import assert_complete, assert_six_steps_with_noise, run_dirs
from tests.e2e.test_run import run as start

ROOT = Path(__file__).resolve().parents[2]


def shell(command: str, programs: Path, **environment: str) -> str:
    paths = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sh", "-ec", command],
        cwd=ROOT, env=os.environ | paths | environment, text=True, timeout=500, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Made(NamedTuple):
    folder: Path
    printed: str


@pytest.fixture(scope="module")
def made(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The run of the first section of ARTIFACT.md, in an empty folder."""
    root = tmp_path_factory.mktemp("root")
    activate, command = commands(RUNS)
    assert activate == "source .venv/bin/activate"
    printed = shell(command, programs, QERL_ROOT=str(root))
    (folder,) = (root / "runs").iterdir()
    return Made(folder, printed)


@pytest.fixture(scope="module")
def run(made: Made) -> Run:
    return load_run(made.folder)


def test_it_is_a_complete_run_in_nvfp4(made: Made) -> None:
    """As test_run.py asks of the other formats."""
    assert_complete(made.folder)
    assert_six_steps_with_noise(made.folder, made.printed, "nvfp4")


@pytest.mark.parametrize("row", ["`entropy`, nats per token", "`reward/mean`", "`accuracy`", "`aqn/sigma`"])
def test_the_first_and_the_last_step_are_within_what_the_page_allows(run: Run, row: str) -> None:
    first, last, within = (numbers(cell) for cell in ROWS[row])
    series = run.series("train", row.split("`")[1])
    found = series.loc[[1, 6]].to_numpy()
    assert (np.abs(found - [*first, *last]) <= within).all(), (found, within)


def test_the_noise_is_what_the_page_says(run: Run) -> None:
    sigmas, (within,) = map(numbers, ROWS["`aqn/sigma` of steps 2 to 5"])
    assert run.series("train", "aqn/sigma").loc[2:5].to_list() == pytest.approx(sigmas, abs=within)
    perturbed = run.series("train", "aqn/norms_perturbed")
    assert {*perturbed.loc[2:]} == {numbers(ROWS["`aqn/norms_perturbed` from step 2 on"][0])[0]}


@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_held_out_accuracy_is_within_what_the_page_allows(run: Run, way: str) -> None:
    expected, within = map(numbers, ROWS[f"held-out {way} accuracy, before and after"])
    found = run.series("eval", f"eval/accuracy_{way}").loc[[0, 6]].to_numpy()
    assert (np.abs(found - expected) <= within).all(), (found, within)


def test_the_reward_rises_as_the_page_says(run: Run) -> None:
    ((rise, below),) = re.findall(r"rise by more than (\d\.\d+), from below (\d\.\d+)", PAGE)
    reward = run.series("train", "reward/mean")
    assert reward[1] < float(below) and reward[6] - reward[1] > float(rise)


def user_commands() -> list[str]:
    """Every `python src/run.py` line of the README, and the one behind `make run`."""
    shown = re.findall(r"^(?:\$ )?python (src/run\.py[^\n#]*)", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    made = re.findall(r"^run:.*\n\t.*python (src/run\.py.*)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert shown and made
    return sorted({line.strip() for line in shown + made})


def test_commands_of_the_readme_run_as_written(made: Made, programs: Path) -> None:
    """The very words of the README with `experiment=smoke` behind them, so that they end soon; in one folder, where
    a point of the sweep meets the run of ARTIFACT.md, and so does the command behind `make run`. stdout has the
    result, and stderr how it came to be. The interpreter of the sweep, which test_wheel.py starts too, has imported
    everything."""
    root, expected = made.folder.parents[1], {made.folder.name}
    for line in user_commands():
        words = shlex.split(line)[1:]
        small = [] if any(word.startswith("experiment=") for word in words) else ["experiment=smoke"]
        python = programs / "python" if "-m" in words else sys.executable
        done = start(*words, *small, f"root={root}", python=python)
        assert done.returncode == 0, done.stderr
        swept = [[f"{word.partition('=')[0]}={value}" for value in word.partition("=")[2].split(",")] for word in words]
        points = product(*[values for word, values in zip(words, swept, strict=True) if not word.startswith("-")])
        folders = [root / "runs" / compose([*point, *small]).name for point in points]
        table = sweep_table(folders) if "-m" in words else "\n".join([render(summary(folders)), *places(folders[0])])
        if "-m" not in words and "finished before" not in done.stderr:
            table = "\n".join([table, *ending(load_run(folders[0]), [*words, *small, f"root={root}"])])
        assert done.stdout == f"{table}\n"
        assert "step 6/6" in done.stderr or f"finished before: {folders[0]}" in done.stderr
        assert "accuracy:" not in done.stderr
        assert [line for line in done.stderr.splitlines() if len(line) > WIDTH and str(root) not in line] == []
        expected |= {folder.name for folder in folders}
        assert {run_dir.name for run_dir in run_dirs(root)} == expected
    for run_dir in run_dirs(root):
        assert_complete(run_dir)
