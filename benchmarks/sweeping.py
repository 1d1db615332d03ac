"""How long a sweep of small runs takes, with runs that import by themselves and with forks of one that has imported.

`python benchmarks/sweeping.py --runs 20 --slots 2 --rounds 3` repeats both kinds in turn, so that other work on the
machine meets both. CPU seconds are those of all processes of a sweep. The runs of both must have learned the same.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from qerl_core.process.installation import run_command

MEASURED = ("time", "speed/", "memory/")  # metrics that differ between two equal runs


def cpu_s() -> float:
    """CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def sweep(root: Path, words: list[str]) -> tuple[float, float]:
    """Wall-clock and CPU seconds of one sweep."""
    wall, cpu = time.perf_counter(), cpu_s()
    done = subprocess.run([*run_command(), *words, f"root={root}", "-m"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the sweep failed:\n{done.stderr}")
    return time.perf_counter() - wall, cpu_s() - cpu


def learned(root: Path) -> dict[str, list[dict[str, object]]]:
    """What each run of a sweep wrote to metrics.jsonl, but for what was measured by a clock."""
    found = {}
    for file in sorted(root.glob("runs/*/metrics.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        found[file.parent.name] = [
            {key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in lines
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    words = ["experiment=smoke", "device=cpu", f"seed=range({given.runs})", f"hydra.launcher.slots={given.slots}"]
    kinds: dict[str, list[tuple[float, float]]] = {"false": [], "true": []}
    first = None
    print(f"{given.runs} smoke runs, {given.slots} at a time\n\n| round | preload | s | CPU s |\n|---|---|---|---|")
    for number in range(1, given.rounds + 1):
        for preload, rows in kinds.items():
            with TemporaryDirectory() as folder:
                rows.append(sweep(Path(folder), [*words, f"hydra.launcher.preload={preload}"]))
                results = learned(Path(folder))
            first = first or results
            if results != first or len(results) != given.runs:
                sys.exit("the runs of two sweeps differ in what they have learned")
            print(f"| {number} | {preload} | {rows[-1][0]:.1f} | {rows[-1][1]:.1f} |", flush=True)
    for index, unit in enumerate(("wall-clock", "CPU")):
        ratios = [fresh[index] / forked[index] for fresh, forked in zip(*kinds.values(), strict=True)]
        said = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"\n{unit}: forked runs are {statistics.median(ratios):.2f} times as fast (rounds: {said})")
    print("\nall metrics of all runs are equal but those of time and memory")


if __name__ == "__main__":
    main()
