"""What more GPUs save of a step: each shape trained with every number of ranks, one run at a time, and a table.

python -m tests.parallel.speed --root DIR                           # 7B and 32B, 1 and 2 ranks
python -m tests.parallel.speed --root DIR --shapes 7b --ranks 1 4 --words quant=nf4 steps=8
python -m tests.parallel.speed --root DIR --shapes tiny --words device=cpu task.completion_tokens=8 ...

A step is that of experiment=speed/step: 512 completions of very different lengths. All ranks have the same words, so
the work is the same; times and memory are medians and maxima without the first step, which records and compiles. The
same command continues runs that were stopped and skips finished ones.
DIR/speed.csv has the table, DIR/NAME.log what each run printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd

from qerl_core.checks import TrainingStopped, require
from qerl_core.exits import guarded
from qerl_core.process.arguments import KeyValueParser
from qerl_core.process.installation import run_command
from qerl_core.rundir.read_files import read_object
from qerl_studies.runs.load import Run, load_run
from qerl_studies.runs.measure import warm_steps

WORDS = ("experiment=speed/step", "quant=nvfp4", "engine=hf", "engine.cache_gib=8", "steps=4", "save_every=1", "seed=0")
TIMES = ("step", "rollout", "train", "reward", "idle")


def main(arguments: list[str] | None = None) -> None:
    parser = KeyValueParser(__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder for the runs and the table")
    parser.add_argument("--shapes", nargs="+", default=["7b", "32b"], help="options of model=shape/")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="numbers of processes")
    parser.add_argument("--words", nargs="+", default=[], help="words for every run, such as quant=nf4")
    given = parser.parse_args(arguments)
    require(min(given.ranks) >= 1, f"--ranks must be at least 1, got {min(given.ranks)}")
    given.root.mkdir(parents=True, exist_ok=True)
    failed, rows = [], []
    for shape in given.shapes:
        for ranks in given.ranks:
            name = f"{shape}-ranks-{ranks}"
            if make_run(name, shape, ranks, given.root, given.words):
                rows.append(row(load_run(given.root / "runs" / name), shape, ranks))
            else:
                failed.append(name)
    if rows:
        table = with_ratios(pd.DataFrame(rows))
        table.to_csv(given.root / "speed.csv", index=False, float_format="%.6g")
        print(table.to_string(index=False, float_format="{:.4g}".format))
    if failed:
        raise TrainingStopped(f"{', '.join(failed)} failed; see {given.root}/NAME.log. The same command repeats them")


def make_run(name: str, shape: str, ranks: int, root: Path, words: list[str]) -> bool:
    """Make or continue a run; whether it is finished. Says how long it took."""
    command = [*run_command(ranks), *WORDS, f"model=shape/{shape}", f"name={name}", f"root={root}", *words]
    started = time.monotonic()
    with open(root / f"{name}.log", "a") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ).returncode
    print(f"{name}: exit code {code} after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return code == 0


def row(run: Run, shape: str, ranks: int) -> dict[str, object]:
    """Seconds, tokens a second, GiB. Raises ConfigError if an attempt of the run had another number of ranks."""
    attempts = {read_object(path, "Delete the run").get("ranks", 1) for path in run.path.glob("env*.json")}
    require(attempts == {ranks}, f"{run.path} was made with {sorted(attempts)} ranks, not {ranks}; choose another root")
    rates = {f"{part}_tok_s": warm_steps(run, f"speed/{part}_tok_s").median() for part in ("rollout", "train")}
    return {
        "shape": shape,
        "ranks": ranks,
        "device": run.device,
        "steps": len(warm_steps(run, "time/step_s")),
        **{f"{part}_s": warm_steps(run, f"time/{part}_s").median() for part in TIMES},
        **rates,
        "peak_gib": warm_steps(run, "memory/peak_gib").max(),
        "tokens": warm_steps(run, "completions/tokens").mean(),
    }


def with_ratios(table: pd.DataFrame) -> pd.DataFrame:
    """How many times faster than with the fewest ranks a step is, and its rollout and its training."""
    ordered = table.sort_values("ranks")
    for part in ("step", "rollout", "train"):
        fewest = ordered.groupby("shape")[f"{part}_s"].transform("first")
        table[f"{part}_x"] = fewest / table[f"{part}_s"]
    return table


if __name__ == "__main__":
    guarded(main)
