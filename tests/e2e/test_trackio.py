"""logger=trackio with the real package: what its database holds after a kill and a resume."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MIRROR = """
import json
from pathlib import Path

from qerl_bench.logger.trackio import Trackio

spec = Trackio(name="trackio", project="p", names=None)
config = {"name": "a-s3-b", "seed": 3, "quant": {"_target_": "x.Y", "name": "nvfp4"}}
records = [{"kind": "eval", "step": 0, "time": 0.0, "eval/a": 0.5}]
records += [{"kind": "train", "step": step, "time": 0.0, "loss": step / 10} for step in range(1, 5)]
records.insert(3, {"kind": "validation", "step": 2, "time": 0.0, "validation/a": 0.25})
run_dir = Path("runs/a-s3-b")
run_dir.mkdir(parents=True)
spec.check()
killed = spec.mirror(run_dir, records[:4], config)
killed.__exit__(RuntimeError, None, None)  # it has steps 0 to 2; the checkpoint is of step 4
with spec.mirror(run_dir, records, config) as mirror:
    mirror.log("train", 5, {"loss": float("nan")})
    mirror.log("eval", 5, {"eval/a": 0.75})
from trackio.sqlite_storage import SQLiteStorage

logs = SQLiteStorage.get_logs("p", run="a-s3-b")
print(json.dumps([logs, SQLiteStorage.get_run_config("p", "a-s3-b")]))
"""


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="extra trackio is not installed")
def test_a_resumed_run_is_in_the_database_once(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRACKIO_")} | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", MIRROR], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0 and "is off" not in done.stderr, done.stderr
    logs, config = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[")))
    rows = [(row["step"], row.get("loss"), row.get("eval/a"), row.get("validation/a")) for row in logs]
    assert len(rows) == 8 and math.isnan(float(next(loss for step, loss, *_ in rows if step == 5 and loss is not None)))
    assert {row for row in rows if row[0] < 5} == {
        (0, None, 0.5, None), (1, 0.1, None, None), (2, 0.2, None, None), (2, None, None, 0.25), (3, 0.3, None, None),
        (4, 0.4, None, None),
    }  # fmt: skip
    assert (5, None, 0.75, None) in rows
    assert config["quant"] == {"_target_": "x.Y", "name": "nvfp4"} and config["_Group"] == "a-b"
