"""Dose and response: what noise of several sizes does to the policy that samples, and to what RL makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from qerl_studies.effects.estimate import Effect, effect_of
from qerl_studies.figures.effects import PlottedArm
from qerl_studies.figures.exploration import MARGIN, passing
from qerl_studies.figures.paired import SAMPLED, correlation_note, interval_note
from qerl_studies.figures.style import BAND, FULL_WIDTH, GRAY, caption, panels, paper_style
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import last_fifth_mean, mean_between

DOSED = (0.1, 0.2)  # of the steps: the second tenth, in which schedules have most noise


def dose_response(arms: Sequence[PlottedArm]) -> Figure:
    """Each arm minus its control against the KL of its sampler, in the order of their KL.

    Entropy of the sampler while noise is largest and at the end of training, then pass@k after training for one sample
    and for as many as were drawn. Dots are single bases, or seeds of the only one.
    """
    arms = sorted(arms, key=_dose)
    samples = arms[0].runs[0].option("eval.samples")
    early, late = mean_between("entropy", *DOSED), last_fifth_mean("entropy")
    responses: list[tuple[str, Callable[[PlottedArm], Effect], bool]] = [
        ("entropy, second tenth of steps", partial(_of_entropy, metric=early), True),
        ("entropy, last fifth", partial(_of_entropy, metric=late), True),
        *((f"pass@{k} after training", partial(passing, k=k), False) for k in (1, samples)),
    ]
    with paper_style():
        figure, axes = panels(2, 2, 3.6, FULL_WIDTH, sharex=True)
        for ax, (title, response, ratio) in zip(axes.flat, responses, strict=True):
            if not ratio:
                ax.axhspan(-MARGIN, MARGIN, color=BAND, linewidth=0, zorder=0)
            ax.axhline(0, color=GRAY, linewidth=0.7, zorder=1)
            means = []
            for arm in arms:
                found, at = response(arm), _dose(arm)
                shown = np.array([found.whole.value, found.whole.low, found.whole.high, *found.by_unit])
                mean, low, high, *points = 100 * (np.expm1(shown) if ratio else shown)
                ax.plot([at] * len(points), points, ".", color=arm.shade, alpha=0.4, markersize=3.5)
                ax.errorbar(
                    at, mean, [[mean - low], [high - mean]], fmt="D", color=arm.shade, markersize=4.5, elinewidth=1.2,
                    label=arm.label,
                )  # fmt: skip
                means.append((at, mean))
            ax.plot(*zip(*means, strict=True), color=GRAY, linewidth=0.8, zorder=1)
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter("{x:g}")
            ax.xaxis.set_minor_formatter(NullFormatter())
            ax.set_title(title)
        axes[0, 1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        for ax, name in ((axes[0, 0], "difference, %"), (axes[1, 0], "difference, points")):
            ax.set_ylabel(name)
        for ax in axes[1]:
            ax.set_xlabel("KL, nats a token")
        caption(
            figure,
            "An arm minus its control, against the KL of its sampler and its trainer over the second tenth of the "
            f"steps. {interval_note(arms[0].runs, [SAMPLED])} Grey: ±{MARGIN:g} point of accuracy.",
            correlation_note(passing(arm, 1) for arm in arms),
        )
    return figure


def _dose(arm: PlottedArm) -> float:
    """Mean KL (nats/token) of sampler and trainer in the second tenth of the steps."""
    return float(np.mean([mean_between("mismatch/kl", *DOSED)(run) for run in arm.runs]))


def _of_entropy(arm: PlottedArm, metric: Callable[[Run], float]) -> Effect:
    """On the logarithm of entropy."""
    return effect_of([arm.runs, arm.control], lambda run: float(np.log(metric(run))))
