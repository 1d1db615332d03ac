"""What reading many runs takes: CPU seconds and peak memory of claims, report and compare.

`python benchmarks/reading.py --runs 1000` writes so many runs with made-up numbers into a temporary folder, as finished
runs lie there (config, env.json, numbers of each step, answers, seals), and starts each command on them in a process of
its own. `--in DIR` keeps the runs, and reads those that are there. The digest is of all that a command printed and
wrote: equal ones are equal results, byte for byte. Eight settings, five bases, and as many seeds as it takes; a
thousand runs are a study, since a page has no more than three.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from omegaconf import OmegaConf

from qerl_core.metrics.definitions import definitions
from qerl_core.options.composer import Composer
from qerl_core.rundir.checksums import DONE, SEALS, seal

STEPS, QUESTIONS, SAMPLES, BASES = 40, 64, 4, 5
FORMATS, NOISES = ("bf16", "nvfp4", "mxfp4", "nf4"), ("none", "exp")
CELLS = BASES * len(FORMATS) * len(NOISES)
IN_A_STUDY = 1000
SEED = 987654321  # stands for that of a run in the texts that runs share
METRICS = [*definitions()][:54]  # about as many as a run writes in each step
COMMANDS = {
    "claims": ["claims", "RUNS", "out=OUT"],
    "report": ["report", "RUNS", "out=OUT"],
    "compare": ["compare", "RUNS/*/*-nvfp4-none-*", "RUNS/*/*-bf16-none-*"],
}


def settings() -> Iterator[tuple[str, str, int, float]]:
    """Name and config.yaml, with SEED, of a run of each base and setting, its base, and how accurate it becomes."""
    composer = Composer()
    for base in range(BASES):
        for place, (quant, noise) in enumerate((quant, noise) for quant in FORMATS for noise in NOISES):
            words = [f"quant={quant}", f"aqn={noise}", f"steps={STEPS}", f"seed={SEED}", f"model.seed={base}"]
            tree = composer.tree(words)
            yield tree["name"], OmegaConf.to_yaml(OmegaConf.create(tree)), base, 0.6 + 0.02 * place


def write_runs(root: Path, count: int) -> None:
    made = [*settings()]
    for number in range(count):
        name, config, base, level = made[number % CELLS]
        folder = root / f"study-{number // IN_A_STUDY}" / name.replace(str(SEED), str(number // CELLS))
        folder.mkdir(parents=True)
        draw = np.random.default_rng(number)
        environment = {"code": "made up", "device": "cpu", "metrics": definitions(), "base": f"{base:064}"}
        (folder / "config.yaml").write_text(config.replace(str(SEED), str(number // CELLS)))
        (folder / "env.json").write_text(json.dumps(environment, indent=1))
        right = {step: answers(step, accuracy, draw) for step, accuracy in ((0, 0.3), (STEPS, level))}
        parquet.write_table(pa.concat_tables(right.values()), folder / "samples.parquet")
        lines = [evaluated(0, right[0]), *trained(level, draw), evaluated(STEPS, right[STEPS])]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        sealed = [{"file": file, **seal(folder / file)} for file in ("config.yaml", "env.json", "samples.parquet")]
        (folder / SEALS).write_text("".join(json.dumps(line) + "\n" for line in sealed))
        seals = {file: seal(folder / file) for file in ("metrics.jsonl", SEALS)}
        done = {"wall_s": 60.0 + number % 7, "peak_memory_gib": 0.5, "final": lines[-1], "seals": seals}
        (folder / DONE).write_text(json.dumps(done, indent=1))


def trained(level: float, draw: np.random.Generator) -> Iterator[dict[str, Any]]:
    """The lines of all steps: numbers between 0.5 and 1, and a reward that rises to about `level`."""
    numbers = draw.uniform(0.5, 1.0, (STEPS, len(METRICS)))
    for step, row in enumerate(numbers.tolist(), start=1):
        reward = 0.3 + (level - 0.3) * step / STEPS + 0.1 * row[0]
        line = {"kind": "train", "step": step, "time": 1.8e9 + step, **dict(zip(METRICS, row, strict=True))}
        yield line | {"reward/mean": reward, "accuracy": reward, "train/taught_frac": 1.0, "lr": 1e-5}


def answers(step: int, accuracy: float, draw: np.random.Generator) -> pa.Table:
    """The answers to all questions at one step: a greedy one and SAMPLES drawn ones, of equal accuracy."""
    rows = [(question, sample) for question in range(QUESTIONS) for sample in range(SAMPLES + 1)]
    right = draw.random(len(rows)) < accuracy
    return pa.table({
        "step": [step] * len(rows),
        "mode": ["greedy" if sample == 0 else "sampled" for _, sample in rows],
        "question": [f"test/{question}" for question, _ in rows],
        "sample": [max(0, sample - 1) for _, sample in rows],
        "correct": right,
        "completion": [f"So the answer is {'right' if one else 'wrong'}." for one in right.tolist()],
        "tokens": draw.integers(5, 100, len(rows)),
        "finished": [True] * len(rows),
    })  # fmt: skip


def evaluated(step: int, table: pa.Table) -> dict[str, Any]:
    line: dict[str, Any] = {"kind": "eval", "step": step, "time": 1.8e9 + 2 * step}
    for mode in ("greedy", "sampled"):
        right = table["correct"].to_numpy()[table["mode"].to_numpy(zero_copy_only=False) == mode]
        line |= {f"eval/accuracy_{mode}": float(right.mean()), f"eval/accuracy_{mode}_stderr": float(right.std() / 8)}
    return line


def measured(words: list[str], out: Path) -> tuple[float, float, str]:
    """CPU seconds and peak GiB of one command, and the digest of all that it printed and wrote to `out`."""
    with open(out / "printed", "w") as printed:
        process = subprocess.Popen([sys.executable, "-m", "qerl_bench", *words], stdout=printed)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(words)} failed, see {out / 'printed'}")
    state = hashlib.sha256()
    for file in sorted(file for file in out.rglob("*") if file.is_file()):
        state.update(file.read_bytes().replace(str(out).encode(), b"OUT"))
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20, state.hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000, help=f"a multiple of {CELLS} (default: 1000)")
    parser.add_argument("--commands", nargs="+", choices=[*COMMANDS], default=[*COMMANDS])
    parser.add_argument("--in", dest="folder", type=Path, help="keep the runs here, or read those that are here")
    given = parser.parse_args()
    if given.runs % CELLS:
        parser.error(f"--runs {given.runs} is no multiple of {CELLS}, so claims would lack runs")
    with TemporaryDirectory() as temporary:
        root = (given.folder or Path(temporary) / "runs").absolute()
        if not root.exists():
            write_runs(root, given.runs)
        print("| command | CPU s | peak GiB | digest |\n|---|---|---|---|")
        for name in given.commands:
            out = Path(temporary) / name
            out.mkdir()
            words = [word.replace("RUNS", str(root)).replace("OUT", str(out)) for word in COMMANDS[name]]
            seconds, peak, digest = measured(words, out)
            print(f"| {name} | {seconds:.1f} | {peak:.2f} | {digest} |", flush=True)


if __name__ == "__main__":
    main()
