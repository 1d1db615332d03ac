"""The marimo app: its cells fit together, and what it shows is what the study says. Needs no browser."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qerl_bench.study.load import load_runs, tidy

pytest.importorskip("marimo", reason="extra notebooks")
APP = Path(__file__).parents[2] / "notebooks" / "explore.py"
RUNS = Path(__file__).parents[1] / "assets" / "runs"


def app() -> Any:
    spec = importlib.util.spec_from_file_location("explore", APP)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.app


def test_marimo_finds_nothing_wrong() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "marimo", "check", "--strict", str(APP)], capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stdout.strip(), done.stdout + done.stderr


@pytest.mark.filterwarnings("default")  # of marimo's own threads
def test_the_app_shows_the_means_of_the_chosen_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(APP), "--", "--study", str(RUNS)])
    outputs, names = app().run()
    assert any("data:image/png" in getattr(output, "text", "") for output in outputs)
    table = tidy(load_runs([RUNS]))
    rows = table[(table["kind"] == "train") & (table["metric"] == "reward/mean") & (table["aqn"] == "exp")]
    for quant in ("bf16", "nvfp4"):
        first = rows[(rows["quant"] == quant) & (rows["step"] <= 6)]  # the window of step 1 is steps 1 to 6
        expected = first.groupby("step")["value"].mean().mean()
        assert names["curves"].loc[1, quant] == pytest.approx(expected)
    assert set(names["accuracy"]["count"]) == {2}


@pytest.mark.filterwarnings("default")
def test_a_folder_without_runs_is_answered_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", [str(APP), "--", "--study", str(tmp_path)])
    outputs, names = app().run()
    assert "curves" not in names and str(tmp_path) in "".join(getattr(output, "text", "") for output in outputs)
