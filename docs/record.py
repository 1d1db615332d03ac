"""Runs the commands of a newcomer's first hour and writes what they print, with times, to docs/first-hour.md.

    python docs/record.py     # in a fresh clone, after make setup; about ten minutes on two cores

Runs and caches go to a temporary folder, so that nothing is remembered of earlier starts. Output is recorded as a file
would get it: a terminal shows a progress bar instead of the lines of steps, of which only the first and the last are
kept here.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
PAGE = CHECKOUT / "docs" / "first-hour.md"
COMMANDS = {
    "python src/run.py experiment=smoke quant=mxfp4": "Everything once: six steps of a model with random weights",
    "python src/run.py experiment=smoke quant=mxfp4  # again": "A finished run is not repeated",
    "python src/run.py quant=nvfp4 aqn=exp quant.nmae=x": "A mistake is refused before anything starts",
    "python src/run.py experiment=smoke quant=nvfp4 -m aqn=none,exp": "A sweep: one process per run",
    "qerl-bench status": "What is there",
    "make run": "The main job: a model that can do arithmetic learns to do it better",
    "qerl-bench claims runs/ out=figures/": "What these runs say about the paper",
}
INTRODUCTION = """# The first hour

What the first commands print, recorded by `python docs/record.py` on {cores} cores. Below each heading: wall time, CPU
time, and how many processes wanted a core when the command began; above {cores}, other work made it slower. Of
consecutive steps the first and the last are kept; on a terminal a progress bar takes their place.

Digits are those of one recording. In two earlier ones `make run` gained 8.2 and 11.7 points of accuracy.

| a line with | tells |
|---|---|
| kernel, blocks, prompts, sampling, passes | which fast way a part takes, or why it takes the plain one, as on a CPU |
| norms | which scales of the model [noise](aqn.md) can move, and which it leaves alone |
| trainer against plain transformers | a check: our model gives what the untouched one gives, to so many nats a token |
| warm start | the built-in model is taught first, once: its weights are kept |
| reward, accuracy, entropy | of the answers of this step; entropy is how varied they are, in nats a token |
| grad, sigma, tok/s, left | the norm of the gradient, the size of the noise, tokens a second, minutes to go |
| accuracy_greedy, accuracy_sampled | questions never trained on: the most probable answer is right; a drawn one is |
| lenient | right by the last number, in whatever format; *in tags* are answers in the format that was asked for |
| majority, pass_at_k | the most frequent of a question's answers is right; one of them is |
| validation | a few of these questions again, while training goes on |
| first noise | what it does to the policy: KL is how far probabilities of tokens move, in nats |
| +-, ± | one standard error |
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        parts = [INTRODUCTION.format(cores=os.cpu_count())]
        for command, meaning in COMMANDS.items():
            parts.append(record(command, meaning, Path(folder)))
            PAGE.write_text("\n".join(parts))


def record(command: str, meaning: str, root: Path) -> str:
    """Run one command; returns its section of the page."""
    (root / "runs").mkdir(exist_ok=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"QERL_ROOT": str(root), "XDG_CACHE_HOME": str(root / "first-start"), "PATH": path}
    words = command.replace(" runs/ ", f" {root}/runs/ ").replace(" figures/", f" {root}/figures/")
    load, cpu, begin = os.getloadavg()[0], cpu_seconds(), time.monotonic()
    done = subprocess.run(
        words, shell=True, cwd=CHECKOUT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wall = time.monotonic() - begin
    taken = f"{wall:.0f} s, {cpu_seconds() - cpu:.0f} s of CPU, load {load:.1f}"
    print(f"{command}: {taken}, exit code {done.returncode}", flush=True)
    text = "\n".join(shortened(done.stdout.splitlines())).replace(f"{root}/", "").replace(f"{CHECKOUT}/", "")
    return f"## {meaning}\n\n{taken}; exit code {done.returncode}\n\n```console\n$ {command}\n{text}\n```\n"


def shortened(lines: list[str]) -> list[str]:
    """The lines, with all but the first and the last of each sequence of steps left out."""
    kept: list[str] = []
    for number, line in enumerate(lines):
        steps = [
            re.match(r"step +\d+/", near)
            for near in (lines[max(0, number - 1)], line, "".join(lines[number + 1 : number + 2]))
        ]
        if not all(steps) or number == 0:
            kept.append(line.rstrip())
        elif kept[-1] != "...":
            kept.append("...")
    return kept


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
