"""Sweeps on a Ray cluster of two nodes with two fake GPUs each, on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.runs import Expected, Sweeps, finished, require_numbers, wait_until

pytest.importorskip("ray", reason="the extra `ray`, which make test-cluster installs")
pytestmark = pytest.mark.cluster
# Ray's own test cluster, in a process of its own, whose warnings are not ours. It loses a node for each line it reads.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster()
room = {"num_cpus": 2, "object_store_memory": 80 << 20}
cluster.add_node(**room, num_gpus=0)
nodes = [cluster.add_node(**room, num_gpus=2, resources={f"n{number}": 1}) for number in range(2)]
cluster.wait_for_nodes()
print(cluster.address, flush=True)
for line in sys.stdin:
    cluster.remove_node(nodes[int(line)], allow_graceful=False)
    print("lost", flush=True)
cluster.shutdown()
"""


class Ray:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env={**os.environ, "RAY_worker_niceness": "0"},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, "Ray's test cluster did not start; it gives each node 30 s, too few under load"

    def lose(self, node: int) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{node}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "lost\n"

    def stop(self) -> None:
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def ray() -> Iterator[Ray]:
    cluster = Ray()
    yield cluster
    cluster.stop()


@pytest.fixture
def sweeps(ray: Ray, tmp_path: Path) -> Iterator[Sweeps]:
    started = Sweeps(tmp_path, {**os.environ}, ("hydra/launcher=ray", f"hydra.launcher.address='{ray.address}'"))
    yield started
    started.stop()


def test_a_sweep_equals_that_of_the_process_launcher_and_one_failure_does_not_hurt_the_others(
    sweeps: Sweeps, expected: Expected
) -> None:
    sweeps.hurry.touch()
    obstacle = sweeps.folder(1) / "metrics.jsonl"
    obstacle.mkdir(parents=True)
    code, said = sweeps.run("seed=0,1")
    assert code == 1, said
    assert "1 of 2 runs failed" in said and "run-1: IsADirectoryError" in said
    obstacle.rmdir()
    code, said = sweeps.run("seed=0,1")
    assert code == 0 and "1 finished before, 1 to do" in said, said
    for seed in range(2):
        require_numbers(sweeps.folder(seed), expected(seed))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("hydra.launcher.gpus=3", ["'GPU': 3", "GPU 2"]),
        ("hydra.launcher.address='127.0.0.1:1'", ["127.0.0.1:1", "ray start"]),
    ],
)
def test_what_cannot_work_is_refused_in_words_and_leaves_nothing(sweeps: Sweeps, words: str, says: list[str]) -> None:
    code, said = sweeps.run("seed=0,1", words)
    assert code == 2 and "Traceback" not in said
    assert all(word in said for word in says), said
    assert [*sweeps.place.glob("runs/run-*")] == []


def test_what_happens_to_the_launcher_and_to_a_node_costs_no_numbers(
    ray: Ray, sweeps: Sweeps, expected: Expected
) -> None:
    """The launcher is stopped, and started again; then a node is lost, and its run goes on in the other."""
    words = ("seed=0,1",)
    launcher = sweeps.start(*words)
    wait_until(lambda: all(sweeps.steps(seed) >= 2 for seed in range(2)))
    launcher.process.send_signal(signal.SIGINT)
    code, said = launcher.ended()
    assert code == 130 and "stopping 2 runs" in said, said
    assert all([*sweeps.folder(seed).glob("checkpoints/step_*")] for seed in range(2))
    made = [sweeps.steps(seed) for seed in range(2)]
    launcher = sweeps.start(*words)
    wait_until(lambda: all(sweeps.steps(seed) > made[seed] + 1 for seed in range(2)))
    ray.lose(0)
    sweeps.hurry.touch()
    code, said = launcher.ended()
    assert code == 0, said
    for seed in range(2):
        assert finished(sweeps.folder(seed))
        require_numbers(sweeps.folder(seed), expected(seed))
