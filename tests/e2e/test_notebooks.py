"""Each notebook runs from top to bottom whatever runs there are, and is committed without outputs.

The runs in tests/assets/runs are of the built-in world: bf16 and nvfp4, with noise and without, two seeds, 12 steps.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from qerl_bench.config import build, compose
from qerl_bench.study.notebook import COMPARISON

REPOSITORY = Path(__file__).parents[2]
GRID = REPOSITORY / "tests" / "assets" / "runs"
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert [notebook.stem for notebook in NOTEBOOKS] == ["entropy", "reward", "speed", "start_here"]


def cells_of(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def displayed(notebook: Path) -> list[Any]:
    """The value of each code cell's last line, as Jupyter shows it: None for none, and the bytes of a figure."""
    names: dict[str, Any] = {"__name__": "__main__"}
    values = []
    for cell in cells_of(notebook):
        *lines, last = ast.parse(cell).body
        exec(compile(ast.Module(lines, []), notebook.name, "exec"), names)
        ends_with_value = isinstance(last, ast.Expr)
        end: Any = ast.Expression(last.value) if ends_with_value else ast.Module([last], [])
        value = eval(compile(end, notebook.name, "eval" if ends_with_value else "exec"), names)
        values.append(value._repr_png_() if hasattr(value, "_repr_png_") else value)
    return values


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
    (root / "runs").symlink_to(GRID)


def empty(root: Path) -> None:
    (root / "runs").mkdir()


# folder -> figures that each notebook shows in it
FIGURES: dict[Callable[[Path], None], dict[str, int]] = {
    one_run: {"entropy": 1, "reward": 1, "speed": 0, "start_here": 2},
    grid: {"entropy": 4, "reward": 4, "speed": 0, "start_here": 4},
    failed_runs: {"entropy": 4, "reward": 4, "speed": 0, "start_here": 4},
    empty: {"entropy": 0, "reward": 0, "speed": 0, "start_here": 0},
}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("make", FIGURES, ids=lambda make: make.__name__)
def test_notebook_shows_what_is_there(
    notebook: Path,
    make: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(tmp_path)
    monkeypatch.setenv("QERL_ROOT", str(tmp_path))
    figures = sum(isinstance(value, bytes) for value in displayed(notebook))
    printed = capsys.readouterr().out
    assert figures == FIGURES[make][notebook.stem], printed
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


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stripped(notebook: Path) -> None:
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, "".join(cell["source"])


def test_recorded_runs_name_no_machine() -> None:
    for file in GRID.rglob("*.*"):
        assert not re.search(r"(?<![\w.])/(home|work|tmp|root|Users)/", file.read_text()), file
