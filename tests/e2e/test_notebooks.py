"""Each notebook runs from top to bottom whatever runs there are, and its stored outputs are what it shows.

The runs in tests/assets/runs are of the built-in world: bf16 and nvfp4, with noise and without, two seeds, 12 steps.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qerl_bench.config import build, compose
from qerl_studies.runs.notebook import COMPARISON

REPOSITORY = Path(__file__).parents[2]
GRID = REPOSITORY / "tests" / "assets" / "runs"
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


def script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STORE = script(REPOSITORY / "notebooks" / "store.py")


def test_there_are_notebooks() -> None:
    assert [notebook.stem for notebook in NOTEBOOKS] == ["entropy", "reward", "speed", "start_here"]


def one_run(root: Path) -> None:
    shutil.copytree(GRID / "nvfp4-exp-grpo-r32-s0-a101d16e", root / "runs" / "one")


def failed_runs(root: Path) -> None:
    """The grid and, before and behind it, runs that stopped: while writing a line, with a broken config, damaged."""
    shutil.copytree(GRID, root / "runs")
    source = root / "runs" / "nvfp4-exp-grpo-r32-s0-a101d16e"
    for name in ("0-half", "1-config", "z-damaged"):
        shutil.copytree(source, root / "runs" / name)
    half, broken, damaged = (root / "runs" / name for name in ("0-half", "1-config", "z-damaged"))
    (half / "done.json").unlink()
    (half / "metrics.jsonl").write_text((half / "metrics.jsonl").read_text()[:-20])
    (broken / "config.yaml").write_text("")
    (damaged / "metrics.jsonl").write_text("{")


def grid(root: Path) -> None:
    """The runs of the stored outputs, which are read in place."""


def empty(root: Path) -> None:
    (root / "runs").mkdir()


# folder -> figures that each notebook shows in it
FIGURES: dict[Callable[[Path], None], dict[str, int]] = {
    one_run: {"entropy": 2, "reward": 2, "speed": 0, "start_here": 2},
    grid: {"entropy": 4, "reward": 5, "speed": 0, "start_here": 4},
    failed_runs: {"entropy": 4, "reward": 5, "speed": 0, "start_here": 4},
    empty: {"entropy": 0, "reward": 0, "speed": 0, "start_here": 0},
}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("make", FIGURES, ids=lambda make: make.__name__)
def test_notebook_shows_what_is_there(
    notebook: Path,
    make: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make(tmp_path)
    monkeypatch.chdir(notebook.parent)
    monkeypatch.setenv("QERL_ROOT", STORE.RUNS if make is grid else str(tmp_path))
    content = json.loads(notebook.read_text())
    cells = [*STORE.outputs(content, notebook.name)]
    found = [output for cell in cells for output in cell]
    figures = sum("image/png" in output.get("data", {}) for output in found)
    printed = "".join(line for output in found for line in output.get("text", []))
    assert figures == FIGURES[make][notebook.stem], printed
    if make is grid:
        check_stored(content, cells)
    if make in (grid, failed_runs):
        for run in GRID.glob("*-grpo-*"):
            assert run.name in printed
        assert printed.count("left out:") == 3 * (make is failed_runs)
        assert ("Not drawn" in printed) == ("do not record train/taught_frac" in printed) == (notebook.stem == "speed")
    else:
        assert COMPARISON in printed
    assert ("make run" in printed) == (make is empty)


def test_the_command_for_a_comparison_makes_one() -> None:
    program, *words = COMPARISON.split()[1:]
    assert (REPOSITORY / program).is_file()
    words.remove("-m")
    keys = {word.partition("=")[0]: word.partition("=")[2].split(",") for word in words}
    for choice in product(*keys.values()):
        build(compose([f"{key}={value}" for key, value in zip(keys, choice, strict=True)]))


def check_stored(content: dict[str, Any], cells: list[list[dict[str, Any]]]) -> None:
    """The outputs in the notebook are those of `cells`: printed words always, tables and pictures if the libraries that
    make them are those that made the stored ones."""
    stored = [cell["outputs"] for cell in content["cells"] if cell["cell_type"] == "code"]
    remedy = "run: python notebooks/store.py"
    assert [of_type(cell, "stream") for cell in stored] == [of_type(cell, "stream") for cell in cells], remedy
    assert [kinds(cell) for cell in stored] == [kinds(cell) for cell in cells], remedy
    if content["metadata"]["drawn_by"] == STORE.versions():
        assert stored == cells, remedy


def of_type(cell: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [output for output in cell if output["output_type"] == kind]


def kinds(cell: list[dict[str, Any]]) -> list[list[str]]:
    return [sorted(output.get("data", {})) for output in cell]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_notebook_is_small_and_names_no_machine(notebook: Path) -> None:
    text = notebook.read_text()
    assert len(text) < 300_000 and not re.search(r"(?<![\w./])/(home|work|tmp|root|Users)/", text)


def test_recorded_runs_name_no_machine() -> None:
    for file in GRID.rglob("*.*"):
        assert not re.search(r"(?<![\w.])/(home|work|tmp|root|Users)/", file.read_text()), file
