"""Table 2 of QeRL: accuracy on MATH-500, AIME 2024, AIME 2025 and AMC 2023 of each finished run, and their average.

python studies/table2/table2.py runs/ --out figures/

A run on BigMath is evaluated on MATH-500. The other sets are further evaluations of the finished run, one for each:

qerl-bench eval runs/NAME task=aime24 task.instruction=suffix

Sampled accuracy (pass@1) in per cent, before training (step 0) and after the last step. Each set counts a quarter,
whatever its size, as in the paper. No question is in two sets, so the squares of their standard errors add. Left out:
the error over seeds, which runs of several seeds show.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from qerl_core.checks import require
from qerl_core.exits import guarded
from qerl_studies.design.looks import shown_runs
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.load import Run
from qerl_studies.runs.script import parser_for
from qerl_studies.tables.paper import Table, add_format, write_table

SETS = {"math500": 500, "aime24": 30, "aime25": 30, "amc23": 40}  # questions
NAMES = {
    "HuggingFaceH4/MATH-500": "math500",
    "HuggingFaceH4/aime_2024": "aime24",
    "math-ai/aime25": "aime25",
    "math-ai/amc23": "amc23",
}
PROMPT = ("answer_format", "instruction", "template")
SAMPLING = ("temperature", "top_p", "max_tokens")
NORMAL_95 = 1.96  # half the width of a 95 % interval in standard errors; each set has 30 questions or more
ERRORS = ("stderr", "stderr_sampling")


def main(arguments: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    add_format(parser)
    options = parser.parse_args(arguments)
    runs = load_runs(shown_runs(options.runs, options.without), options.mixed_code)
    chosen = [run for run in runs if run.finished and set_of(run.config) is not None]
    require(bool(chosen), "no finished run holds out one of the four sets: they are made by experiment=paper/table2 -m")
    if len(chosen) < len(runs):
        print(f"{len(runs) - len(chosen)} of {len(runs)} runs are unfinished or of other tasks", file=sys.stderr)
    table = pd.DataFrame([row for run in chosen for row in rows(run)])
    table = table.sort_values(["step", "model", "quant", "aqn", "lora_rank", "seed"], ignore_index=True)
    write_table(for_paper(table), options.format, options.out)
    print(table.to_string(index=False, float_format=lambda value: f"{value:.4g}", na_rep="-"))


def set_of(config: dict[str, Any]) -> str | None:
    """The one of the four sets that this config evaluates on; None if it is another."""
    source = config["task"].get("eval")
    return NAMES.get(source["dataset_id"]) if isinstance(source, dict) else None


def evaluations(run: Run) -> dict[str, Path]:
    """The folder with the evaluation of each set: one in RUN/evals or, without it, the run itself.

    Raises ConfigError if RUN/evals has two evaluations of a set, or if a set was not evaluated.
    """
    folders: dict[str, Path] = {}
    for folder in sorted(path.parent for path in (run.path / "evals").glob("*/done.json")):
        if "checkpoint" in json.loads((folder / "done.json").read_text()):
            continue  # of an earlier step
        name = set_of(yaml.safe_load((folder / "config.yaml").read_text()))
        if name is not None:
            require(name not in folders, f"{folder} and {folders.get(name)} both evaluate {name}: move one elsewhere")
            folders[name] = folder
    held_out = set_of(run.config)
    if held_out is not None and (run.path / "eval.json").is_file():
        folders.setdefault(held_out, run.path)
    missing = [name for name in SETS if name not in folders]
    instruction = f"task.instruction={run.option('task.instruction')}"
    require(
        not missing,
        f"{run.name} has no finished evaluation of {', '.join(missing)}: for each of them, qerl-bench eval "
        f"{run.path} task={missing[0] if missing else ''} {instruction}",
    )
    return folders


def read_scores(run: Run, name: str, folder: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """The prompt and sampling options of an evaluation, and its sampled accuracy by step.

    Raises ConfigError unless all questions of the set were asked.
    """
    task = yaml.safe_load((folder / "config.yaml").read_text())["task"]
    entries = [e for e in json.loads((folder / "eval.json").read_text()) if e["metric"] == "eval/accuracy_sampled"]
    by_step = {entry["step"]: entry for entry in entries}
    missing = [step for step in (0, run.option("steps")) if step not in by_step]
    require(not missing, f"{folder} has no sampled accuracy of step {', '.join(map(str, missing))}: evaluate it again")
    for entry in entries:
        require(
            entry["n"] == SETS[name],
            f"{folder} asked {entry['n']} of the {SETS[name]} questions of {name}: evaluate with eval.questions=null",
        )
    settings = entries[0]["settings"]
    asked = {f"task.{key}": task[key] for key in PROMPT} | {f"eval.{key}": settings[key] for key in SAMPLING}
    return asked | {"eval.quant": settings.get("quant", run.option("quant.name"))}, by_step


def rows(run: Run) -> list[dict[str, Any]]:
    """One row for the untrained policy and one for the trained one.

    Raises ConfigError if the sets were evaluated with different prompts or sampling options.
    """
    scores = {name: read_scores(run, name, folder) for name, folder in evaluations(run).items()}
    protocol = scores["math500"][0]
    for name, (other, _) in scores.items():
        different = [f"{key} ({other[key]}, {protocol[key]})" for key in protocol if other[key] != protocol[key]]
        require(not different, f"{run.name}: {name} and math500 differ in {', '.join(different)}: evaluate one again")
    table = []
    for step in (0, run.option("steps")):
        entries = {name: scores[name][1][step] for name in SETS}
        identity = run.identity()
        row = {key: identity[key] for key in ("model", "quant", "aqn", "lora_rank", "lr", "seed")} | {"step": step}
        row |= {name: 100 * entry["value"] for name, entry in entries.items()}
        row["average"] = sum(row[name] for name in SETS) / len(SETS)
        for error in ERRORS:
            parts = [entry[error] for entry in entries.values()]
            whole = math.nan if None in parts else math.hypot(*parts)
            row[error] = 100 * whole / len(SETS)
        table.append(row | {"run": run.name})
    return table


def for_paper(table: pd.DataFrame) -> Table:
    """Table 2 with the interval of each average."""
    shown = pd.DataFrame(table[["model", "quant", "aqn", "lora_rank", "seed", "step"]])
    shown = shown.assign(**{name: [f"{value:.1f}" for value in table[name]] for name in SETS})
    shown["average"] = [
        f"{mean:.1f} [{mean - NORMAL_95 * error:.1f}, {mean + NORMAL_95 * error:.1f}]"
        for mean, error in zip(table["average"], table["stderr"], strict=True)
    ]
    sizes = SETS.values()
    caption = (
        f"Sampled accuracy (pass@1, %) on four sets of {', '.join(map(str, sizes))} questions, and their mean. "
        f"{table['run'].nunique()} runs, n = 1 seed in each line. Brackets: 95 % interval (normal) of the average over "
        "questions and samples of that one run; other seeds are not in it."
    )
    return Table("table2", table, shown, caption)


if __name__ == "__main__":
    guarded(main)
