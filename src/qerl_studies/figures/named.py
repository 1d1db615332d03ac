"""The figures and tables of `qerl-bench figure`, by name: what may differ between their runs, and what draws them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from qerl_studies.figures import curves, paired
from qerl_studies.figures.against import controls_of, plot_against, plot_schedules
from qerl_studies.figures.aggregate import overview, scores
from qerl_studies.figures.algorithms import algorithm_curves, gains
from qerl_studies.figures.arms import all_arms, control_arms, format_arms
from qerl_studies.figures.effects import dot_plot, level_plot
from qerl_studies.figures.error_decomposition import draw as layer_errors
from qerl_studies.figures.labels import label_settings, noise_text
from qerl_studies.figures.noise import SIGMA_FACTORS, sigma_doses, sigma_figure, sigma_table, with_constant_sigma
from qerl_studies.figures.paired import GREEDY, REWARD_LATE, REWARD_MEAN, SAMPLED
from qerl_studies.figures.read import Differing, all_runs, layers
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import Measure, final_accuracy, median_after_warmup, peak
from qerl_studies.runs.settings import Study
from qerl_studies.tables.advantage_collapse import advantage_collapse
from qerl_studies.tables.paper import Table
from qerl_studies.tables.runs import runs_table
from qerl_studies.tables.step_times import step_times

FORMATS = ("quant.", "quantizer.")
NOISE = (*FORMATS, "aqn.name")
RATES = (*FORMATS, "optim.lr")
RANKS = (*FORMATS, "lora.rank", "lora.alpha")
ADDED = (*FORMATS, "aqn", "noise", "rollout.temperature", "train.entropy_coef")
SPEED = [
    Measure("rollout, tokens/s", median_after_warmup("speed/rollout_tok_s"), ratio=True, level_format="{:.4g}"),
    Measure("step, seconds", median_after_warmup("time/step_s"), ratio=True, level_format="{:.3g}"),
    Measure("peak memory, GiB", peak("memory/peak_gib"), ratio=True, level_format="{:.3g}"),
]
USUAL_RANK = 32
SMOOTH = 7  # steps


class Named(NamedTuple):
    """A figure, a table, or both, of what `read` finds."""

    shows: str
    read: Callable[[Namespace], Any]
    draw: Callable[[Any], Figure] | None
    table: Callable[[Any], Table] | None = None


def reward(study: Study) -> Figure:
    return curves.format_curves(study, [curves.REWARD])


def entropy(study: Study) -> Figure:
    noisy = any(run.option("aqn.name") != "none" for run in study.runs)  # without noise the two are the same
    return curves.format_curves(study, [curves.ENTROPY, curves.CLEAN] if noisy else [curves.ENTROPY])


def aqn(study: Study) -> Figure:
    return curves.noise_curves(study.with_one_schedule(), [curves.REWARD, curves.ENTROPY])


def accuracy(study: Study) -> Figure:
    settings = study.with_one_schedule().complete_settings("quant.name", "aqn.name")
    noise = [f"Noise: {noise_text(one)}." for one in settings if one["aqn.name"] != "none"][:1]
    return dot_plot(format_arms(settings), [SAMPLED, GREEDY, REWARD_MEAN], *noise)


def controls(study: Study) -> Figure:
    """Entropy is that of all steps, since the schedules start without noise."""
    measures = [paired.ENTROPY, REWARD_MEAN, SAMPLED]
    return dot_plot(control_arms(study.complete_settings()), measures, "Each arm minus BF16 with nothing added.")


def speed(study: Study) -> Figure:
    arms = all_arms(study.with_one_schedule().complete_settings())
    return level_plot(arms, SPEED, paired.workload(study.runs[0]))


def ranks(study: Study) -> Figure:
    settings = label_settings(study.complete_settings(), axis="lora.rank")
    usual = controls_of(settings, "lora.rank", USUAL_RANK, same="label")
    alphas = {setting["lora.alpha"] for setting in settings}
    one_alpha = f"LoRA alpha {next(iter(alphas)):g}." if len(alphas) == 1 else ""
    alpha = one_alpha or "LoRA alpha differs with the rank, and so the step."
    minus, measures = f"minus rank {USUAL_RANK}", [REWARD_MEAN, SAMPLED]
    return plot_against(settings, "lora.rank", measures, "LoRA rank", usual, minus, alpha)


def learning_rates(study: Study) -> Figure:
    settings = label_settings(study.complete_settings(), axis="optim.lr")
    bf16 = controls_of(settings, "quant.name", "bf16", same="optim.lr")
    return plot_against(settings, "optim.lr", [REWARD_LATE, SAMPLED], "learning rate", bf16, "minus BF16")


def schedules(study: Study) -> Figure:
    return plot_schedules(study.complete_settings(), [REWARD_LATE, SAMPLED])


def algorithms(study: Study) -> Figure:
    return algorithm_curves(study, SMOOTH)


def sigma(study: Study) -> Figure:
    return sigma_figure(sigma_doses(study))


def all_settings(runs: Sequence[Run]) -> Figure:
    trained = [run for run in runs if run.finished and run.option("algo.name") != "sft"]
    evaluated = [run for run in trained if run.option("eval.name") != "none"]
    tables, settings = scores(evaluated, final_accuracy("sampled"))
    return overview(tables, settings, "held-out, sampled", np.random.default_rng(0))


CONSTANT = Differing(SIGMA_FACTORS, of=with_constant_sigma)
FIGURES = {
    "accuracy": Named("held-out accuracy: formats minus BF16, noise minus none", Differing(NOISE), accuracy),
    "advantage_collapse": Named("final accuracy over early groups without signal", all_runs, None, advantage_collapse),
    "algorithms": Named("reward and entropy by algorithm, and gains", Differing(("algo",)), algorithms, gains),
    "aqn": Named("reward and entropy by step: noise minus none, by format", Differing(NOISE, unfinished=True), aqn),
    "controls": Named("noise, and other sources of entropy, each minus BF16", Differing(ADDED), controls),
    "entropy": Named("entropy by step: formats minus BF16", Differing(FORMATS, unfinished=True), entropy),
    "error_decomposition": Named("the error of each packed layer, by format and quantizer", layers, layer_errors),
    "learning_rates": Named("formats minus BF16 at the same learning rate", Differing(RATES), learning_rates),
    "overview": Named("formats over all settings that they share: interquartile mean", all_runs, all_settings),
    "ranks": Named("reward and accuracy by LoRA rank, and minus rank 32", Differing(RANKS), ranks),
    "reward": Named("reward by step: formats minus BF16", Differing(FORMATS, unfinished=True), reward),
    "runs": Named("options, accuracy and cost of each run: a table alone", all_runs, None, runs_table),
    "schedules": Named("noise schedules: sigma by step, results minus exp", Differing(("aqn.name",)), schedules),
    "sigma": Named("constant noise of each sigma minus none, by format", CONSTANT, sigma, sigma_table),
    "speed": Named("speed and memory of steps that trained, by format and noise", Differing(NOISE), speed),
    "step_times": Named("where the time of a step goes: a table alone", all_runs, None, step_times),
}
