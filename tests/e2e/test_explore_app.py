"""The marimo app: its cells fit together, and what it shows is what the study says. Needs no browser.

It runs in processes of its own, because marimo changes how other packages are imported, for all tests after it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from qerl_studies.runs.comparable import load_runs, tidy

pytestmark = pytest.mark.skipif(find_spec("marimo") is None, reason="extra notebooks")
APP = Path(__file__).parents[2] / "notebooks" / "explore.py"
RUNS = Path(__file__).parents[1] / "assets" / "runs"
SHOW = """
import json, runpy, sys
app, study, told = sys.argv[1:]
sys.argv = [app, "--", "--study", study]
outputs, names = runpy.run_path(app, run_name="explore")["app"].run()
shown = {"texts": [getattr(output, "text", "") for output in outputs], "names": sorted(names)}
if "curves" in names:
    shown |= {"first": names["curves"].loc[1].to_dict(), "counts": names["accuracy"]["count"].tolist()}
with open(told, "w") as file:
    json.dump(shown, file)
"""


def shown(study: Path, folder: Path) -> dict[str, Any]:
    """What the app shows of a folder of runs: texts of its outputs, names it defines, first row of its curves."""
    told = folder / "shown.json"
    words = [sys.executable, "-c", SHOW, str(APP), str(study), str(told)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(told.read_text())


def test_marimo_finds_nothing_wrong() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "marimo", "check", "--strict", str(APP)], capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stdout.strip(), done.stdout + done.stderr


def test_the_app_shows_the_means_of_the_chosen_runs(tmp_path: Path) -> None:
    found = shown(RUNS, tmp_path)
    assert any("data:image/png" in text for text in found["texts"])
    table = tidy(load_runs([RUNS]))
    rows = table[(table["kind"] == "train") & (table["metric"] == "reward/mean") & (table["aqn"] == "exp")]
    for quant in ("bf16", "nvfp4"):
        first = rows[(rows["quant"] == quant) & (rows["step"] <= 6)]  # the window of step 1 is steps 1 to 6
        expected = first.groupby("step")["value"].mean().mean()
        assert found["first"][quant] == pytest.approx(expected)
    assert set(found["counts"]) == {2}


def test_a_folder_without_runs_is_answered_in_words(tmp_path: Path) -> None:
    found = shown(tmp_path, tmp_path)
    assert "curves" not in found["names"] and str(tmp_path) in "".join(found["texts"])
