"""What a setting is called in a figure: its format, and the options in which it differs from the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from qerl_studies.figures.style import format_order
from qerl_studies.runs.load import Run
from qerl_studies.runs.settings import Setting

# Config keys that a label shows if settings differ in them.
DETAILS = {
    "model.name": "{}",
    "task.name": "{}",
    "algo.name": "{}",
    "quant.block": "block {}",
    "quant.activations": "inputs {}",
    "quant.keep_first": "first {:.0%} kept",
    "quant.keep_last": "last {:.0%} kept",
    "rollout.activations": "sampled with inputs {}",
    "train.kv": "keys and values {}",
    "rollout.kv": "sampled with keys and values {}",
    "eval.kv": "answered with keys and values {}",
    "rollout.merge": "merged in sampler: {}",
    "train.merge": "merged in trainer: {}",
    "train.gradients": "gradients {}",
    "rollout.lag": "lag {}",
    "quantizer.name": "{}",
    "lora.rank": "rank {}",
    "optim.lr": "lr {:g}",
    "rollout.temperature": "temperature {:g}",
}


def label_settings(settings: Sequence[Setting], axis: str = "") -> list[Setting]:
    """The settings with labels, by format and without noise first; labels leave out the key of an `axis`."""
    keys = differing_details(settings, axis)
    labelled = [replace(one, label=one["quant.name"].upper() + details_text(one, keys)) for one in settings]
    return sorted(labelled, key=lambda one: (format_order(one["quant.name"]), one["aqn.name"] != "none", one.label))


def differing_details(settings: Sequence[Setting], axis: str = "") -> list[str]:
    """The keys of DETAILS, without `axis`, in which settings differ; for the quantizer, 16-bit weights do not count."""
    values = {key: {setting[key] for setting in settings} for key in DETAILS}
    values["quantizer.name"] = {one["quantizer.name"] for one in settings if one["quant.name"] != "bf16"}
    return [key for key, distinct in values.items() if len(distinct) > 1 and key != axis]


def details_text(setting: Setting, keys: Sequence[str]) -> str:
    """The values of `keys` that the setting has, each after a comma."""
    shown = [key for key in keys if not (key == "quantizer.name" and setting["quant.name"] == "bf16")]
    return "".join(f", {DETAILS[key].format(setting[key])}" for key in shown if setting[key] is not None)


def sigma_by_step(run: Run) -> pd.Series:
    """The noise that the schedule asked for or, if only that was kept, the noise that was added."""
    asked = run.series("train", "aqn/sigma")
    return run.series("train", "aqn/sigma_realised") if asked.empty else asked


def noise_text(setting: Setting) -> str:
    """The schedule with its first and last sigma above zero, unless each base has its own."""
    sigma = [value for value in sigma_by_step(setting.runs[0]).tolist() if value > 0]
    matched = len({run.option("aqn").get("sigma_of_base") for run in setting.runs}) > 1
    size = f" ($\\sigma$ {sigma[0]:.1g} to {sigma[-1]:.1g})" if sigma and not matched else ""
    return f"AQN {setting.noise}{size}"
