"""What is only drawn does not decide whether a run counts.

A notebook hands its backend on to the shell, as `!python src/run.py ...` in Jupyter and Colab does, and an environment
of its own may lack it: matplotlib then fails at its import, after all steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build
from qerl_core.rundir.checkpoints import is_finished


@pytest.mark.parametrize("backend", ["module://no_such.backend_inline", "no such backend", "TkAgg"])
def test_the_backend_of_the_shell_does_not_matter(backend: str) -> None:
    code = "import qerl_studies.figures.run, matplotlib; print(matplotlib.get_backend())"
    environment = {**os.environ, "MPLBACKEND": backend, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "agg"), done.stderr


def test_a_run_whose_figures_cannot_be_drawn_is_finished_and_says_so(
    make_config: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = []

    def fails(run_dir: Path) -> None:
        seen.append(is_finished(run_dir))
        raise ValueError("Key backend: 'x' is not a valid value")

    monkeypatch.setattr("qerl_studies.figures.run.run_figures", fails)
    cfg = make_config("steps=1", "eval=none", f"root={tmp_path}", "name=one")
    with caplog.at_level("WARNING"):
        run_experiment(build(cfg), cfg)
    assert seen == [True] and is_finished(tmp_path / "runs" / "one")
    assert any("figures are not drawn: ValueError: Key backend" in message for message in caplog.messages)
