"""The pages of docs/how-to are true: their files and commands, as printed, make runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models import builds

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "how-to"


def follow(page: str, folder: Path) -> list[Path]:
    """Do what the page says in `folder`: write the files, then run the commands. Returns the runs, sorted by name."""
    text = (PAGES / page).read_text()
    files = re.findall(r"`(mine/\S+)`:\n\n```\w+\n(.*?)```", text, flags=re.DOTALL)
    commands = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    assert files and commands and len(files) + len(commands) == text.count("```") // 2
    for name, content in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    program = folder / "bin" / "qerl-bench"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m qerl_bench "$@"\n')
    program.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != "QERL_ROOT"} | {
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'kernels'}",
        "OMP_NUM_THREADS": "1",
    }
    for command in commands:
        done = subprocess.run(
            ["sh", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stderr
    return sorted(run.parent for run in folder.glob("runs/*/done.json"))


def trained(run: Path) -> list[dict[str, Any]]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == "train"]


def test_every_page_is_tested() -> None:
    assert [page.name for page in sorted(PAGES.iterdir())] == ["own-model.md", "own-schedule.md", "own-task.md"]


@pytest.mark.slow
def test_own_schedule(tmp_path: Path) -> None:
    runs = follow("own-schedule.md", tmp_path)
    assert sorted([record["aqn/sigma"] for record in trained(run)] for run in runs) == [
        [0.01, 0.01, 0.005, 0.005, 0.0025, 0.0025],
        [0.02, 0.02, 0.01, 0.01, 0.005, 0.005],
    ]
    for run in runs:
        environment = json.loads((run / "env.json").read_text())
        assert list(environment["own_code"]) == ["halving.py"]


@pytest.mark.slow
def test_own_task_and_reward(tmp_path: Path) -> None:
    brief, run = sorted(
        follow("own-task.md", tmp_path), key=lambda run: "name: spelling" in (run / "config.yaml").read_text()
    )
    assert all(record["reward/mean"] < 0 for record in trained(brief))  # wrong, and longer than nothing
    assert [*json.loads((brief / "env.json").read_text())["own_code"]] == ["brief.py"]
    assert "-spelling-" not in run.name and "name: spelling" in (run / "config.yaml").read_text()
    groups = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert groups[0]
    near = [record["reward/near"] for record in trained(run)]
    assert all(0 < value < 1 for value in near)
    assert [record["reward/mean"] for record in trained(run)] == pytest.approx([0.5 * value for value in near])


@pytest.mark.slow
def test_own_model(tmp_path: Path) -> None:
    builds.build("llama", tmp_path / "checkpoints" / "mini")
    (run,) = follow("own-model.md", tmp_path)
    assert run.name.startswith("mini-nvfp4-exp-grpo-")
    assert all(record["grad_norm"] > 0 for record in trained(run))
    assert trained(run)[-1]["aqn/norms_perturbed"] > 0
