"""Fits the rates of `qerl-bench estimate` to committed runs, and measures its error on ten that it does not see.

    python benchmarks/estimate.py fit      # writes src/qerl_bench/estimate/rates.json
    python benchmarks/estimate.py error    # the table of docs/estimate.md

A judged run is estimated twice: with all runs of its session left out of the fit, and with all runs of its model. It
is told how long completions were in the runs that are left, not in itself. Times are fitted on the runs of FOLDERS and
the decoding table of kernels/, which no run is left out of; memory is counted, and fitted on nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
from estimate_runs import Row, decoding, rows
from scipy.optimize import least_squares

from qerl_bench.estimate.cards import CARDS
from qerl_bench.estimate.estimate import checkpoint_bytes, estimate
from qerl_bench.estimate.memory import memory
from qerl_bench.estimate.seconds import Rates, evaluation_s, rollout_s, train_s
from qerl_bench.estimate.table import RATES, Length, Measured, corrected, place_of
from qerl_bench.estimate.work import Work
from qerl_core.checks import require
from qerl_core.exits import exit_in_words

H200 = CARDS["h200"]
JUDGED = (  # session, model, format, rank, completions: named before the first table; of each the first by name
    ("h200/data", "shape-7b", "nvfp4", 32, 8),
    ("h200/data", "shape-7b", "bf16", 32, 64),
    ("h200/data/steps", "shape-7b", "nvfp4", 32, 512),
    ("h200/data/steps", "shape-7b", "bf16", 32, 512),
    ("real-2026/pilot/data/rates-05b", "qwen2.5-coder-0.5b-instruct", "bf16", 32, 256),
    ("real-2026/pilot/data/controls-05b_lr2e4", "qwen2.5-coder-0.5b-instruct", "nvfp4", 32, 256),
    ("real-2026/pilot/data/controls-15b_lr1e4", "qwen2.5-coder-1.5b-instruct", "nvfp4", 32, 256),
    ("real-2026/pilot/data/full-15b", "qwen2.5-coder-1.5b-instruct", "bf16", 0, 256),
    ("real-2026/15b/data/2026-11-26", "qwen2.5-coder-1.5b-instruct", "bf16", 32, 256),
    ("real-2026/05b-more/data/2026-11-27-copy-01", "qwen2.5-coder-0.5b-instruct", "nvfp4", 32, 256),
)


START = Rates(  # where a fit begins, and what holds where nothing is measured
    decode_layer_s=50e-6,
    decode_bandwidth=0.7,
    decode_flops=0.8,
    decode_flops_packed=0.5,
    rollout_s=0.05,
    train_layer_s=4e-3,
    train_flops=0.6,
    selective=1.08,
    whole=1.5,
    modules=1.29,
    other=1e-3,
    start_s=15.0,
    save_s=1e-9,
    share=0.5,
    train_share=0.05,
)
LEFT_OUT: tuple[Literal["session"], Literal["model"]] = ("session", "model")
PULL = 0.05  # towards START, in the place of a measurement with a deviation of a factor of e


Pair = tuple[Callable[[Rates], float], float]


def fitted(names: Sequence[str], rates: Rates, pairs: Sequence[Pair]) -> Rates:
    """`rates` with those of `names` that bring the logarithms of times nearest to measured ones; robust to outliers."""
    start = np.log([getattr(rates, name) for name in names])

    def chosen(values: Any) -> Rates:
        return replace(rates, **dict(zip(names, map(float, np.exp(values)), strict=True)))

    def errors(values: Any) -> Any:
        now = chosen(values)
        return np.array([np.log(time(now) / measured) for time, measured in pairs] + [*(PULL * (values - start))])

    return chosen(least_squares(errors, start, loss="soft_l1", f_scale=0.2).x)


def fit(kept: Sequence[Row]) -> tuple[Rates, list[Measured]]:
    settings: dict[tuple[Any, ...], list[Row]] = {}
    for one in kept:
        settings.setdefault(one.setting, []).append(one)
    means = [mean_of(group) for group in settings.values()]
    decode = ["decode_layer_s", "decode_bandwidth", "decode_flops", "decode_flops_packed", "rollout_s", "share"]
    sampled = [(one.work, one.rollout) for one in means if one.rollout and one.work.rank]
    pairs: list[Pair] = [(partial(rollout_s, work, H200), took) for work, took in [*sampled, *decoding()]]
    rates = fitted(decode, START, pairs)
    train = ["train_layer_s", "train_flops", "selective", "whole", "modules", "train_share"]
    trained = [(one.work, memory(one.work, H200).micro_batches, one.train) for one in means if one.train]
    rates = fitted(train, rates, [(partial(train_s, work, micro, H200), took) for work, micro, took in trained])
    rest = [
        (one.step - one.rollout - one.train) / one.work.completions
        for one in means
        if one.step and one.rollout and one.train
    ]
    rates = replace(rates, other=float(np.median(rest)))
    runs = [deviation(one, rates) for one in means]
    starts = [
        (one, one.wall - one.work.steps * one.step - evaluations_s(one, rates, runs)) for one in means if one.step
    ]
    start = max(1.0, float(np.median([left for one, left in starts if one.work.rank])))
    saved = [(left - start) / saved_bytes(one.work) for one, left in starts if one.work.rank == 0]
    return replace(rates, start_s=start, save_s=max(0.0, float(np.median(saved))) if saved else rates.save_s), runs


def saved_bytes(work: Work) -> int:
    return work.checkpoints * checkpoint_bytes(work)


def mean_of(group: list[Row]) -> Row:
    """The medians of several runs of one setting."""

    def median(name: str) -> Any:
        values = [value for one in group if (value := getattr(one, name)) is not None]
        return float(np.median(values)) if values else None

    names = ("tokens", "rollout", "train", "step", "wall", "peak")
    found = replace(group[0], **{name: median(name) for name in names})
    return replace(found, work=replace(found.work, tokens=found.tokens or found.work.tokens))


def deviation(one: Row, rates: Rates) -> Measured:
    work, micro = one.work, memory(one.work, H200).micro_batches
    counted = {"rollout": rollout_s(work, H200, rates), "train": train_s(work, micro, H200, rates)}
    took = {name: getattr(one, name) for name in counted}
    found = {name: None if not took[name] else round(float(np.log(took[name] / counted[name])), 4) for name in counted}
    return Measured(session=one.session, model=one.model, place=place_of(work), **found)


def evaluations_s(one: Row, rates: Rates, runs: Sequence[Measured]) -> float:
    return corrected(evaluation_s(one.work, H200, rates), "rollout", place_of(one.work), runs)


def without(kept: Sequence[Row], judged: Row, left_out: Literal["session", "model"]) -> list[Row]:
    return [one for one in kept if getattr(one, left_out) != getattr(judged, left_out)]


def expected_tokens(judged: Row, seen: Sequence[Row]) -> float:
    """Mean length of a completion in the runs that are left, of the task; as `qerl-bench estimate` would take it."""
    if judged.task == "shape":
        return judged.work.tokens  # an option of the task
    found = [one.tokens for one in seen if one.task == judged.task and one.tokens]
    return float(np.median(found)) if found else judged.work.limit


def errors(kept: Sequence[Row]) -> pd.DataFrame:
    """A line for each of JUDGED and each left out: measured and estimated seconds a step, seconds of a run, GiB."""
    lines = []
    for key in JUDGED:
        judged = next(one for one in kept if (one.session, one.model, *_batch(one.work)) == key)
        for left_out in LEFT_OUT:
            seen = without(kept, judged, left_out)
            rates, runs = fit(seen)
            found = estimate(replace(judged.work, tokens=expected_tokens(judged, seen)), H200, rates, runs)
            measured = {"step": judged.step, "run": judged.wall, "GiB": judged.peak}
            counted = {"step": found.step_s, "run": found.run_s, "GiB": found.memory.peak}
            for name, value in measured.items():
                about = {"run": judged.name, "session": judged.session, "left_out": left_out, "of": name}
                lines.append(about | {"measured": value, "estimated": counted[name]})
    return pd.DataFrame(lines).dropna()


def _batch(work: Work) -> tuple[str, int, int]:
    return work.quant, work.rank, work.completions


def markdown(found: pd.DataFrame) -> str:
    """The table of docs/estimate.md: measured, and by how many per cent both estimates are off; and their medians."""
    units = {"step": "a step, s", "run": "the run, s", "GiB": "GiB"}
    text = [
        "| run | " + " | ".join(f"{unit} | session | model" for unit in units.values()) + " |",
        "|---|" + "---|" * 9,
    ]
    off = found.assign(off=100 * (found["estimated"] / found["measured"] - 1))
    for name in dict.fromkeys(off["run"]):
        part: Any = off[off["run"] == name]
        cells = [f"{short(name)}, `{part['session'].iloc[0]}`"]
        for of in units:
            here = part[part["of"] == of].set_index("left_out")
            missing = here.empty
            cells.append("-" if missing else f"{here['measured'].iloc[0]:.3g}")
            cells += ["-" if missing else f"{here.loc[left_out, 'off']:+.0f} %" for left_out in LEFT_OUT]
        text.append("| " + " | ".join(cells) + " |")
    cells = ["median of what it is off"]
    for of in units:
        both = off[off["of"] == of]
        cells += ["", *(f"**{np.median(np.abs(both[both['left_out'] == one]['off'])):.0f} %**" for one in LEFT_OUT)]
    return "\n".join([*text, "| " + " | ".join(cells) + " |"])


def short(name: str) -> str:
    """A run's name without its algorithm and fingerprint."""
    return name.rsplit("-", 1)[0].replace("-none-grpo", "")


def stored(kept: Sequence[Row]) -> str:
    """The content of rates.json."""
    rates, runs = fit(kept)
    kinds = {(one.task, one.model, one.work.limit) for one in kept if one.task != "shape"}
    lengths = [
        Length(*kind, round(float(np.median([one.tokens for one in kept if kind == _kind(one) and one.tokens])), 1))
        for kind in sorted(kinds)
    ]
    content = {
        "made_by": "python benchmarks/estimate.py fit",
        "rates": {name: float(f"{value:.4g}") for name, value in asdict(rates).items()},
        "lengths": [length._asdict() for length in lengths],
        "runs": [asdict(run) for run in runs if run.rollout is not None],
    }
    return json.dumps(content, indent=1) + "\n"


def _kind(one: Row) -> tuple[str, str, int]:
    return one.task, one.model, one.work.limit


def main(words: Sequence[str]) -> None:
    require(words in (["fit"], ["error"]), "python benchmarks/estimate.py fit|error")
    kept = list(rows())
    if words == ["fit"]:
        RATES.write_text(stored(kept))
    else:
        print(markdown(errors(kept)))


if __name__ == "__main__":
    with exit_in_words("stopped"):
        main(sys.argv[1:])
