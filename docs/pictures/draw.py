"""Draws the pictures of docs/concepts.md, `python docs/pictures/draw.py`, with the project's own code and numbers.

loop.svg is a drawing. formats.svg rounds 64 random weights in each format. noise.svg shows the schedules at their
defaults and one draw of noise. statistics.svg compares two arms of the committed study studies/tiny.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from qerl_bench.config import build, compose
from qerl_bench.quant.base import BlockFormat
from qerl_core.checks import ConfigError
from qerl_core.statistics import CONFIDENCE, Estimate, t_quantile
from qerl_studies.claims.evaluate import DIRECTION, SMALLNESS, evaluate_claims
from qerl_studies.claims.registry import QERL, claims_of
from qerl_studies.figures.style import BAND, FORMAT_COLORS, GRAY, panels, paper_style, save, small
from qerl_studies.runs.comparable import load_runs

HERE = Path(__file__).resolve().parent
STUDY = HERE.parents[1] / "studies" / "tiny"
NOISE, DARK = "#B4413C", "#333333"


def loop() -> Figure:
    """The parts of one step, in the order in which they act."""
    figure, ((ax,),) = panels(1, 1, 2.3)
    ax.set(xlim=(0, 100), ylim=(2, 46))
    ax.axis("off")
    boxes = {
        "task": (2, 30, "questions\n(task)"),
        "rollout": (24, 30, "sample G answers\nto each (engine)"),
        "grade": (51, 30, "right or wrong?\n(task)"),
        "advantage": (77, 30, "better than the\ngroup? (algo)"),
        "update": (77, 6, "change the\nadapter (optim)"),
        "policy": (24, 6, "policy = 4-bit weights, frozen (quant)\n+ small adapter, trained (lora)"),
    }
    width = {"task": 16, "policy": 43}
    for key, (x, y, text) in boxes.items():
        shade = "#E8F1FA" if key == "policy" else "#F6F6F6"
        _box(ax, x, y, width.get(key, 21), text, shade)
    for start, end in (((18, 35), (24, 35)), ((45, 35), (51, 35)), ((72, 35), (77, 35)), ((87.5, 30), (87.5, 16))):
        _arrow(ax, start, end)
    _arrow(ax, (77, 11), (67, 11))
    _arrow(ax, (34.5, 16), (34.5, 30))
    ax.text(36, 23, "+ noise in the norm scales (aqn),\n   removed before the update", color=NOISE, va="center")
    ax.text(2, 11, "one step;\na run has 150", color=GRAY, va="center", fontsize=small())
    return figure


def _box(ax: Axes, x: float, y: float, width: float, text: str, shade: str) -> None:
    ax.text(x + width / 2, y + 5, text, ha="center", va="center")
    shape = "round,pad=0,rounding_size=1.5"
    ax.add_patch(FancyBboxPatch((x, y), width, 10, shape, fc=shade, ec=DARK, lw=0.7, zorder=0))


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "lw": 0.9, "color": DARK})


def formats() -> Figure:
    """64 weights of which one is large, on the values that each of three formats can store."""
    weights = torch.randn(1, 64, generator=torch.Generator().manual_seed(5)) * 0.02
    weights[0, 20] = 0.12
    figure, axes = panels(3, 1, 4.4, sharex=True, sharey=True)
    for ax, name in zip(axes[:, 0], ("nvfp4", "mxfp4", "nf4"), strict=True):
        color = FORMAT_COLORS[name]
        stored, levels, block = rounded(name, weights)
        error = float((stored - weights).norm() / weights.norm())
        for first in range(0, 64, block):
            ax.hlines(levels[first // block], first - 0.4, first + block - 0.6, color="#C9C9C9", lw=0.5)
        ax.plot(weights[0], "o", ms=2.2, color=DARK)
        ax.plot(stored[0], "_", ms=4, mew=1.5, color=color)
        ax.set_title(f"{name.upper()}: blocks of {block}, error {error:.1%} of the norm", color=color)
        ax.set(xlim=(-1, 64), ylim=(-0.065, 0.13))
        ax.grid(False)
    axes[2, 0].set_xlabel("64 inputs of one row of a weight matrix")
    return figure


def rounded(name: str, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """W (1, 64) as the format stores it, the values (blocks, 15 or 16) that its blocks can hold, their length."""
    chosen = build(compose([f"quant={name}"])).quant
    assert isinstance(chosen, BlockFormat)
    packed, shape = chosen.pack(weights), (weights.shape[0], weights.shape[1])
    grid = chosen.nearest(torch.linspace(-8, 8, 4001)).unique()
    levels = chosen.unit(chosen.scales(weights), shape).reshape(-1, 1) * grid
    return chosen.operand(packed, shape, torch.float32) * chosen.output_scale(packed), levels, chosen.block


def noise() -> Figure:
    """Left: sigma by step. Right: the scales of one norm before and after a draw."""
    figure, ((left, right),) = panels(1, 2, 2.2)
    steps = np.arange(1, 151)
    for name, dashes in {"exp": "-", "linear": "--", "cosine": ":", "log": "-."}.items():
        schedule = build(compose([f"aqn={name}", "quant=nvfp4"])).aqn
        sigma = [schedule.sigma(int(step), 150) for step in steps]
        left.step(steps, sigma, where="mid", ls=dashes, color=NOISE if name == "exp" else DARK, label=name)
    left.set(xlabel="step", ylabel="noise $\\sigma$", title="ten stages, the first without noise")
    left.legend()
    generator = np.random.default_rng(0)
    scales = 1 + 0.15 * generator.standard_normal(32)
    noisy = scales + 0.01 * generator.standard_normal(32)
    right.vlines(np.arange(32), scales, noisy, color=NOISE, lw=1.0)
    right.plot(scales, "o", ms=2.2, color=GRAY, label="scale w")
    right.plot(noisy, "_", ms=5, mew=1.4, color=NOISE, label="w + Z, $\\sigma$ = 0.01")
    right.set(xlabel="channel of one norm", title="one draw (of 32 invented scales)")
    right.legend()
    return figure


def statistics() -> Figure:
    """Left: the arms of claim 2 in the tiny study, by seed. Middle: their difference. Right: intervals and words."""
    claim = claims_of(QERL)[1]
    result = evaluate_claims([claim], load_runs([STUDY]))[0].contrasts[0].primary
    assert result is not None and result.effect is not None
    estimate, stratum, margin = result.effect.whole, result.stratum, claim.measure.margin
    signs = [arm.sign for arm in result.contrast.arms]
    treated, control = (
        [claim.measure.averaged(stratum.arms[signs.index(sign)][cell]) for cell in stratum.cells] for sign in (1, -1)
    )
    figure, ((left, middle, right),) = panels(1, 3, 2.3, width_ratios=(1, 1, 1.5))
    left.plot([0, 1], [control, treated], color=GRAY, lw=0.7, zorder=1)
    for place, (name, values) in enumerate((("bf16", control), ("nvfp4", treated))):
        left.plot([place] * len(values), values, "o", color=FORMAT_COLORS[name])
    left.set(xlim=(-0.4, 1.4), title="mean reward, run by run")
    left.set_xticks([0, 1], ["BF16", "NVFP4"])
    middle.axhspan(-margin, margin, color=BAND)
    middle.axhline(0, color=GRAY, lw=0.7)
    middle.plot(np.zeros(len(treated)), np.subtract(treated, control), "o", ms=2.5, color=GRAY)
    middle.errorbar([1], [estimate.value], yerr=[estimate.half_width], fmt="o", color=FORMAT_COLORS["nvfp4"])
    middle.set(xlim=(-0.6, 1.6), ylim=(-0.045, 0.045), title="NVFP4 minus BF16")
    middle.set_xticks([0, 1], ["seeds", "mean"])
    intervals(right)
    return figure


def intervals(ax: Axes) -> None:
    """Five intervals beside the margin, and the word that a claim of "more" gets for each, if it is the only one."""
    chosen = [(0.8, 2.6), (0.15, 0.85), (-0.6, 0.6), (-0.7, 2.0), (-2.4, -0.4)]
    ax.axvspan(-1, 1, color=BAND)
    ax.axvline(0, color=GRAY, lw=0.7)
    for place, (low, high) in enumerate(chosen):
        ax.plot([low, high], [-place, -place], color=DARK, lw=1.6, solid_capstyle="butt")
        ax.plot((low + high) / 2, -place, "o", ms=3, color=DARK)
    ax.set(xlim=(-3, 3), ylim=(-4.6, 0.6), xlabel="effect, in margins", title="an interval and its word")
    ax.set_yticks([-place for place in range(len(chosen))], [word(*one) for one in chosen])
    ax.grid(False)


def word(low: float, high: float) -> str:
    """The verdict on "more" for a 95 % interval of eight seeds, in margins, by the tests of claims/evaluate.py."""
    df = 7
    stderr = (high - low) / 2 / t_quantile((1 + CONFIDENCE) / 2, df)
    effect = Estimate((low + high) / 2, stderr, df + 1, df)
    small = effect.p_within(1) <= SMALLNESS
    for p, name in ((effect.p_above(0), "supported"), (effect.p_below(0), "reversed")):
        if 2 * p <= DIRECTION:
            return f"{name} but\nnegligible" if small else name
    return "negligible" if small else "undecided"


PICTURES = {"loop": loop, "formats": formats, "noise": noise, "statistics": statistics}


def main(folder: Path) -> None:
    """Write the four pictures to `folder`."""
    for name, draw in PICTURES.items():
        with paper_style():
            figure = draw()
        save(figure, folder / name)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
    except ConfigError as error:
        sys.exit(str(error))
