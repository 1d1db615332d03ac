"""The terminal's table of runs: the options, accuracy and cost of each run.

Left out: means over seeds and tests between settings, which one line per run cannot show with enough care.
"""

from __future__ import annotations

import json
import math
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pandas as pd

from qerl_core.process.arguments import WIDTH
from qerl_core.rundir.checksums import DONE
from qerl_studies.runs.load import Run, load_run

NOTES = (
    "accuracy: held-out questions, % ±1 s.e. over questions, greedy before and after training;",
    "gain: greedy accuracy minus that of step 0, the quantized base, ±1 s.e. of the paired difference;",
    "sampled: the same questions, sampled answers; entropy: nats/token, first and last step;",
    "tok/s: completion tokens of rollouts, median without step 1; GiB: peak of memory;",
    "taught: share of completion tokens that a backward pass used, mean over steps",
)
LENIENT = ("lenient", "0→final")  # the heading of a column
ONE_TEXT = "even_characters"  # a task of which random weights give greedily one character again and again
ONE_TEXT_NOTE = f"task={ONE_TEXT}: greedy answers are one character again and again, and are left out;"
LENIENT_NOTE = "lenient: as accuracy, by the last number of an answer, whatever its format;"
TEXTS = ("model", "format", "noise")
NARROWEST = 5  # columns of a wrapped text
LAST_STEPS = 5  # they show whether a run still trains


def summary(run_dirs: Iterable[str | os.PathLike[str]]) -> pd.DataFrame:
    """One row per run, in the given order; accuracies are shares, and what a run did not measure is NaN.

    The final accuracy is that of the last evaluation after step 0. Raises ConfigError as `load_run` does.
    """
    return pd.DataFrame([row_of(load_run(path)) for path in run_dirs])


def render(table: pd.DataFrame, notes: Sequence[str] = ()) -> str:
    """The table of `summary` as aligned text with a legend; `-` stands for a missing number.

    What all runs share stands above it. Several runs have numbers, and their names, each with its one of `notes`, stand
    below: names are long, and a terminal is not.
    """
    if table.empty:
        return "no runs"
    names = [row["run"] + ("" if row["finished"] else " *") for row in table.to_dict("records")]
    several = len(names) > 1
    lenient = bool(table[["lenient_start", "lenient_final"]].notna().to_numpy().any())
    options = {name: [str(value) for value in table[name]] for name in ("model", "format", "noise", "rank", "seed")}
    same = [f"{name} {values[0]}" for name, values in options.items() if len({*values}) == 1]
    ended = bool(table["sampled_final"].notna().to_numpy().any())
    sampled = "final" if ended else "step 0"  # runs of steps=0 have no other
    columns = {
        **({("", "run"): [str(number) for number, _ in enumerate(names, start=1)]} if several else {}),
        **{("", name): values for name, values in options.items() if len({*values}) > 1},
        ("accuracy", "step 0"): _shares(table, "greedy_start"),
        ("accuracy", "final"): _shares(table, "greedy_final"),
        ("gain", "paired"): _shares(table, "gain_final", signed=True),
        **({LENIENT: _pairs(table["lenient_start"], table["lenient_final"])} if lenient else {}),
        ("sampled", sampled): _shares(table, "sampled_final" if ended else "sampled_start"),
        ("entropy", "first"): [_number(value, ".3f") for value in table["entropy_first"]],
        ("", "last"): [_number(value, ".3f") for value in table["entropy_last"]],
        ("", "tok/s"): [_number(value, ",.0f") for value in table["rollout_tok_s"]],
        ("", "taught"): [_number(value, ".2f") for value in table["taught"]],
        ("", "GiB"): [_number(value, ".2f") for value in table["peak_gib"]],
    }
    shared = [", ".join([*([] if several else names), *same])]
    noted = zip(names, notes or [""] * len(names), strict=True)
    named = [f"{number:3}  {name}  {note}".rstrip() for number, (name, note) in enumerate(noted, start=1)]
    above, below = ("\n".join(_filled(line) for line in part) for part in (filter(None, shared), named))
    unfinished = [] if all(table["finished"]) else ["* not finished"]
    lines = _fitting(columns)
    left_out = [ONE_TEXT_NOTE] if any(table["one_text"]) else []
    legend = [*NOTES[:2], *left_out, *([LENIENT_NOTE] if LENIENT[1] in "".join(lines) else []), *NOTES[2:], *unfinished]
    return "\n".join([*filter(None, [above]), *lines, *(["", below] if several else []), "", *legend])


def _fitting(columns: Mapping[tuple[str, str], Sequence[str]]) -> list[str]:
    """The lines of a table in WIDTH columns. If it is wider, spaces are left out, then long values wrapped.

    What is wider even so does without the column LENIENT.
    """
    lines = _lines(columns, "  ")
    if not _fits(lines):
        columns = {heading: [cell.replace(" ±", "±") for cell in cells] for heading, cells in columns.items()}
        lines = _lines(columns, " ")
    for width in range(WIDTH // 3, NARROWEST - 1, -1):
        if _fits(lines):
            break
        lines = _lines(columns, " ", width)
    if LENIENT in columns and not _fits(lines):
        return _fitting({heading: cells for heading, cells in columns.items() if heading != LENIENT})
    return lines


def _lines(columns: Mapping[tuple[str, str], Sequence[str]], gap: str, width: int = WIDTH) -> list[str]:
    """Aligned lines: two of headings, then one of each run, or several where a text is longer than `width`."""
    rows = [[*cells] for cells in zip(*([*heading, *cells] for heading, cells in columns.items()), strict=True)]
    left = [heading[1] in TEXTS for heading in columns]
    parts = [
        [wrapped(cell, width) if is_text else [cell] for cell, is_text in zip(row, left, strict=True)] for row in rows
    ]
    cut = [line for row in parts for line in zip_longest(*row, fillvalue="")]
    widths = [max(map(len, column)) for column in zip(*cut, strict=True)]
    return [
        gap.join(
            cell.ljust(size) if is_text else cell.rjust(size)
            for cell, size, is_text in zip(line, widths, left, strict=True)
        ).rstrip()
        for line in cut
    ]


def _fits(lines: Sequence[str]) -> bool:
    return max(map(len, lines)) <= WIDTH


def wrapped(text: str, width: int) -> list[str]:
    """`text` in pieces of at most `width` letters, cut behind a space, - or _ where there is one."""
    return re.findall(rf".{{1,{width}}}$|.{{0,{width - 1}}}[-_ ]|.{{{width}}}", text) or [text]


def _filled(line: str) -> str:
    """A line broken at its spaces into lines of WIDTH columns; names and values stay whole."""
    return textwrap.fill(line, WIDTH, subsequent_indent=" " * 5, break_long_words=False, break_on_hyphens=False)


def differences(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each flat config the values of the keys in which it differs from others with the same options.

    Left out is what the table says of options, and what comes with another option or rank.
    """
    several = len({str(config.get("model.name")) for config in configs}) > 1
    shown = {"seed", "lora.rank", "noise.where", "optim.lr" if several else ""}

    def option(config: Mapping[str, Any], key: str) -> tuple[str, str]:
        axis = key.partition(".")[0]
        return str(config.get(f"{axis}.name")), str(config.get("lora.rank")) if axis == "lora" else ""

    def differs(key: str) -> bool:
        values: dict[tuple[str, str], set[str]] = {}
        for config in configs:
            values.setdefault(option(config, key), set()).add(str(config.get(key)))
        return any(len(of_option) > 1 for of_option in values.values())

    keys = sorted({key for config in configs for key in config})
    chosen = [key for key in keys if key not in shown and not key.endswith(".name") and differs(key)]
    return [" ".join(f"{key}={config[key]}" for key in chosen if key in config) for config in configs]


def places(run_dir: Path) -> list[str]:
    """Where a finished run and its figures are, a line each."""
    done = json.loads((run_dir / DONE).read_text())
    figures = sorted(file.name for file in (run_dir / "figures").glob("*.png"))
    lines = ["", f"run         {run_dir}"]
    lines += [f"figures     {run_dir / 'figures'}: {', '.join(figures)}"] if figures else []
    steps = {name: step for name, step in done.get("checkpoints", {}).items() if step is not None}
    named = ", ".join(f"{name} step_{step:06d}" for name, step in steps.items())
    return [*lines, *([f"checkpoints {run_dir / 'checkpoints'}: {named}"] if steps else [])]


def no_gradient_warning(table: pd.DataFrame) -> str | None:
    """A warning if the last steps of a run in the table of `summary` had no gradient; None if all had one."""
    names = [row["run"] for row in table.to_dict("records") if row["taught_last"] == 0]
    if not names:
        return None
    return (
        f"{', '.join(names)}: the last steps, up to {LAST_STEPS}, had no backward pass (train/taught_frac = 0), as the "
        "rewards of every group were equal. Nothing was learned, and time, tokens/s and memory are those of sampling "
        "and one forward pass. If answers are in another format or cut off, formats.json of the run says what to set. "
        "To measure training use task=shape, whose rewards always differ"
    )


def row_of(run: Run) -> dict[str, Any]:
    """The row of `summary` for one run."""
    identity = run.identity()
    one_text = run.option("task.name") == ONE_TEXT
    entropy = run.series("train", "entropy")
    taught = run.series("train", "train/taught_frac")
    return {
        "run": identity["run"],
        "finished": identity["finished"],
        "model": identity["model"],
        "format": identity["quant"],
        "noise": run.noise,
        "rank": identity["lora_rank"],
        "seed": identity["seed"],
        "one_text": one_text,
        **_evaluated(run, "" if one_text else "accuracy_greedy", "greedy", "start"),
        **_evaluated(run, "" if one_text else "accuracy_greedy", "greedy", "final"),
        **_evaluated(run, "" if one_text else "gain_greedy", "gain", "final"),
        **_evaluated(run, "lenient_greedy", "lenient", "start"),
        **_evaluated(run, "lenient_greedy", "lenient", "final"),
        **_evaluated(run, "accuracy_sampled", "sampled", "start"),
        **_evaluated(run, "accuracy_sampled", "sampled", "final"),
        "entropy_first": entropy.iloc[0] if len(entropy) else math.nan,
        "entropy_last": entropy.iloc[-1] if len(entropy) else math.nan,
        "rollout_tok_s": run.series("train", "speed/rollout_tok_s").iloc[1:].median(),
        "taught": taught.mean(),
        "taught_last": taught.iloc[-LAST_STEPS:].max(),
        "peak_gib": run.done.get("peak_memory_gib") or run.series("train", "memory/peak_gib").max(),
    }


def _evaluated(run: Run, metric: str, column: str, when: str) -> dict[str, float]:
    """A metric and its standard error at step 0 (`when` = start) or at the last evaluated step after it (final)."""
    columns = {}
    for suffix in ("", "_stderr"):
        series = run.series("eval", f"eval/{metric}{suffix}")
        values = [value for step, value in series.items() if (step == 0) == (when == "start")]
        columns[f"{column}_{when}{suffix}"] = values[-1] if values else math.nan
    return columns


def _shares(table: pd.DataFrame, name: str, signed: bool = False) -> list[str]:
    """Percentages with one decimal, and the standard error if it is known."""
    return [
        _number(100 * value, "+.1f" if signed else ".1f") + ("" if math.isnan(error) else f" ±{100 * error:.1f}")
        for value, error in zip(table[name], table[f"{name}_stderr"], strict=True)
    ]


def _pairs(first: Iterable[float], second: Iterable[float]) -> list[str]:
    """Two percentages of each run, such as 24.2→37.1."""
    return ["→".join(_number(100 * value, ".1f") for value in pair) for pair in zip(first, second, strict=True)]


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)
