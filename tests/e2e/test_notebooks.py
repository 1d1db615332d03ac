"""Each notebook runs from top to bottom on small recorded runs, and is committed without outputs.

The runs in tests/assets/runs are of the built-in world: bf16 and nvfp4, with noise and without, two seeds, 12 steps.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
RUNS = REPOSITORY / "tests" / "assets" / "runs"
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert [notebook.stem for notebook in NOTEBOOKS] == ["entropy", "reward", "speed", "start_here"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    source = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    script = tmp_path / f"{notebook.stem}.py"
    script.write_text(source)
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=notebook.parent,
        env={**os.environ, "QERL_RUNS_DIR": str(RUNS)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for run in RUNS.glob("*-grpo-*"):
        assert run.name in done.stdout


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stripped(notebook: Path) -> None:
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, "".join(cell["source"])


def test_recorded_runs_name_no_machine() -> None:
    for file in RUNS.rglob("*.*"):
        assert not re.search(r"(?<![\w.])/(home|work|tmp|root|Users)/", file.read_text()), file
