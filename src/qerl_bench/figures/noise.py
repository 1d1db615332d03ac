"""What runs say about noise of one size: the dose-response over sigma, the closed loop, and a matched temperature.

Differences are taken within a base model and a seed (paired.py), so the spread between seeds cancels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from qerl_bench.checks import ConfigError, require
from qerl_bench.claims.measure import during
from qerl_bench.figures.effects import Line, draw_effect, line, marks
from qerl_bench.figures.paired import ENTROPY as WHOLE_ENTROPY
from qerl_bench.figures.paired import REWARD_LATE, SAMPLED, Column, by_cell, effect, over_bases
from qerl_bench.figures.style import BAND, FULL_WIDTH, GREY, SMALL, caption, panels, paper_style
from qerl_bench.statistics import interval
from qerl_bench.study.load import Run
from qerl_bench.study.naming import format_rows
from qerl_bench.study.select import Row, arms

SIGMA_FACTORS = ("quant.", "quantizer.", "aqn.")  # in which the runs of a sweep over sigma may differ
EARLY = (0.0, 0.2)  # shares of a run's steps between which entropy is looked at
ENTROPY = Column("entropy", during("entropy", *EARLY), ratio=True, margin=WHOLE_ENTROPY.margin)
DIFFERENCES = (ENTROPY, REWARD_LATE, SAMPLED)
KL = Column("KL(sampler || trainer), nats", during("mismatch/kl", *EARLY))


def with_one_sigma(runs: Iterable[Run]) -> list[Run]:
    """The runs without a schedule: aqn=none, or aqn=constant, whose level is their sigma. ConfigError without any."""
    found = [run for run in runs if run.option("aqn.name") in ("none", "constant")]
    require(bool(found), "none of these runs has aqn=none or aqn=constant: there is no sigma to compare")
    return found


def sigma(run: Run) -> float:
    return 0.0 if run.option("aqn.name") == "none" else float(run.option("aqn.level"))


def sigma_rows(runs: Sequence[Run]) -> list[Row]:
    """A row per format and sigma. ConfigError unless they are crossed, with the missing runs, and without sigma 0."""
    rows = [row | {"sigma": sigma(row["runs"][0])} for row in arms(runs, ["aqn.name"], ["quant.name", "aqn.level"])]
    rows = sorted(format_rows(rows), key=lambda row: row["sigma"])
    found = [(row["label"], row["sigma"]) for row in rows]
    twice = sorted({pair for pair in found if found.count(pair) > 1})
    require(not twice, f"several settings are of one format and sigma: {twice}. Leave all but one out")
    smallest, largest = found[0][1], found[-1][1]
    require(smallest == 0, "no run without noise to compare with: add aqn=none, or aqn=constant aqn.level=0")
    require(largest > 0, "every run has sigma 0: a sweep over sigma needs runs with aqn=constant aqn.level=...")
    return rows


def sigma_effects(rows: Sequence[Row]) -> pd.DataFrame:
    """What each sigma above 0 does, minus none in the same format: a row per format, sigma and measure that runs have.

    Columns quant, sigma, measure, mean, low, high (95 %; in per cent of the entropy, reward, points), n, and
    mismatch, the mean of mismatch/kl over the steps that entropy is looked at in, NaN where it was not kept.
    """
    found = []
    for label, sigma, one in _doses(rows):
        kl = (
            float(over_bases(by_cell(one.runs, KL.of)).to_numpy().mean()) if _has(one.runs, "mismatch/kl") else math.nan
        )
        for column in _measured(rows):
            mean, _ = effect(one.runs, one.control, column)
            ends = [column.shown(value) for value in (mean.mean, mean.low, mean.high)]
            found.append([label, sigma, column.label, *ends, mean.n, kl])
    return pd.DataFrame(found, columns=["quant", "sigma", "measure", "mean", "low", "high", "n", "mismatch"])


def sigma_figure(rows: Sequence[Row]) -> Figure:
    """A column per format; below each other, against sigma, what it does to each measure, and how large it is as KL."""
    columns, doses = _measured(rows), list(_doses(rows))
    formats = list(dict.fromkeys(label for label, *_ in doses))
    with_kl = all(_has(one.runs, "mismatch/kl") for *_, one in doses)
    smallest, largest = min(sigma for _, sigma, _ in doses), max(sigma for _, sigma, _ in doses)
    with paper_style():
        figure, axes = panels(
            len(columns) + with_kl,
            len(formats),
            0.4 + 1.05 * (len(columns) + with_kl),
            FULL_WIDTH,
            sharex=True,
            sharey="row",
        )
        for label, sigma, one in doses:
            own = axes[:, formats.index(label)]
            for ax, column in zip(own, columns, strict=False):
                draw_effect(ax, sigma, one, column, along="y")
            if with_kl:
                _draw_kl(own[-1], sigma, one)
        for place, label in enumerate(formats):
            for ax, column in zip(axes[:, place], columns, strict=False):
                ends = column.shown(-column.margin), column.shown(column.margin)
                ax.axhspan(*ends, color=BAND, linewidth=0, zorder=0)
                ax.axhline(0, color=GREY, linewidth=0.7, zorder=1)
                means = [effect(one.runs, one.control, column)[0].mean for own, _, one in doses if own == label]
                at = [sigma for own, sigma, _ in doses if own == label]
                shade = next(one.shade for own, _, one in doses if own == label)
                ax.plot([0, *at], [0, *map(column.shown, means)], color=shade, linewidth=0.7, label=f"_{label}")
                ax.yaxis.set_major_locator(MaxNLocator(nbins=4))
            axes[0, place].set_title(label)
            axes[-1, place].set_xscale("symlog", linthresh=smallest, linscale=0.5)
            decades = range(math.ceil(math.log10(smallest)), math.floor(math.log10(largest)) + 1)
            axes[-1, place].set_xticks([0, *(10.0**decade for decade in decades)])
            axes[-1, place].set_xticklabels(["0", *(f"{10.0**decade:g}" for decade in decades)])
            axes[-1, place].minorticks_off()
            axes[-1, place].set_xlim(-0.3 * smallest, 1.5 * largest)
            axes[-1, place].set_xlabel("noise $\\sigma$")
        for ax, column in zip(axes[:, 0], columns, strict=False):
            ax.set_ylabel(f"{column.label},\n{'%' if column.ratio else column.unit or 'difference'}")
        if with_kl:
            axes[-1, 0].set_ylabel("KL, nats")
            axes[-1, 0].set_yscale("log")
            axes[-1, 0].yaxis.set_minor_locator(NullLocator())
        caption(
            figure, "Constant noise minus none in the same format, in pairs. Entropy: mean of the first fifth of the "
            "steps; late reward: of the last fifth.",
            "KL(sampler || trainer): its level over the first fifth." if with_kl else "",
            *marks([one for *_, one in doses], columns, levels=False),
        )  # fmt: skip
    return figure


def _doses(rows: Sequence[Row]) -> list[tuple[str, float, Line]]:
    """Format, sigma and the line of each row with noise, compared with the row without of its format."""
    plain = {row["label"]: row for row in rows if row["sigma"] == 0}
    noisy = [row for row in rows if row["sigma"] > 0]
    return [(row["label"], row["sigma"], line(row, row["label"], plain[row["label"]])) for row in format_rows(noisy)]


def _measured(rows: Sequence[Row]) -> list[Column]:
    """Those of DIFFERENCES that all runs have: a sweep of single steps may have no evaluation."""
    runs = [run for row in rows for run in row["runs"]]
    evaluated = all((run.series("eval", "eval/accuracy_sampled").index > 0).any() for run in runs)
    return [column for column in DIFFERENCES if column is not SAMPLED or evaluated]


def _has(runs: Sequence[Run], metric: str) -> bool:
    return all(run.series("train", metric).notna().any() for run in runs)


def _draw_kl(ax: Axes, sigma: float, one: Line) -> None:
    values = over_bases(by_cell(one.runs, KL.of)).to_numpy()[0]
    ax.plot([sigma] * len(values), values, ".", color=one.shade, alpha=0.45, markersize=3, label="_units")
    ax.plot(sigma, interval(values).mean, "o", color=one.shade, markersize=4.5, label=f"_{one.label}")
    ax.tick_params(axis="y", labelsize=SMALL)


def entropies(runs: Iterable[Run], step: int) -> pd.DataFrame:
    """One row for each of the runs `with_one_sigma`: quant, seed, sigma, temperature, and the entropy at `step`."""
    return pd.DataFrame(
        {
            "quant": run.option("quant.name"),
            "seed": run.option("seed"),
            "sigma": sigma(run),
            "temperature": float(run.option("rollout.temperature")),
            "entropy": run.series("train", "entropy").get(step, math.nan),
        }
        for run in with_one_sigma(runs)
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

    Linear between neighbouring temperatures of the means over seeds. Raises ConfigError if `target` lies outside of them.
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
    raise ConfigError(
        f"the entropy {target:.4g} is outside of what was run without noise, {curve.min():.4g} to {curve.max():.4g} at "
        f"temperatures {curve.index.min():g} to {curve.index.max():g}; run further temperatures"
    )
