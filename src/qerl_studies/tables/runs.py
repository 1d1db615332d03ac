"""The table of runs for a paper or a program: `qerl-bench figure runs`. A terminal's is in terminal.py."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import pandas as pd

from qerl_core.options.fingerprint import flat, with_effect
from qerl_studies.runs.load import Run
from qerl_studies.tables.paper import Table
from qerl_studies.tables.terminal import ONE_TEXT, differences, row_of

OPTIONS = ("model", "format", "noise", "rank", "seed")
SHARES = {"greedy": "greedy (%)", "gain": "gain (%)", "lenient": "lenient (%)", "sampled": "sampled (%)"}
NUMBERS = {"rollout_tok_s": ("tok/s", ".0f"), "peak_gib": ("GiB", ".2f")}
CAPTION = (
    "One run a line, so nothing here says what other seeds would show. Accuracy on held-out questions {when}, ±1 "
    "standard error over questions; without one where all had the same result, which is no error of zero. Entropy in "
    "nats a token, first and last step; completion tokens of rollouts a second, median without step 1; peak of memory."
)
TOLD = {
    "gain": "Gain: final minus step 0, paired by question.",
    "lenient": "Lenient: by the last number of an answer, whatever its format.",
}


def runs_table(runs: Sequence[Run]) -> Table:
    """A line for each run. What all share is in the caption, and numbers that none has are left out.

    `numbers` has every option, and shares from 0 to 1.
    """
    numbers = pd.DataFrame([row_of(run) for run in runs])
    numbers.insert(1, "options", differences([flat(with_effect(run.config)) for run in runs]))
    one_text = bool(numbers.pop("one_text").any())
    texts = {name: [str(value) for value in numbers[name]] for name in OPTIONS}
    shared = [f"{name} {values[0]}" for name, values in texts.items() if len({*values}) == 1]
    shown = {name: values for name, values in texts.items() if len({*values}) > 1}
    if any(numbers["options"]):
        shown["other options"] = [*numbers["options"]]
    shown = shown or {"run": [*numbers["run"]]}
    ended = bool(numbers[["greedy_final", "sampled_final"]].notna().to_numpy().any())
    when = "final" if ended else "start"  # runs of steps=0 have no other
    given = [name for name in SHARES if f"{name}_{when}" in numbers and _any(numbers[f"{name}_{when}"])]
    for name in given:
        pairs = zip(numbers[f"{name}_{when}"], numbers[f"{name}_{when}_stderr"], strict=True)
        shown[SHARES[name]] = [_share(*pair, "+" if name == "gain" else "") for pair in pairs]
    if _any(numbers["entropy_first"]):
        ends = zip(numbers["entropy_first"], numbers["entropy_last"], strict=True)
        shown["entropy"] = ["→".join(_number(value, ".3f") for value in pair) for pair in ends]
    for name, (heading, form) in NUMBERS.items():
        if _any(numbers[name]):
            shown[heading] = [_number(value, form) for value in numbers[name]]
    unfinished = [run.name for run in runs if not run.finished]
    said = [f"All: {', '.join(shared)}."] if shared else []
    said += (
        [f"Greedy answers of task={ONE_TEXT} are left out: they are one character again and again."] if one_text else []
    )
    said += [f"Not finished: {', '.join(unfinished)}."] if unfinished else []
    caption = [
        CAPTION.format(when="after training" if ended else "before any"),
        *(TOLD[name] for name in given if name in TOLD),
    ]
    return Table("runs", numbers, pd.DataFrame(shown), " ".join([*caption, *said]))


def _any(column: Iterable[float]) -> bool:
    return any(not math.isnan(value) for value in column)


def _share(value: float, error: float, sign: str) -> str:
    return _number(100 * value, f"{sign}.1f") + (f" ±{100 * error:.1f}" if error > 0 else "")


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)
