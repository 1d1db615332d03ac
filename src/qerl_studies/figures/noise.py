"""Noise of one size: its dose-response over sigma, and the temperature that gives as much entropy.

Differences are taken within a base model and a seed (paired.py), so the spread between seeds cancels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from qerl_core.checks import ConfigError, require
from qerl_core.statistics import mean_ci
from qerl_studies.effects.pairs import average_seeds, by_cell, mean_of_runs
from qerl_studies.figures.effects import PlottedArm, draw_effect, mark_notes, plotted_arm
from qerl_studies.figures.labels import label_settings
from qerl_studies.figures.paired import ENTROPY as MEAN_ENTROPY
from qerl_studies.figures.paired import REWARD_LATE, SAMPLED, effect
from qerl_studies.figures.style import FULL_WIDTH, caption, margin_band, panels, paper_style, small
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import Measure, mean_between
from qerl_studies.runs.settings import Study
from qerl_studies.tables.paper import Table

SIGMA_FACTORS = ("quant.", "quantizer.", "aqn.")  # of a sweep over sigma
EARLY = (0.0, 0.2)  # shares of a run's steps between which entropy is measured
ENTROPY = replace(MEAN_ENTROPY, name="entropy", metric=mean_between("entropy", *EARLY))
DIFFERENCES = (ENTROPY, REWARD_LATE, SAMPLED)
FEW = 4  # sizes of noise that have room for a number each
KL = mean_between("mismatch/kl", *EARLY)  # (sampler || trainer), nats


def with_constant_sigma(runs: Iterable[Run]) -> list[Run]:
    """The runs with aqn=none, or with aqn=constant, whose level is their sigma. Raises ConfigError without any."""
    constant = [run for run in runs if run.option("aqn.name") in ("none", "constant")]
    require(bool(constant), "none of these runs has aqn=none or aqn=constant: there is no sigma to compare")
    return constant


def sigma_of(run: Run) -> float:
    return 0.0 if run.option("aqn.name") == "none" else float(run.option("aqn.level"))


@dataclass(frozen=True)
class NoiseLevel:
    """A setting with noise, compared with the one without in the same format."""

    label: str
    sigma: float
    arm: PlottedArm


def sigma_doses(study: Study) -> list[NoiseLevel]:
    """The doses of a sweep over formats and sigma. Raises ConfigError with the missing runs, and without sigma 0."""
    settings = label_settings(study.complete_settings("quant.name", "aqn.level"))
    pairs = Counter((setting.label, sigma_of(setting.runs[0])) for setting in settings)
    twice = sorted(pair for pair, count in pairs.items() if count > 1)
    require(not twice, f"several settings are of one format and sigma: {twice}. Leave all but one out")
    sigmas = {sigma for _, sigma in pairs}
    require(min(sigmas) == 0, "no run without noise to compare with: add aqn=none, or aqn=constant aqn.level=0")
    require(max(sigmas) > 0, "every run has sigma 0: a sweep over sigma needs runs with aqn=constant aqn.level=...")
    plain = {setting.label: setting for setting in settings if sigma_of(setting.runs[0]) == 0}
    doses = [
        NoiseLevel(one.label, sigma_of(one.runs[0]), plotted_arm(one, one.label, plain[one.label]))
        for one in settings
        if sigma_of(one.runs[0]) > 0
    ]
    formats = [*plain]
    return sorted(doses, key=lambda dose: (formats.index(dose.label), dose.sigma))


def sigma_effects(doses: Sequence[NoiseLevel]) -> pd.DataFrame:
    """The effect of each dose: a row per format, sigma and measure that the runs have.

    Columns quant, sigma, measure, mean, low, high (95 %; in per cent of the entropy, reward, points), n, and mismatch,
    the mean of mismatch/kl over the steps in which entropy is measured, NaN if it was not kept.
    """
    rows = []
    for dose in doses:
        arm = dose.arm
        kl = mean_of_runs(arm.runs, KL) if _has_kl([dose]) else math.nan
        for measure in _measures(doses):
            estimate = effect(arm.runs, arm.control, measure).whole
            rows.append([dose.label, dose.sigma, measure.name, *measure.ends_on_axis(estimate), estimate.n, kl])
    return pd.DataFrame(rows, columns=["quant", "sigma", "measure", "mean", "low", "high", "n", "mismatch"])


def sigma_table(study: Study) -> Table:
    """`sigma_effects`, shown with four digits."""
    effects = sigma_effects(sigma_doses(study))
    shown = effects.map(lambda value: f"{value:.4g}" if isinstance(value, float) else str(value))
    caption = (
        "Constant noise minus none in the same format, in pairs: mean and 95 % interval from low to high over n pairs; "
        "entropy in per cent, accuracy in points. mismatch: KL(sampler || trainer), nats."
    )
    return Table("sigma", effects, shown, caption)


def _ticks(sigmas: Sequence[float]) -> list[float]:
    """0 and the sizes of noise themselves, or of more than FEW the powers of ten among them."""
    decades = range(math.ceil(math.log10(sigmas[0])), math.floor(math.log10(sigmas[-1])) + 1)
    return [0, *(sigmas if len(sigmas) <= FEW else (10.0**decade for decade in decades))]


def sigma_figure(doses: Sequence[NoiseLevel]) -> Figure:
    """A column per format; against sigma, a row with the effect on each measure, and a row with the KL of the noise."""
    measures = _measures(doses)
    formats = list(dict.fromkeys(dose.label for dose in doses))
    with_kl = _has_kl(doses)
    smallest, largest = min(dose.sigma for dose in doses), max(dose.sigma for dose in doses)
    with paper_style():
        figure, axes = panels(
            len(measures) + with_kl,
            len(formats),
            0.4 + 1.05 * (len(measures) + with_kl),
            FULL_WIDTH,
            sharex=True,
            sharey="row",
        )
        for dose in doses:
            panels_of_format = axes[:, formats.index(dose.label)]
            for ax, measure in zip(panels_of_format, measures, strict=False):
                draw_effect(ax, dose.sigma, dose.arm, measure, along="y")
            if with_kl:
                _draw_kl(panels_of_format[-1], dose)
        for place, label in enumerate(formats):
            of_format = [dose for dose in doses if dose.label == label]
            at, shade = [dose.sigma for dose in of_format], of_format[0].arm.shade
            for ax, measure in zip(axes[:, place], measures, strict=False):
                margin_band(ax, *measure.band, "y")
                means = [effect(dose.arm.runs, dose.arm.control, measure).whole.value for dose in of_format]
                ax.plot([0, *at], [0, *map(measure.on_axis, means)], color=shade, linewidth=0.7, label=f"_{label}")
                ax.yaxis.set_major_locator(MaxNLocator(nbins=4))
            bottom = axes[-1, place]
            axes[0, place].set_title(label)
            bottom.set_xscale("symlog", linthresh=smallest, linscale=0.5)
            ticks = _ticks(sorted({dose.sigma for dose in doses}))
            bottom.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            bottom.minorticks_off()
            bottom.set_xlim(-0.3 * smallest, 1.5 * largest)
            bottom.set_xlabel("noise $\\sigma$")
        for ax, measure in zip(axes[:, 0], measures, strict=False):
            ax.set_ylabel(f"{measure.name},\n{'%' if measure.ratio else measure.unit or 'difference'}")
        if with_kl:
            axes[-1, 0].set_ylabel("KL, nats")
            axes[-1, 0].set_yscale("log")
            axes[-1, 0].yaxis.set_minor_locator(NullLocator())
        caption(
            figure, f"Constant noise{doses[0].arm.runs[0].noise.removeprefix('constant')} minus none in the same "
            "format, in pairs. Entropy: mean of the first fifth of the steps; late reward: of the last fifth.",
            "KL(sampler || trainer): its level over the first fifth." if with_kl else "",
            *mark_notes([dose.arm for dose in doses], measures, levels=False),
        )  # fmt: skip
    return figure


def _measures(doses: Sequence[NoiseLevel]) -> list[Measure]:
    """DIFFERENCES, without the accuracy if a sweep of single steps has no evaluation."""
    runs = [run for dose in doses for run in (*dose.arm.runs, *dose.arm.control)]
    evaluated = all((run.series("eval", "eval/accuracy_sampled").index > 0).any() for run in runs)
    return [measure for measure in DIFFERENCES if measure is not SAMPLED or evaluated]


def _has_kl(doses: Sequence[NoiseLevel]) -> bool:
    return all(run.series("train", "mismatch/kl").notna().any() for dose in doses for run in dose.arm.runs)


def _draw_kl(ax: Axes, dose: NoiseLevel) -> None:
    values = average_seeds(by_cell(dose.arm.runs, KL)).to_numpy()[0]
    shade = dose.arm.shade
    ax.plot([dose.sigma] * len(values), values, ".", color=shade, alpha=0.45, markersize=3, label="_units")
    ax.plot(dose.sigma, mean_ci(values).value, "o", color=shade, markersize=4.5, label=f"_{dose.label}")
    ax.tick_params(axis="y", labelsize=small())


def entropies(runs: Iterable[Run], step: int) -> pd.DataFrame:
    """Quant, seed, sigma, temperature and the entropy at `step` of each run without noise or with constant noise."""
    return pd.DataFrame(
        {
            "quant": run.option("quant.name"),
            "seed": run.option("seed"),
            "sigma": sigma_of(run),
            "temperature": float(run.option("rollout.temperature")),
            "entropy": run.series("train", "entropy").get(step, math.nan),
        }
        for run in with_constant_sigma(runs)
    )


def matched_temperature(table: pd.DataFrame, quant: str, target: float) -> float:
    """The sampling temperature at which `quant` without noise has the entropy `target`.

    The means over seeds are interpolated linearly between temperatures. Raises ConfigError if `target` is outside of
    them.
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
        f"the entropy {target:.4g} is outside of the runs without noise, {curve.min():.4g} to {curve.max():.4g} at "
        f"temperatures {curve.index.min():g} to {curve.index.max():g}; run further temperatures"
    )
