"""The worked example of CONTRIBUTING.md is a real option: its two files, as printed there, make a run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_schedule_runs_as_printed(tmp_path: Path) -> None:
    blocks = re.findall(
        r"```(?:python|yaml)\n# (\S+)\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL
    )
    assert [name for name, _ in blocks] == ["src/qerl_bench/aqn/halving.py", "conf/aqn/halving.yaml"]
    for folder in ("src", "kernels", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [
            sys.executable,
            "src/run.py",
            "experiment=smoke",
            "aqn=halving",
            "aqn.stages=3",
            "eval=none",
            f"root={tmp_path}",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}:{tmp_path / 'kernels'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split("sigma ")[1].split()[0] for line in done.stdout.splitlines() if "sigma" in line] == [
        *("1.0e-02", "1.0e-02", "5.0e-03", "5.0e-03", "2.5e-03", "2.5e-03"),
    ]
