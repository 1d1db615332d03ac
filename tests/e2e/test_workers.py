"""Files of sweeps/cluster: several workers start one command in one folder, and each run is made once.

Not tried: the clusters themselves. Locks between machines are in tests/unit/test_lease.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.parallel.programs import UNDRAWN

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "sweeps" / "cluster").glob("*.yaml"))
LITTLE = (
    "experiment=smoke steps=2 eval=none device=cpu rollout.group_size=4 model.layers=1 task.max_completion_tokens=8"
)
VARIABLES = [  # of the workers of one sweep, as three systems tell them apart
    {"JOB_COMPLETION_INDEX": "0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    {"JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.2\n10.0.0.3"},
    {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "7"},
]


def command(file: Path) -> tuple[list[str], int]:
    """The words that each worker starts, and how many workers there are."""
    content: Any = yaml.safe_load(file.read_text())
    if file.stem == "kubernetes":
        (container,) = content["spec"]["template"]["spec"]["containers"]
        assert content["spec"]["parallelism"] == content["spec"]["completions"]
        return ["qerl-bench", *container["args"]], content["spec"]["completions"]
    if file.stem == "skypilot":
        return shlex.split(content["run"]), content["num_nodes"]
    words = shlex.split(content["spec"]["entrypoint"])
    assert words[:2] == ["python", "-c"]
    compile(words[2], "entrypoint", "exec")
    (group,) = content["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert f"range({group['replicas']})" in words[2]
    return re.findall(r"'(qerl-bench .*?)'", words[2])[0].split(), group["replicas"]


def test_every_file_starts_the_same_command_on_as_many_workers() -> None:
    assert [file.stem for file in FILES] == ["kubernetes", "ray", "skypilot"]
    words, workers = command(FILES[0])
    assert all(command(file) == (words, workers) for file in FILES) and workers == len(VARIABLES)


@pytest.mark.slow
def test_each_run_of_several_workers_is_made_once(tmp_path: Path, programs: Path) -> None:
    words, _ = command(FILES[0])
    changed = {"seed=range(8)": "seed=range(3)", "root=/shared": f"root={tmp_path}"}
    assert changed.keys() <= {*words}
    here = [*(changed.get(word, word) for word in words), *LITTLE.split()]
    shell = {key: value for key, value in os.environ.items() if key != "QERL_ROOT"}
    shell |= {"PATH": f"{programs}{os.pathsep}{shell['PATH']}", "OMP_NUM_THREADS": "1", UNDRAWN: "1"}
    logs = [tmp_path / f"worker_{number}.log" for number, _ in enumerate(VARIABLES)]
    workers = []
    for log, variables in zip(logs, VARIABLES, strict=True):
        with log.open("w") as output:
            workers.append(subprocess.Popen(here, env=shell | variables, cwd=tmp_path, stdout=output, stderr=output))
    assert [worker.wait(timeout=500) for worker in workers] == [0] * 4, "".join(log.read_text() for log in logs)

    runs = sorted(file.parent for file in tmp_path.glob("runs/*/done.json"))
    assert len(runs) == len({*tmp_path.glob("runs/tiny_untrained-*")}) == 6
    said = Counter(name for log in logs for name in re.findall(r"done   (\S+) in", log.read_text()))
    assert said == {run.name: 1 for run in runs}
    for run in runs:
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2]
        assert not [*run.glob("env_*.json")], "a second attempt keeps the environment of the first"


def test_a_worker_is_no_rank_of_what_kubernetes_says(tmp_path: Path, programs: Path) -> None:
    """The training operators set these for torch.distributed; a sweep of this program is no such job."""
    words, _ = command(FILES[0])
    given = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0", "MASTER_PORT": "23456"}
    shell = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"} | given
    done = subprocess.run([*words[:-1], f"root={tmp_path}"], env=shell, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "env -u RANK -u WORLD_SIZE" in " ".join(done.stderr.split())
    assert not [*tmp_path.iterdir()]
