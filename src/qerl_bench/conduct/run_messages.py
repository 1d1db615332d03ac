"""What a run says of itself before it loads anything, and at its end: what is asked, what it showed, what to type."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from qerl_bench import dose
from qerl_bench.config import build, compose
from qerl_bench.experiment_spec import Experiment
from qerl_bench.sweep.grid import grid
from qerl_core.checks import ConfigError
from qerl_core.options.user_options import folders_in, words_in_use
from qerl_core.process.arguments import WIDTH
from qerl_studies.runs.load import Run

PROMPT = 100  # letters of a prompt that are shown
BESIDE = 12  # columns of a heading
DOSE = ("sigma", "sigma_share", "dose_kl", "dose_entropy", "norms_perturbed")
VARIED = re.compile(r"[+~]*(quant=|name=|aqn\b|noise\b)")  # what the next command chooses


def opening(experiment: Experiment) -> list[str]:
    """Task and its first prompt, batch, rate and questions, a line each."""
    rollout, asked = experiment.rollout, getattr(experiment.eval, "questions", 0)
    batch = f"{rollout.prompts_per_step} prompts"
    batch += f" x {rollout.group_size} completions" if experiment.algo.on_policy else ", one demonstration each"
    questions = {None: "all held-out questions", 0: "no evaluation"}.get(asked, f"{asked} held-out questions")
    steps = f"{experiment.steps} steps of {batch}, learning rate {experiment.optim.lr:g}"
    lines = [f"task {experiment.task.name}: {steps}; {questions}"]
    (prompt,) = experiment.task.train_prompts(1, 1, experiment.seed)
    text = " ".join((prompt.question or "".join(message["content"] for message in prompt.messages)).split())
    return [*lines, *([f"its first question: {textwrap.shorten(text, PROMPT)}"] if text else [])]


def ending(run: Run, words: Sequence[str]) -> list[str]:
    """What the finished `run` showed, and what to type next; `words` are those of its command."""
    reward, entropy = (run.series("train", metric) for metric in ("reward/mean", "entropy"))
    if reward.empty or run.option("task.name") == "shape":  # whose rewards are drawn
        return []
    ends = max(1, len(reward) // 10)
    span = "first and last step" if ends == 1 else f"means of the first and last {ends} steps"
    found = f"reward {ends_of(reward, ends)}, entropy {ends_of(entropy, ends)} ({span}); one run compares nothing"
    shown = [part for line in (found, *first_dose(run)) for part in textwrap.wrap(line, WIDTH - BESIDE)]
    here = Path(sys.prefix)
    here = here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here
    other = "NVFP4" if run.option("quant.name") == "bf16" else "16 bits"
    swept = sweep(run, words)
    to_type = [
        *([] if shutil.which("qerl-bench") else [f"source {shlex.quote(f'{here}/bin/activate')}"]),
        *([shlex.join(["qerl-bench", "run", "-m", *swept])] if swept else []),
        f"qerl-bench report {shlex.quote(str(run.path.parent))}",
        f"{f'the same in {other} and without noise; then ' if swept else ''}all runs on one page, with intervals",
    ]
    return ["", *with_heading("it showed", shown), *with_heading("type next", to_type)]


def sweep(run: Run, words: Sequence[str]) -> list[str]:
    """Words that make `run` without noise, and its like in 16 bits or NVFP4; none if no sweep makes both."""
    quant = run.option("quant.name")
    kept = [word for word in words if not VARIED.match(word)]
    own = words_in_use()
    try:
        if compose([*kept, *own]).aqn.name != "none":  # by an experiment
            kept.append("aqn=none")
        swept = [f"quant=bf16,{'nvfp4' if quant == 'bf16' else quant}", *kept]
        points = grid([*swept, *own])[0]
        for point in points[:2]:
            build(compose([*point, *own]))  # one of them is refused if `words` set more of the format
    except ConfigError:
        return []
    return [*(f"--config-dir={folder}" for folder in folders_in(own)), *swept] if len(points) == 2 else []


def with_heading(heading: str, lines: Sequence[str]) -> list[str]:
    return [f"{heading if number == 0 else '':{BESIDE}}{line}" for number, line in enumerate(lines)]


def ends_of(series: pd.Series, ends: int) -> str:
    return f"{series.iloc[:ends].mean():.3g} to {series.iloc[-ends:].mean():.3g}"


def first_dose(run: Run) -> list[str]:
    """What was measured when noise began; nothing without noise."""
    measured = {name: run.series("train", f"aqn/{name}") for name in DOSE}
    begun = measured["dose_kl"].index[:1]
    return [dose.summary_line(step, _at(step, measured)) for step in begun]


def _at(step: int, measured: Mapping[str, pd.Series]) -> dict[str, float]:
    return {f"aqn/{name}": float(values.loc[step]) for name, values in measured.items() if step in values.index}
