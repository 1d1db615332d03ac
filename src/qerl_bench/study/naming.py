"""What a setting is called in a figure: its format, and of everything else what tells it from the others there."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from qerl_bench.figures.style import place
from qerl_bench.study.load import Run
from qerl_bench.study.select import Row

# Config keys that a label names where settings differ in them; rank and rate stand with their names.
DETAILS = {
    "model.name": "{}",
    "task.name": "{}",
    "algo.name": "{}",
    "quantizer.name": "{}",
    "lora.rank": "rank {}",
    "optim.lr": "lr {:g}",
    "rollout.temperature": "temperature {:g}",
}


def format_rows(rows: Sequence[Row], axis: str = "") -> list[Row]:
    """`rows` (see `select.arms`) with a `label`, format by format, no noise first; labels leave the key `axis` out."""
    keys = telling(rows, axis)
    labelled = [row | {"label": row["quant.name"].upper() + details(row, keys)} for row in rows]
    return sorted(labelled, key=lambda row: (place(row["quant.name"]), row["aqn.name"] != "none", row["label"]))


def telling(rows: Sequence[Row], axis: str = "") -> list[str]:
    """Of DETAILS but `axis` those in which `rows` differ; 16-bit weights have no quantizer to differ in."""
    quantized = [row for row in rows if row["quant.name"] != "bf16"]
    found = {key: {_value(row, key) for row in rows} for key in DETAILS}
    found["quantizer.name"] = {_value(row, "quantizer.name") for row in quantized}
    return [key for key, values in found.items() if len(values) > 1 and key != axis]


def details(row: Row, keys: Sequence[str]) -> str:
    """Of the config keys those that `row` has, each with its value, behind a comma."""
    shown = [key for key in keys if not (key == "quantizer.name" and row["quant.name"] == "bf16")]
    values = [(key, _value(row, key)) for key in shown]
    return "".join(f", {DETAILS[key].format(value)}" for key, value in values if value is not None)


def _value(row: Row, key: str) -> object:
    group, _, name = key.partition(".")
    return row["runs"][0].config.get(group, {}).get(name)


def sigma_of(run: Run) -> pd.Series:
    """The noise by step that the schedule asked for or, where only that was kept, the noise that was put in."""
    asked = run.series("train", "aqn/sigma")
    return run.series("train", "aqn/sigma_realised") if asked.empty else asked


def noise_of(row: Row) -> str:
    """The schedule with its first and last sigma above zero."""
    sigma = [value for value in sigma_of(row["runs"][0]).tolist() if value > 0]
    size = f" ($\\sigma$ {sigma[0]:.1g} to {sigma[-1]:.1g})" if sigma else ""
    return f"AQN {row['aqn.name']}{size}"
