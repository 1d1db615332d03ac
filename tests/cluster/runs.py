"""Sweeps of runs that take seconds per step on any machine, until they are told to hurry; started as users do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from qerl_bench.aqn.base import Schedule
from qerl_core.process.arguments import whole
from qerl_core.sweeps import slurm_queue
from tests.faults.run import WORDS, numbers

ROOT = Path(__file__).parents[2]
TINY = [word for word in WORDS[1:] if not word.startswith(("name=", "aqn=", "steps="))]
STEPS = 24
Expected = Callable[[int], dict[str, Any]]  # the numbers of a run by its seed
OPTION = "_target_: tests.cluster.runs.Slow\nname: slow\nlevel: 0.01\nseconds: 3.0\n"
HURRY = "QERL_TEST_HURRY"  # environment variable: a file that makes runs hurry when it is there
if HURRY in os.environ:  # in a run, which then draws no figures, and in what starts it: both take seconds less
    sys.modules["qerl_studies.figures.run"] = ModuleType("figures")
    sys.modules["qerl_studies.figures.run"].run_figures = lambda path: None  # type: ignore[attr-defined]
    slurm_queue.POLL_S = (0.5, 1.0)
PASSED: set[int] = set()  # steps that have taken their time; a checkpoint asks for the noise of its step again


@dataclass(frozen=True, kw_only=True)
class Slow(Schedule):
    """Constant noise that takes its time."""

    name: str
    level: float
    seconds: float

    def sigma(self, step: int, total_steps: int) -> float:
        end = time.monotonic() + (0 if step in PASSED else self.seconds)
        PASSED.add(step)
        while time.monotonic() < end and not Path(os.environ[HURRY]).exists():
            time.sleep(0.05)
        return self.level


@dataclass(frozen=True)
class Started:
    """A sweep that goes on, and the file with its output."""

    process: subprocess.Popen[bytes]
    output: Path

    def wait_for(self, words: str) -> None:
        wait_until(lambda: words in self.output.read_text() or self.process.poll() is not None)
        assert words in self.output.read_text()

    def ended(self, seconds: float = 900) -> tuple[int, str]:
        """Exit code and output."""
        return self.process.wait(seconds), whole(self.output.read_text())


@dataclass(frozen=True)
class Sweeps:
    """Where sweeps are started, with what environment, and by which launcher."""

    place: Path
    environment: dict[str, str]
    launcher: tuple[str, ...]
    started: list[Started] = field(default_factory=list)

    @property
    def hurry(self) -> Path:
        return self.place / "hurry"

    def words(self, *words: str) -> list[str]:
        options = self.place / "options" / "aqn"
        options.mkdir(parents=True, exist_ok=True)
        (options / "slow.yaml").write_text(OPTION)
        program = [sys.executable, str(ROOT / "src" / "run.py"), "-m"]
        own = [f"hydra.searchpath=['file://{options.parent}']", "aqn=slow", "name=run-${seed}", f"root={self.place}"]
        return [*program, *own, f"steps={STEPS}", *TINY, *self.launcher, *words]

    def start(self, *words: str) -> Started:
        environment = {**self.environment, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", HURRY: str(self.hurry)}
        output = self.place / f"said-{len([*self.place.glob('said-*')])}"
        with open(output, "w") as file:
            process = subprocess.Popen(self.words(*words), env=environment, stdout=file, stderr=subprocess.STDOUT)
        self.started.append(Started(process, output))
        return self.started[-1]

    def stop(self) -> None:
        """End what a failed test has left."""
        for started in self.started:
            started.process.kill()
            started.process.wait()

    def run(self, *words: str) -> tuple[int, str]:
        """Exit code and output."""
        return self.start(*words).ended()

    def folder(self, seed: int) -> Path:
        return self.place / "runs" / f"run-{seed}"

    def steps(self, seed: int) -> int:
        """Training steps that the run has recorded."""
        path = self.folder(seed) / "metrics.jsonl"
        return path.read_text().count('"train"') if path.exists() else 0


def finished(folder: Path) -> bool:
    return (folder / "done.json").exists()


def require_numbers(folder: Path, expected: dict[str, Any]) -> None:
    """A run that was stopped has one more checkpoint, where it was stopped; all else is equal bit for bit."""
    found = numbers(folder)
    kept = {name: adapter for name, adapter in found["adapters"].items() if name in expected["adapters"]}
    assert {**found, "adapters": kept} == expected


def python_path() -> str:
    return os.pathsep.join([str(ROOT), str(ROOT / "src"), str(ROOT / "kernels")])


def wait_until(happened: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.1)
