"""A real Slurm for tests: a controller, two nodes with two fake GPUs each, and munge, all on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
GPUS = {"n1": ("/dev/null", "/dev/zero"), "n2": ("/dev/full", "/dev/random")}  # files that every machine has

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge},cred_expire=5
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd-%n.log
SlurmctldPort={port}
SlurmdTimeout=20
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
GresTypes=gpu
MpiDefault=none
SwitchType=switch/none
MinJobAge=10
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=2 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=2 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """The daemons by name; `environment` makes Slurm's commands find them."""

    def __init__(self, place: Path) -> None:
        self.place = place
        ports = [free_port() for _ in range(3)]
        (place / "state").mkdir(parents=True)
        for node in GPUS:
            (place / f"spool-{node}").mkdir()
        names = {"host": socket.gethostname(), "place": place, "munge": place / "munge.socket"}
        text = CONF.format(**names, port=ports[0], port1=ports[1], port2=ports[2])
        (place / "slurm.conf").write_text(text)
        gres = [f"NodeName={node} Name=gpu File={file}" for node, files in GPUS.items() for file in files]
        (place / "gres.conf").write_text("\n".join(gres) + "\n")
        self.environment = {**os.environ, "SLURM_CONF": str(place / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        conf = str(self.place / "slurm.conf")
        words = {
            "munged": [
                "munged", "--foreground", f"--socket={self.place}/munge.socket", f"--key-file={self.place}/munge.key",
                f"--pid-file={self.place}/munge.pid", f"--seed-file={self.place}/munge.seed",
                f"--log-file={self.place}/munge.log", "--force",
            ],
            "slurmctld": ["slurmctld", "-D", "-f", conf],
        }  # fmt: skip
        command = words.get(name, ["slurmd", "-D", "-N", name, "-f", conf])
        with open(self.place / f"{name}.out", "ab") as log:
            self.daemons[name] = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)

    def kill(self, name: str) -> None:
        """As a power loss does; with a node go its jobs."""
        if name in GPUS:
            for line in subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout.splitlines():
                pid, _, words = line.strip().partition(" ")
                if words.startswith("slurmstepd: ["):
                    step = words.split("[")[1].split(".")[0]
                    if self.ask("squeue", "-h", "-j", step, "-o", "%N").strip() == name:
                        kill_tree(int(pid))
        daemon = self.daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def ask(self, *words: str) -> str:
        return subprocess.run(words, capture_output=True, text=True, env=self.environment).stdout

    def wait_for_nodes(self, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while self.ask("sinfo", "-h", "-N", "-o", "%T").split() != ["idle", "idle"]:
            assert time.monotonic() < end, f"Slurm did not start; see {self.place}"
            time.sleep(0.2)

    def stop(self) -> None:
        self.ask("scancel", "--user", "root")
        end = time.monotonic() + 20
        while "slurmctld" in self.daemons and self.ask("squeue", "-h").strip() and time.monotonic() < end:
            time.sleep(0.2)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()


def kill_tree(pid: int) -> None:
    """Kill a process and all that it started."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True).stdout.splitlines()[1:]
    parents = {int(child): int(parent) for child, parent in (line.split() for line in listed)}
    doomed = [pid]
    for known in doomed:
        doomed += [child for child, parent in parents.items() if parent == known]
    for one in doomed:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    if find_spec("submitit") is None:
        return "the extra `slurm`, which make test-cluster installs"
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    if lacking:
        return f"no {', '.join(lacking)}: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "slurmd needs root"


@contextmanager
def cluster(place: Path) -> Iterator[Slurm]:
    slurm = Slurm(place)
    key = place / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    try:
        slurm.start("munged")
        for _ in range(100):
            if (place / "munge.socket").exists():
                break
            time.sleep(0.1)
        for name in ("slurmctld", *GPUS):
            slurm.start(name)
        slurm.wait_for_nodes()
        yield slurm
    finally:
        slurm.stop()
