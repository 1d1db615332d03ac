"""Each notebook runs from top to bottom on small made-up runs, and is committed without outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


def write_run(folder: Path, quant: str, aqn: str, algo: str, seed: int, steps: int = 30) -> None:
    folder.mkdir(parents=True)
    config = {
        "name": folder.name,
        "steps": steps,
        "seed": seed,
        "quant": {"name": quant},
        "quantizer": {"name": "rtn"},
        "aqn": {"name": aqn},
        "algo": {"name": algo},
        "lora": {"name": "default", "rank": 32},
        "model": {"name": "tiny"},
        "task": {"name": "arithmetic"},
        "optim": {"lr": 0.001},
    }
    lines = []
    for step in range(1, steps + 1):
        line = {"kind": "train", "step": step, "time": 1.79e9 + step, "loss": 1 / step, "memory/peak_gib": 0.5}
        if algo != "sft":
            sigma = 0.0 if aqn == "none" or step <= 10 else 0.01 / step
            line |= {"reward/mean": 0.4 + step / 100, "accuracy": 0.3 + step / 100 + seed / 50, "aqn/sigma": sigma}
            line |= {"entropy": 1 / step + sigma, "entropy_clean": 1 / step, "speed/rollout_tok_s": 2000.0}
        lines.append(line)
    for step in (0, steps):
        accuracies = {"eval/accuracy_greedy": 0.5 + step / 100, "eval/accuracy_sampled": 0.4 + step / 100}
        errors = {f"{name}_stderr": 0.02 for name in accuracies}
        lines.append({"kind": "eval", "step": step, "time": 1.79e9 + step, **accuracies, **errors})
    (folder / "config.yaml").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "done.json").write_text(json.dumps({"wall_s": 1.0, "final": {}, "peak_memory_gib": 0.5}))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for quant in ("bf16", "nvfp4"):
        for aqn in ("none", "exp"):
            for seed in (0, 1):
                write_run(root / f"{quant}-{aqn}-grpo-r32-s{seed}", quant, aqn, "grpo", seed)
    write_run(root / "bf16-none-sft-r32-s0", "bf16", "none", "sft", 0)
    return root


def test_there_are_notebooks() -> None:
    assert "start_here.ipynb" in [notebook.name for notebook in NOTEBOOKS]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, runs: Path, tmp_path: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    source = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    script = tmp_path / f"{notebook.stem}.py"
    script.write_text(source)
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=notebook.parent,
        env={**os.environ, "QERL_RUNS_DIR": str(runs)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "nvfp4-exp-grpo-r32-s1" in done.stdout


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stripped(notebook: Path) -> None:
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, "".join(cell["source"])
