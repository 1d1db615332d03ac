"""The first path of ARTIFACT.md that takes minutes, as printed: a run within tolerances."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from qerl_bench.studies.runs.load import Run, load_run
from tests.conf.test_artifact import PAGE, ROWS, RUNS, commands, numbers

ROOT = Path(__file__).resolve().parents[2]


def shell(command: str, programs: Path, **environment: str) -> None:
    paths = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sh", "-ec", command],
        cwd=ROOT, env=os.environ | paths | environment, text=True, timeout=500, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def run(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of the first section, in an empty folder."""
    root = tmp_path_factory.mktemp("root")
    activate, command = commands(RUNS)
    assert activate == "source .venv/bin/activate"
    shell(command, programs, QERL_ROOT=str(root))
    (folder,) = (root / "runs").iterdir()
    return load_run(folder)


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
