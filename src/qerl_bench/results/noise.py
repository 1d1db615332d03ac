"""What runs say about noise: its effect on entropy, the sweep over sigma, the closed loop, and a matched temperature.

Every interval is Student's t over seeds. Differences are taken within a seed first: runs of one seed share prompts and
random numbers, so the spread between seeds cancels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qerl_bench.errors import BadInput, require
from qerl_bench.results.load import Run
from qerl_bench.results.stats import interval
from qerl_bench.results.style import FORMAT_COLOURS, colour, label_axes, legend_above, panels, paper_style

MEASURED = ("entropy", "entropy_clean", "accuracy", "mismatch/kl", "mismatch/ess")
HELD_OUT = "eval/accuracy_sampled"
SIGMA_FACTORS = ("quant.", "aqn.", "rollout.temperature")  # in which the runs of `sigma_table` may differ


def with_one_sigma(runs: Iterable[Run]) -> list[Run]:
    """The runs without a schedule: aqn=none, or aqn=constant, whose level is their sigma. BadInput without any."""
    found = [run for run in runs if run.option("aqn.name") in ("none", "constant")]
    require(bool(found), "none of these runs has aqn=none or aqn=constant: there is no sigma to compare")
    return found


def sigma_table(runs: Iterable[Run], step: int) -> pd.DataFrame:
    """One row for each of the runs `with_one_sigma`: MEASURED at `step`.

    Columns run, steps, quant, seed, sigma, temperature, MEASURED, and HELD_OUT after training; NaN where it has none.
    """
    rows = []
    for run in with_one_sigma(runs):
        aqn = run.option("aqn.name")
        values = {metric: run.series("train", metric).get(step, math.nan) for metric in MEASURED}
        held_out = run.series("eval", HELD_OUT)
        rows.append(
            {
                "run": run.name,
                "steps": run.option("steps"),
                "quant": run.option("quant.name"),
                "seed": run.option("seed"),
                "sigma": 0.0 if aqn == "none" else float(run.option("aqn.level")),
                "temperature": float(run.option("rollout.temperature")),
                **values,
                HELD_OUT: held_out.iloc[-1] if held_out.index.max() == run.option("steps") else math.nan,
            }
        )
    return pd.DataFrame(rows)


def entropy_effect(table: pd.DataFrame, sigma: float) -> pd.DataFrame:
    """Entropy of the sampling policy without noise and with noise of `sigma`, by format, with the paired difference.

    `table` is that of `sigma_table`; only runs at temperature 1 count. Columns quant, seeds, and for off, on and
    difference the mean and the half-width of its 95 % interval.
    """
    rows = []
    plain: Any = table[table["temperature"] == 1.0]
    for quant, group in _by_format(plain):
        off, on = (group[group["sigma"] == level].set_index("seed")["entropy"] for level in (0.0, sigma))
        seeds = sorted(set(off.index) & set(on.index))
        if not seeds:
            continue
        require(
            off.index.is_unique and on.index.is_unique,
            f"quant={quant} has two runs of one sigma and seed: leave one out",
        )
        numbers = {
            "off": off[seeds].tolist(),
            "on": on[seeds].tolist(),
            "difference": (on[seeds] - off[seeds]).tolist(),
        }
        row: dict[str, object] = {"quant": quant, "seeds": len(seeds)}
        for name, values in numbers.items():
            found = interval(values)
            row |= {name: found.mean, f"{name}_half": found.half}
        rows.append(row)
    require(bool(rows), f"no format has runs of one seed at sigma 0 and at sigma {sigma:g}")
    return pd.DataFrame(rows)


def sigma_figure(table: pd.DataFrame) -> Figure:
    """Entropy, accuracy and mismatch against sigma, mean over seeds with 95 % intervals; a line per format."""
    plain: Any = table[table["temperature"] == 1.0]
    smallest = plain.loc[plain["sigma"] > 0, "sigma"].min()
    require(
        not math.isnan(smallest), "every run has sigma 0: a sweep over sigma needs runs with aqn=constant aqn.level=..."
    )
    shown = [("entropy", "entropy_clean"), ("accuracy", HELD_OUT), ("mismatch/kl", None)]
    with paper_style():
        figure, axes = panels(1, 3, 2.1)
        for ax, (solid, dashed) in zip(axes[0], shown, strict=True):
            for quant, group in _by_format(plain):
                _line(ax, group, quant, solid, linestyle="solid")
                if dashed is not None and bool(group[dashed].notna().to_numpy().any()):
                    _line(ax, group, quant, dashed, linestyle="dashed")
            ax.set_xscale("symlog", linthresh=smallest, linscale=0.4)
            label_axes(ax, solid)
            ax.set_xlabel("noise $\\sigma$")
            ticks = sorted(plain["sigma"].unique())
            ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=60, fontsize=6)
            ax.minorticks_off()
        axes[0, 1].set_ylabel("accuracy")
        axes[0, 2].set_ylabel("KL(sampler || trainer), nats")
        axes[0, 2].set_yscale("log")
        note = "95% intervals over seeds; solid: noise in, dashed: noise off (accuracy: held out)"
        legend_above(figure, [axes[0, 0]], [note])
    return figure


def _line(ax: Axes, group: pd.DataFrame, quant: str, metric: str, linestyle: str) -> None:
    found = group.dropna(subset=[metric])
    if metric == "mismatch/kl":
        found = found[found["sigma"] > 0]  # without noise it is rounding alone
    points = [
        (sigma, interval(found.loc[found["sigma"] == sigma, metric].tolist())) for sigma in sorted(set(found["sigma"]))
    ]
    if not points:
        return
    ax.errorbar(
        [sigma for sigma, _ in points],
        [found.mean for _, found in points],
        yerr=[found.half for _, found in points],
        color=colour(quant),
        linestyle=linestyle,
        marker="o",
        markersize=2.5,
        elinewidth=0.7,
        linewidth=1.0,
        label=quant.upper() if linestyle == "solid" else f"_{quant} {metric}",
    )


def loop_report(run: Run, tolerance: float = 0.1, window: int = 10) -> dict[str, float | str]:
    """How well aqn=entropy held its target: settling step, and what followed it.

    The measurement is the mean of entropy / target over `window` steps. The loop has settled at the first step from
    which on it stays within `tolerance` of 1 for `window` steps. `held` is the share of the steps from there to the end
    whose window lies within `tolerance`; `mean_ratio` the mean of entropy / target over them.
    """
    entropy, target = run.series("train", "entropy"), run.series("train", "aqn/entropy_target")
    require(not target.empty, f"{run.name} has no target: it is not a run of aqn=entropy")
    ratio = (entropy / target).loc[target.index]
    means = ratio.rolling(window).mean()
    inside = (means - 1).abs() <= tolerance
    steady = inside[::-1].rolling(window).sum()[::-1] == window
    settled = int(steady[steady].index.min()) if steady.any() else None
    after = inside.loc[settled:] if settled is not None else inside.iloc[:0]
    return {
        "run": run.name,
        "seed": run.option("seed"),
        "settled": math.nan if settled is None else settled,
        "steps_after": len(after),
        "held": float(after.mean()) if len(after) else 0.0,
        "mean_ratio": float(ratio.loc[settled:].mean()) if settled is not None else math.nan,
        "sigma_last": run.series("train", "aqn/sigma").iloc[-1],
        "saturated_steps": int((run.series("train", "aqn/saturated") != 0).sum()),
    }


def matched_temperature(table: pd.DataFrame, quant: str, target: float) -> float:
    """The sampling temperature at which `quant` without noise has the entropy `target`, between those that were run.

    Linear between neighbouring temperatures of the means over seeds. Raises BadInput if `target` lies outside of them.
    """
    rows = table[(table["quant"] == quant) & (table["sigma"] == 0)]
    curve: Any = rows.groupby("temperature")["entropy"].mean()  # sorted by temperature
    require(
        len(curve) >= 2,
        f"quant={quant} without noise has fewer than two temperatures: run more, rollout.temperature=1,1.1,1.2",
    )
    for (low, below), (high, above) in zip(curve.items(), list(curve.items())[1:], strict=False):
        if min(below, above) <= target <= max(below, above):
            share = (target - below) / (above - below) if above != below else 0.0
            return float(low) + share * (float(high) - float(low))
    raise BadInput(
        f"the entropy {target:.4g} is outside of what was run without noise, {curve.min():.4g} to {curve.max():.4g} at "
        f"temperatures {curve.index.min():g} to {curve.index.max():g}; run further temperatures"
    )


def _by_format(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    known = [*FORMAT_COLOURS]
    groups = [(str(quant), group) for quant, group in table.groupby("quant")]
    return sorted(groups, key=lambda item: (known.index(item[0]) if item[0] in known else len(known), item[0]))
