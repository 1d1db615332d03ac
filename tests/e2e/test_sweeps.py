"""The first and the last point of each file in sweeps/, started as `wandb agent` does, but for its server."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from qerl_core.process.installation import CONF_DIR
from tests.parallel.programs import UNDRAWN
from tests.startable import startable
from tests.wandb_agent import agent_commands

ROOT = CONF_DIR.parent
AGENT = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_SWEEP_ID": "sweep", "WANDB_RUN_ID": "chosen"}


def test_there_are_sweeps() -> None:
    assert [*(ROOT / "sweeps").glob("*.yaml")]


@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("file", sorted((ROOT / "sweeps").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_point_runs(file: Path, which: int, tmp_path: Path, programs: Path) -> None:
    command = [*agent_commands(yaml.safe_load(file.read_text()))][which]
    words = command[command.index("src/run.py") + 1 :]
    here = [*startable(words, tmp_path)[len(words) :], f"root={tmp_path}"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")} | AGENT
    environment |= {"PATH": f"{programs}{os.pathsep}{environment['PATH']}", "OMP_NUM_THREADS": "1", UNDRAWN: "1"}
    done = subprocess.run([*command, *here], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = tmp_path.glob("runs/*/done.json")
    (mirrored,) = run.parent.glob("wandb/offline-run-*-chosen/run-chosen.wandb")
    assert mirrored.stat().st_size > 0
