"""hydra/launcher=ray: every point is a task of a Ray cluster that is running already.

Runs end with this program, as with hydra/launcher=process: they save a checkpoint, and the same command continues them.
Needs Ray's core only.
"""

# pyright: reportMissingImports=false

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from qerl_bench.checks import ConfigError, count, number, require, require_package, text
from qerl_bench.process.children import STOP_LIMIT_S
from qerl_bench.process.failure import reason_of, size_of
from qerl_bench.process.gpu_share import RUNS_ON_GPU
from qerl_bench.rundir.checkpoints import is_finished
from qerl_bench.rundir.refusals import CODE as REFUSED
from qerl_bench.rundir.refusals import discard
from qerl_bench.sweep.job import Job
from qerl_bench.sweep.launcher import SweepLauncher, check_ranks, not_running, pairs, unfinished
from qerl_bench.sweep.points import Point

log = logging.getLogger(__name__)
TELL_EVERY_S = 60.0
CONNECT_S = 10.0


@dataclass
class RayLauncherConf:
    _target_: str = "hydra_plugins.ray_launcher.launcher.RayLauncher"
    address: str = "auto"  # auto = the cluster of this machine (ray start), local = a new one here, or HOST:PORT
    gpus: float = 1.0  # of each run; may be a share of one
    ranks: int = 1  # processes of each run, started by torchrun if more than one; then gpus must be ranks or 0
    cpus: float = 1.0  # cores of each run
    mem_gb: float = 0.0  # memory that each run reserves, GB
    max_retries: int = 3  # times that a run whose node was lost goes on in another
    resources: Any = None  # others: {"accelerator_type:H100": 0.001}; no typed dict, which Hydra adds no keys to
    dry_run: bool = False  # true: print the points, and what the cluster has


ConfigStore.instance().store(group="hydra/launcher", name="ray", node=RayLauncherConf, provider="ray_launcher")


class RayLauncher(SweepLauncher):
    """Start the points as tasks, as many at a time as the cluster has room for."""

    def __init__(self, **options: Any) -> None:
        self.conf = RayLauncherConf(**options)

    def check(self) -> None:
        conf = self.conf
        checks = {
            **dict.fromkeys(("gpus", "mem_gb"), number(0)),
            **dict.fromkeys(("address",), text),
            "cpus": number(above=0),
            "ranks": count(),
            "max_retries": count(0),
            "resources": pairs,
        }
        for name, check in checks.items():
            check(f"hydra.launcher.{name}", getattr(conf, name))
        check_ranks(conf.gpus, conf.ranks)
        require_package("ray", "hydra/launcher=ray", "ray")

    def run_points(self, points: Sequence[Point]) -> list[tuple[Point, str]]:
        todo = unfinished(points)
        if not todo:
            return []
        import ray

        self.connect()
        try:
            require_room(self.wanted(), [node["Resources"] for node in ray.nodes() if node["Alive"]])
            if self.conf.dry_run:
                print("\n".join([f"{len(todo)} runs, not started:", *(f"  {' '.join(p.overrides)}" for p in todo)]))
                print(f"the cluster has {ray.cluster_resources()}")
                return []
            return self.run(not_running(todo))
        finally:
            ray.shutdown()

    def connect(self) -> None:
        """Connect to the cluster. Raises ConfigError if there is none."""
        import ray

        host, _, port = self.conf.address.rpartition(":")
        try:
            if host and port.isdecimal():  # where nobody listens, Ray would try for minutes
                socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
            ray.init(address=self.conf.address, log_to_driver=False, logging_level=logging.WARNING)
        except (OSError, ValueError, RuntimeError) as error:  # a ConnectionError, too
            said = " ".join(str(error).split())
            raise ConfigError(
                f"hydra.launcher.address={self.conf.address}: no Ray cluster answers ({said}). Start one (ray start "
                "--head here, ray start --address=HOST:6379 on the other machines), or use hydra.launcher.address=local"
            ) from error

    def wanted(self) -> dict[str, float]:
        """What a run takes of its node."""
        conf = self.conf
        wanted = {"CPU": conf.cpus, "GPU": conf.gpus, "memory": conf.mem_gb * 1e9, **(conf.resources or {})}
        return {name: float(amount) for name, amount in wanted.items() if amount}

    def run(self, points: Sequence[Point]) -> list[tuple[Point, str]]:
        """Run `points`; the failed ones, each with the reason."""
        import ray
        from ray.exceptions import RayError

        wanted = self.wanted()
        task = ray.remote(
            num_cpus=wanted.pop("CPU"),
            num_gpus=wanted.pop("GPU", 0),
            memory=wanted.pop("memory", 0),
            resources=wanted,
            max_retries=self.conf.max_retries,
        )(run_job)
        sizes = {point.name: size_of(point.run_dir / "run.log") for point in points}
        new = {point.name for point in points if not point.run_dir.exists()}
        left = {task.remote(self.job(point)): point for point in points}
        failed, told = [], time.monotonic()
        try:
            while left:
                ended, _ = ray.wait([*left], timeout=1.0)
                for reference in ended:
                    point = left.pop(reference)
                    try:
                        code = ray.get(reference)
                        reason = reason_of(point.run_dir, code, sizes[point.name])
                    except RayError as error:
                        code, reason = 1, " ".join(str(error).split())
                    if is_finished(point.run_dir):
                        log.info("done   %s", point.name)
                    elif code == os.EX_TEMPFAIL:
                        log.info("%s is running in another process; left to it", point.name)
                    else:
                        failed.append((point, reason))
                        log.info("ended  %s: %s", point.name, reason)
                        if code == REFUSED and point.name in new:
                            discard(point.run_dir)
                if time.monotonic() - told > TELL_EVERY_S:
                    told = time.monotonic()
                    log.info("%d of %d runs ended", len(points) - len(left), len(points))
        except BaseException:
            stop(list(left))
            raise
        return failed

    def job(self, point: Point) -> Job:
        shared = {RUNS_ON_GPU: str(int(1 / self.conf.gpus))} if 0 < self.conf.gpus < 1 else {}
        return Job(
            overrides=point.overrides,
            run_dir=point.run_dir,
            cwd=Path.cwd(),
            ranks=self.conf.ranks,
            environment=shared | dict(os.environ),
        )


def run_job(job: Job) -> int:
    """What a worker does. Imported by it, so its file system must have this package in the same place."""
    return job.run()


def stop(references: list[Any]) -> None:
    """Have the runs save a checkpoint and end; those that wait for their turn do not begin."""
    import ray

    log.info("stopping %d runs; they save a checkpoint, and the same command continues them", len(references))
    for reference in references:
        ray.cancel(reference)
    ray.wait(references, num_returns=len(references), timeout=STOP_LIMIT_S)


def require_room(wanted: dict[str, float], nodes: list[dict[str, float]]) -> None:
    """Raise ConfigError unless a run fits into one of the nodes; Ray would wait for one without end."""
    offers = Counter(
        ", ".join(f"{name} {amount:g}" for name, amount in sorted(node.items()) if is_shown(name)) for node in nodes
    )
    require(
        any(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes),
        f"no node of the Ray cluster has room for a run, which takes {wanted}. The nodes have "
        f"{'; '.join(f'{number} x ({offer})' for offer, number in offers.items())}. Lower hydra.launcher.gpus, cpus, "
        "mem_gb or resources, or start Ray on a larger node",
    )


def is_shown(name: str) -> bool:
    return not name.startswith(("node:", "object_store", "memory"))
