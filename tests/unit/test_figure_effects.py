"""Which runs a figure of a whole study shows, and the numbers in its axes; a study is made up of three-step runs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from qerl_core.checks import ConfigError
from qerl_studies.claims import measures
from qerl_studies.claims.registry import QERL, claims_of
from qerl_studies.commands.figure import main as draw_figure
from qerl_studies.figures import against, arms, effects, named, paired
from qerl_studies.figures.aggregate import overview, scores
from qerl_studies.figures.curves import REWARD, Curve, format_curves, noise_curves
from qerl_studies.figures.labels import label_settings, noise_text
from qerl_studies.figures.noise import sigma_doses, sigma_figure
from qerl_studies.figures.run import comparison
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.load import Run, load_run
from qerl_studies.runs.measure import Measure, area, final_accuracy, median_after_warmup
from qerl_studies.runs.resampling import probability_of_improvement
from qerl_studies.runs.settings import Study, describe_repeats, group_by_setting
from qerl_studies.tables.terminal import summary
from tests.run_folders import DONE, SHORT, write_run
from tests.scripts import script

REPOSITORY = Path(__file__).parents[2]
T = 12.706205  # Student's t, 97.5 %, one degree of freedom: two seeds a, b have half = T |a - b| / 2
SIGMAS = {"exp": (0, 0.01, 0.001), "linear": (0, 0.01, 0.005), "none": (0, 0, 0), "format_error": (0.1, 0.1, 0.1)}
SIGMAS["constant"] = (0.01, 0.01, 0.01)


def held_out(quant: str, aqn: str, rank: int, seed: int) -> float:
    """What `make` gives as held-out accuracy: with NVFP4 it is higher by 0.02 and 0.04, with noise by 0.01."""
    return 0.5 + rank / 1000 + seed / 100 + 0.02 * (1 + seed) * (quant == "nvfp4") + 0.01 * (aqn != "none")


def make(
    root: Path, seed: int, quant: str = "bf16", aqn: str = "none", rank: int = 32, lr: float = 3e-4, **changes: Any
) -> Run:
    """A run whose mean reward is 0.4 + seed / 10."""
    noise: dict[str, Any] = {"name": aqn, "_target_": f"schedule.{aqn}"}
    if aqn in ("exp", "linear"):
        noise |= {"sigma_start": changes.pop("sigma", 0.01)}
    if aqn == "constant":
        noise |= {"level": changes["level"]}
    base, course = changes.pop("base", 0), changes.pop("course", (0.5, 0.5, 0.5))
    config = SHORT | {
        "name": f"{quant}-{aqn}-{rank}-{lr}-{'-'.join(map(str, changes.values()))}-s{seed}-x",
        "seed": seed,
        "quant": {"name": quant},
        "quantizer": {"name": changes.get("quantizer", "rtn")},
        "aqn": noise,
        "eval": {"name": "task"},
        "lora": {"name": "default", "rank": rank, "alpha": rank},
        "model": {"name": "tiny", "lr": 3e-4, "seed": base},
        "rollout": {"temperature": changes.get("temperature", 1.0), "prompts_per_step": 2, "group_size": 4},
        "noise": {"cadence": changes.get("cadence", "step"), "where": changes.get("where", "norms")},
        "optim": {"lr": lr},
        "train": {"entropy_coef": changes.get("entropy_coef", 0.0)},
    }
    config["name"] += f"{len(list(root.glob('*')))}"
    folder = root / config["name"]
    lines: list[dict[str, Any]] = []
    for step, sigma, accuracy in zip((1, 2, 3), SIGMAS[aqn], course, strict=True):
        entropy = 0.1 * step * (1.1 if quant == "nvfp4" else 1)
        line = {"kind": "train", "step": step, "reward/mean": 0.4 + seed / 10, "accuracy": accuracy, "entropy": entropy}
        line |= {"mismatch/kl": 1e-3, "mismatch/ess": 0.99, "train/taught_frac": changes.get("taught", 1.0)}
        line |= {"entropy_clean": 0.1, "aqn/sigma": sigma, "time/step_s": 1.0}
        line |= {"speed/rollout_tok_s": 1000.0 * (1.5 + seed if quant == "nvfp4" else 1)}
        lines.append(line | {"memory/peak_gib": 0.5})
    for step, accuracy in ((0, 0.3), (3, held_out(quant, aqn, rank, seed))):
        lines.append({"kind": "eval", "step": step, "eval/accuracy_sampled": accuracy, "eval/accuracy_greedy": 0.9})
    return load_run(write_run(folder, config, lines, DONE))


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of: formats x noise, other rates, ranks, a schedule, stronger noise, and controls."""
    root = tmp_path_factory.mktemp("study")
    for seed in (0, 1):
        for quant in ("nvfp4", "bf16"):
            make(root, seed, quant, "exp")
            for lr in (1e-4, 3e-4, 1e-3):
                make(root, seed, quant, lr=lr)
            for rank in (8, 128):
                make(root, seed, quant, rank=rank)
        make(root, seed, "nf4")
        make(root, seed, "nf4", "exp")
        make(root, seed, "nvfp4", "linear")
        make(root, seed, "nvfp4", "exp", sigma=0.05)
        make(root, seed, temperature=1.5)
        make(root, seed, entropy_coef=0.01)
        make(root, seed, aqn="format_error", cadence="run")
    return root


@cache
def loaded(study: Path) -> list[Run]:
    return load_runs([study])


def selected(study: Path, *factors: str) -> Study:
    return Study(loaded(study)).select(*factors)


def described(study: Study) -> set[tuple[Any, ...]]:
    keys = ("quant.name", "aqn.name", "lora.rank", "optim.lr", "rollout.temperature")
    return {tuple(run.option(key) for key in keys) for run in study.runs}


def dots_of(ax: Any) -> dict[str, tuple[float, float, float]]:
    """Position, value and half of its interval of each labelled dot, in a figure of rows."""
    found = {}
    for container in ax.containers:
        assert isinstance(container, ErrorbarContainer)
        ((x, y),) = container.lines[0].get_xydata()
        ((low, _), (high, _)) = container.lines[2][0].get_segments()[0]
        found[f"{container.get_label()} {y:g}"] = float(y), float(x), float(high - low) / 2
    return found


def band_of(ax: Any) -> tuple[float, float]:
    """Where the margin of a panel of rows lies."""
    box = ax.patches[0].get_extents().transformed(ax.transData.inverted())
    return float(box.x0), float(box.x1)


def rows_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_yticklabels()]


def words(figure: Figure) -> str:
    return " ".join(figure.get_supxlabel().split())


# --- which runs ------------------------------------------------------------------------------------------------------


def test_formats_are_compared_without_noise_at_the_models_own_rate(study: Path) -> None:
    chosen = described(selected(study, "quant"))
    assert chosen == {(quant, "none", 32, 3e-4, 1.0) for quant in ("bf16", "nvfp4", "nf4")}


def test_what_a_setting_does_not_have_does_not_set_it_apart(study: Path) -> None:
    chosen = selected(study, "quant", "aqn.name")
    expected = {
        ("bf16", "none"),
        ("bf16", "exp"),
        ("nvfp4", "none"),
        ("nvfp4", "exp"),
        ("nvfp4", "linear"),
        ("nf4", "none"),
        ("nf4", "exp"),
    }
    assert {setting[:2] for setting in described(chosen)} == expected
    assert all(run.option("aqn.sigma_start") == 0.01 for run in chosen.runs if run.option("aqn.name") != "none")
    assert {setting[:2] for setting in described(chosen.with_one_schedule())} == expected - {("nvfp4", "linear")}


@pytest.mark.parametrize(
    ("factors", "key", "values"),
    [
        (("quant", "lora.rank", "lora.alpha"), "lora.rank", {8, 32, 128}),
        (("optim.lr",), "optim.lr", {1e-4, 3e-4, 1e-3}),
    ],
)
def test_a_numeric_factor(study: Path, factors: tuple[str, ...], key: str, values: set[float]) -> None:
    assert {run.option(key) for run in selected(study, *factors).runs} == values


def test_what_noise_does_not_use_without_noise_does_not_set_runs_apart(tmp_path: Path) -> None:
    runs = [make(tmp_path, 0, "nvfp4"), make(tmp_path, 0, "nvfp4", "exp", cadence="group")]
    assert Study(runs).select("quant.", "aqn.").runs == runs
    apart = make(tmp_path, 0, "nvfp4", "linear", cadence="batch")
    assert Study([*runs, apart]).select("quant.", "aqn.").runs in (runs, [runs[0], apart])


def test_nothing_to_compare_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no finished run"):
        Study([]).select("quant")
    runs = [make(tmp_path, 0), make(tmp_path, 1), make(tmp_path, 0, "nvfp4", lr=1e-3)]
    with pytest.raises(ConfigError, match="no two of these 3 runs differ in quant"):
        Study(runs).select("quant")
    with pytest.raises(ConfigError, match=r"is one run, and no two differ in aqn\.name \(and the seed\) alone"):
        Study(runs[:1]).select("aqn.name")


def test_seeds_of_a_setting_stand_together_and_a_gap_in_the_grid_is_named(tmp_path: Path) -> None:
    runs = [make(tmp_path, 1), make(tmp_path, 0), make(tmp_path, 0, "nvfp4")]
    assert [[run.option("seed") for run in setting.runs] for setting in group_by_setting(runs)] == [[0, 1], [0]]
    with pytest.raises(ConfigError, match=r"Missing: nvfp4-none.* seed=1"):
        Study(runs).complete_settings()
    with pytest.raises(ConfigError, match="two runs of one setting"):
        Study([*runs, make(tmp_path, 0)]).complete_settings()


def test_a_cell_that_a_factorial_design_lacks_is_named_with_its_seeds(tmp_path: Path) -> None:
    pairs = [("bf16", "none"), ("nvfp4", "none"), ("nvfp4", "exp")]
    runs = [make(tmp_path, seed, *pair) for pair in pairs for seed in (0, 1)]
    assert len(Study(runs).complete_settings()) == 3
    with pytest.raises(ConfigError, match=r"Missing: quant=bf16 aqn=exp seed=0,1\. "):
        Study(runs).complete_settings("quant.name", "aqn.name")


def test_bases_repeat_a_setting_as_seeds_do_and_a_missing_one_is_named(tmp_path: Path) -> None:
    cells = [("bf16", 0), ("bf16", 1), ("nvfp4", 0)]
    runs = [make(tmp_path, seed, quant, base=base) for quant, base in cells for seed in (0, 1)]
    assert len(group_by_setting(runs)) == 2 and Study(runs).select("quant").runs == runs
    with pytest.raises(ConfigError, match=r"Missing: nvfp4-none.* of base tiny: .*seed=1.* seed=0,1"):
        Study(runs).complete_settings()


def test_bases_may_have_a_seed_each_if_all_settings_have_the_same(tmp_path: Path) -> None:
    """As copies of a released model have."""
    runs = [make(tmp_path, seed, quant, base=seed) for quant in ("bf16", "nvfp4") for seed in (0, 1)]
    assert len(Study(runs).complete_settings()) == 2
    with pytest.raises(ConfigError, match=r"Missing: nvfp4-none.* seed=1\."):
        Study(runs[:-1]).complete_settings()


# --- pairs -----------------------------------------------------------------------------------------------------------

ACCURACY = Measure("held-out", final_accuracy("sampled"), "points", 100.0, margin=0.01, level_format="{:.1%}")


def test_a_difference_is_taken_within_a_seed_and_its_interval_over_seeds(tmp_path: Path) -> None:
    control, treated = ([make(tmp_path, seed, quant) for seed in (0, 1)] for quant in ("bf16", "nvfp4"))
    found = paired.effect(treated, control, ACCURACY)
    mean, points = found.whole, found.by_unit
    assert points == pytest.approx([0.02, 0.04])
    assert (mean.value, mean.half_width) == (pytest.approx(0.03), pytest.approx(T * 0.01))
    assert paired.effect_text(ACCURACY, mean) == ["+3.0", "[\N{MINUS SIGN}9.7, +15.7]"]
    speed = Measure("tokens/s", median_after_warmup("speed/rollout_tok_s"), ratio=True, level_format="{:.0f}")
    assert paired.effect(treated, control, speed).by_unit == pytest.approx(np.log([1.5, 2.5]))
    assert paired.level(treated, speed) == pytest.approx(1000 * (1.5 * 2.5) ** 0.5)
    assert paired.level(control, ACCURACY) == pytest.approx(0.537)
    with pytest.raises(ConfigError, match="do not have the same bases and seeds"):
        paired.effect(treated, control[:1], ACCURACY)


def test_over_several_bases_the_interval_is_that_of_bases(tmp_path: Path) -> None:
    """The effect of a seed is the same on each base, so that bases, seeds averaged first, do not spread at all."""
    control, treated = (
        [make(tmp_path, seed, quant, base=base) for base in (0, 1, 2) for seed in (0, 1)] for quant in ("bf16", "nvfp4")
    )
    found = paired.effect(treated, control, ACCURACY)
    mean, points = found.whole, found.by_unit
    assert points == pytest.approx([0.03] * 3) and mean.n == 3
    assert describe_repeats(treated) == "3 base models (tiny) on arithmetic, the mean of 2 seeds each"
    assert describe_repeats(treated[::2]) == "3 base models (tiny) on arithmetic, one seed each"
    own = [treated[0], treated[3], treated[4]]  # a seed of its own on each base is one seed each too
    assert describe_repeats(own) == describe_repeats(treated[::2])
    assert "Small points: base models." in paired.interval_note(treated)


def test_pairs_that_were_torn_between_machines_are_refused(tmp_path: Path) -> None:
    control, treated = make(tmp_path, 0), make(tmp_path, 0, "nvfp4")
    other = replace(treated, environment={"packages": {"torch": "2.11"}})
    with pytest.raises(ConfigError, match=r"different machines or library versions .*torch 2\.11"):
        paired.effect([other], [control], ACCURACY)


def test_margins_are_those_of_the_claims() -> None:
    assert (paired.SAMPLED.margin, paired.REWARD_MEAN.margin, paired.REWARD_LATE.margin) == (0.01, 0.02, 0.02)
    assert paired.ENTROPY.on_axis(paired.ENTROPY.margin) == pytest.approx(2)
    claimed = {claim.measure.name: claim.measure.margin for claim in claims_of(QERL)}
    for measure in (measures.ACCURACY, measures.REWARD, measures.LATE_REWARD, measures.INITIAL_ENTROPY):
        assert measure.margin == claimed[measure.name]


# --- what is drawn ---------------------------------------------------------------------------------------------------


def test_rows_are_differences_to_bf16_and_of_noise_with_the_margin_as_a_band(study: Path) -> None:
    table = selected(study, "quant", "aqn.name").with_one_schedule().complete_settings("quant.name", "aqn.name")
    figure = effects.dot_plot(arms.format_arms(table), [ACCURACY, Measure("reward", area("reward/mean"))])
    names = ["minus BF16", "BF16 (control)", "NF4", "NVFP4", "noise minus none", "BF16", "NF4", "NVFP4"]
    assert rows_of(figure) == names
    left, right = figure.axes
    expected = {"_NF4 2": 0, "_NVFP4 3": 3, "_BF16 5": 1, "_NF4 6": 1, "_NVFP4 7": 1}
    drawn = dots_of(left)
    assert {name: round(dot[1], 6) for name, dot in drawn.items()} == expected
    assert drawn["_NVFP4 3"][2] == pytest.approx(100 * T * 0.01, rel=1e-5)
    assert band_of(left) == pytest.approx((-1, 1)) and band_of(right)[0] == band_of(right)[1]
    assert all(dot[1:] == (pytest.approx(0), pytest.approx(0)) for dot in dots_of(right).values())
    filled = [container.lines[0].get_markerfacecolor() != "white" for container in left.containers]
    assert filled == [False, False, True, True, True]
    numbers = [text.get_text() for text in left.texts]
    assert numbers == ["53.7%", "53.7%", "56.7%", "54.7%", "54.7%", "57.7%"]
    assert list(left.get_lines()[1].get_xdata()) == pytest.approx([0, 0])  # seeds of NF4
    for said in ("2 seeds of one base model", "Filled: with noise", "held-out ±1 points", "Small points: seeds"):
        assert said in words(figure)


def test_a_single_seed_has_no_interval_and_is_called_that(tmp_path: Path) -> None:
    table = Study([make(tmp_path, 0), make(tmp_path, 0, "nvfp4")]).settings
    figure = effects.dot_plot(arms.format_arms(table), [ACCURACY])
    assert dots_of(figure.axes[0]) == {"_NVFP4 2": (2, pytest.approx(2), 0)}
    assert "A single seed, so there is no interval." in words(figure) and "hollow" not in words(figure)


def test_a_pair_of_which_one_run_diverged_is_a_cross(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl_studies.claims.preconditions.SMOOTHED", 1)
    runs = [make(tmp_path, 0), make(tmp_path, 1)]
    runs += [make(tmp_path, 0, "nvfp4"), make(tmp_path, 1, "nvfp4", course=(0.5, 0.8, 0.6))]
    figure = effects.dot_plot(arms.format_arms(Study(runs).settings), [ACCURACY])
    marks = {
        line.get_marker(): list(line.get_xdata()) for line in figure.axes[0].get_lines() if line.get_marker() in ".x"
    }
    assert marks == {".": [pytest.approx(2)], "x": [pytest.approx(4)]}
    assert "diverged" in words(figure)


def test_rows_that_format_and_noise_do_not_tell_apart_name_what_does(tmp_path: Path) -> None:
    """Quantizers of 4-bit weights and learning rates; an axis is not named, nor a quantizer of 16-bit weights."""
    runs = [make(tmp_path, 0, lr=1e-3), make(tmp_path, 0, "nvfp4"), make(tmp_path, 0, "nvfp4", quantizer="awq")]
    table = Study(runs).settings
    assert [one.label for one in label_settings(table)] == [
        "BF16, lr 0.001", "NVFP4, awq, lr 0.0003", "NVFP4, rtn, lr 0.0003",
    ]  # fmt: skip
    labels = [one.label for one in label_settings(table[:2], axis="optim.lr")]
    assert labels == ["BF16", "NVFP4"]


def test_noise_on_adapters_is_called_that_wherever_noise_has_a_name(tmp_path: Path) -> None:
    runs = [make(tmp_path, 0)]
    runs += [make(tmp_path, 0, aqn=aqn, where=where) for aqn in ("exp", "linear") for where in ("norms", "adapters")]
    idle = make(tmp_path, 0, where="adapters", entropy_coef=0.01)
    settings = Study(runs[:3]).settings
    assert [run.noise for run in (*runs, idle)] == [
        "none", "exp", "exp on adapters", "linear", "linear on adapters", "none",
    ]  # fmt: skip
    assert [arm.label for arm in arms.format_arms(settings)] == [
        "noise minus none", "BF16, AQN exp", "BF16, AQN exp on adapters",
    ]  # fmt: skip
    assert [arm.label for arm in arms.all_arms(settings)] == ["BF16", "BF16, AQN exp", "BF16, AQN exp on adapters"]
    controls = [arm.label for arm in arms.control_arms(settings)]
    assert controls == ["BF16", "nothing added (control)", "AQN from 0.01", "AQN on adapters from 0.01"]
    assert noise_text(settings[2]).startswith("AQN exp on adapters ($")
    assert {run.noise for run in Study(runs).with_one_schedule().runs} == {"none", "exp"}
    labels = [text.get_text() for text in comparison(Study(runs[1:3]), ["accuracy"]).legends[0].get_texts()]
    assert labels == ["BF16, AQN exp", "BF16, AQN exp on adapters"]
    assert "noise of each schedule on adapters" in words(against.plot_schedules(Study(runs[2::2]).settings, [ACCURACY]))
    assert summary([run.path for run in runs[1:3]])["noise"].tolist() == ["exp", "exp on adapters"]


def test_a_sweep_over_sigma_on_adapters_says_so(tmp_path: Path) -> None:
    runs = [make(tmp_path, 0), make(tmp_path, 0, aqn="constant", level=0.01, where="adapters")]
    assert "Constant noise on adapters minus none" in words(sigma_figure(sigma_doses(Study(runs))))


def against_of(study: Path, key: str, *factors: str) -> Figure:
    settings = label_settings(selected(study, "quant", *factors).complete_settings(), axis=key)
    if key == "lora.rank":
        controls, minus = against.controls_of(settings, key, 32, "quant.name"), "minus rank 32"
    else:
        controls, minus = against.controls_of(settings, "quant.name", "bf16", key), "minus BF16"
    return against.plot_against(settings, key, [ACCURACY], key, controls, minus)


def test_levels_and_differences_stand_at_their_true_rank(study: Path) -> None:
    figure = against_of(study, "lora.rank", "lora.rank", "lora.alpha")
    top, bottom = figure.axes
    levels = {str(line.get_label()): line.get_xydata() for line in top.get_lines()}
    assert list(levels) == ["BF16", "NF4", "NVFP4"]  # nf4 has one rank, and is there as a point
    np.testing.assert_allclose(levels["BF16"], [(8, 0.513), (32, 0.537), (128, 0.633)])
    np.testing.assert_allclose(levels["NF4"], [(32, 0.537)])
    assert [text.get_text() for text in bottom.get_xticklabels()] == ["8", "32", "128"]
    assert min(text.get_fontsize() for text in bottom.get_xticklabels()) >= 7
    dots = [container.lines[0].get_xydata()[0] for container in bottom.containers]
    for rank, difference in ((8, -2.4), (128, 9.6)):  # formats stand beside each other, around their rank
        first, second = (float(x) for x, y in dots if abs(y - difference) < 1e-6)
        assert 0.8 * rank < first < rank and first * second == pytest.approx(rank**2)
    assert len(dots) == 4  # nothing at rank 32, the control
    assert {line.get_linestyle() for line in bottom.get_lines()} <= {"None", "-"}
    assert not any(line.get_linestyle() == "-" and len(set(line.get_ydata())) > 1 for line in bottom.get_lines())


def test_at_each_rate_formats_are_compared_with_bf16_there(study: Path) -> None:
    figure = against_of(study, "optim.lr", "optim.lr")
    _, bottom = figure.axes
    dots = sorted(
        (float(x), float(y)) for x, y in (container.lines[0].get_xydata()[0] for container in bottom.containers)
    )
    alone = [dot for dot in dots if not 2e-4 < dot[0] < 5e-4]
    np.testing.assert_allclose(alone, [(1e-4, 3.0), (1e-3, 3.0)])  # at 3e-4, NF4 stands beside NVFP4
    assert len(dots) == 4 and figure.axes[1].get_xlabel() == r"optim.lr ($\times 10^{-4}$)"
    assert [text.get_text() for text in bottom.get_xticklabels()] == ["1", "3", "10"]


def test_nothing_to_draw_against_and_a_missing_control_are_refused(tmp_path: Path) -> None:
    runs = [make(tmp_path, 0), make(tmp_path, 0, "nvfp4"), make(tmp_path, 0, "nvfp4", rank=8)]
    table = label_settings(Study(runs).settings, axis="lora.rank")
    with pytest.raises(ConfigError, match=r"no format was run with two values of lora\.rank"):
        against.plot_against(table[:2], "lora.rank", [ACCURACY], "rank", {}, "")
    (rank_8,) = (one for one in table if one["lora.rank"] == 8)
    control = against.controls_of(table, "lora.rank", 32, "quant.name")[rank_8]
    assert (control["quant.name"], control["lora.rank"]) == ("nvfp4", 32)
    with pytest.raises(ConfigError, match=r"nvfp4-none-8-.*: no run with quant\.name=bf16"):
        against.controls_of(table, "quant.name", "bf16", "lora.rank")


def test_schedules_show_their_sigma_and_what_they_are_above_the_exponential_one(study: Path) -> None:
    runs = [run for run in loaded(study) if run.option("quant.name") == "nvfp4"]
    table = Study(runs).select("aqn.name").complete_settings()
    figure = against.plot_schedules(table, [ACCURACY])
    curves = {line.get_label(): line.get_ydata().tolist() for line in figure.axes[0].get_lines()}
    assert curves == {"exp (control)": [0, 0.01, 0.001], "none": [0, 0, 0], "linear": [0, 0.01, 0.005]}
    assert {name: round(dot[1], 6) for name, dot in dots_of(figure.axes[1]).items()} == {"_none 1": -1, "_linear 2": 0}
    with pytest.raises(ConfigError, match="compared with aqn=exp"):
        against.plot_schedules([one for one in table if one["aqn.name"] != "exp"], [ACCURACY])


def test_controls_are_named_by_what_they_add_and_compared_with_plain_bf16(study: Path) -> None:
    compared = selected(study, "quant", "aqn", "noise", "rollout.temperature", "train.entropy_coef")
    found = arms.control_arms(compared.complete_settings())
    assert [line.label for line in found] == [
        "BF16", "nothing added (control)", "AQN from 0.01", "entropy bonus 0.01", "noise of NVFP4's size, drawn once",
        "temperature 1.5", "NVFP4", "nothing added", "AQN from 0.01", "AQN from 0.05",
    ]  # fmt: skip
    assert [bool(line.control) for line in found] == [False, False, *[True] * 4, False, *[True] * 3]
    assert {tuple(run.name for run in line.control) for line in found if line.control} == {
        tuple(run.name for run in found[1].runs)
    }
    without = [run for run in compared.runs if run not in found[1].runs]
    with pytest.raises(ConfigError, match="0 of these settings are BF16 without noise"):
        arms.control_arms(Study(without).settings)


def test_speed_is_drawn_from_zero_and_of_steps_that_trained_alone(study: Path, tmp_path: Path) -> None:
    draw = named.speed
    figure = draw(selected(study, "quant", "aqn.name"))
    assert all(ax.get_xlim()[0] == 0 for ax in figure.axes)
    numbers = [text.get_text() for text in figure.axes[0].texts]
    assert numbers[:2] == ["1000", "1000, ×1.00"]  # the others are ratios to BF16, with an interval where they spread
    low, high = (math.exp((math.log(1.5) + math.log(2.5)) / 2 + sign * T * math.log(2.5 / 1.5) / 2) for sign in (-1, 1))
    assert f"2000, ×1.94 [{low:.2f}, {high:.2f}]" in numbers
    assert "tiny, 8 completions a step, on unknown" in words(figure)
    runs = [make(tmp_path, 0), make(tmp_path, 0, "nvfp4", taught=0.0)]
    with pytest.raises(ConfigError, match=r"nvfp4-none.* trained nothing"):
        draw(Study(runs))


def test_curves_are_differences_by_step_with_the_whole_above_them(study: Path) -> None:
    figure = format_curves(selected(study, "quant"), [Curve("entropy", paired.ENTROPY)])
    levels, nf4, nvfp4 = figure.axes
    assert [line.get_label() for line in levels.get_lines()] == ["BF16", "NF4", "NVFP4"]
    np.testing.assert_allclose(levels.get_lines()[2].get_ydata(), [0.11, 0.22, 0.33])
    title = nvfp4.get_title(loc="left").split("\n")
    assert title == ["NVFP4 \N{MINUS SIGN} BF16", "+10.0", "[+10.0, +10.0]"]  # per cent
    drawn = {str(line.get_label()): line for line in nvfp4.get_lines()}
    np.testing.assert_allclose(drawn["_NVFP4 \N{MINUS SIGN} BF16"].get_ydata(), [10, 10, 10])
    assert nf4.get_ylim() == nvfp4.get_ylim() and nf4.get_ylim()[0] < -2 and nf4.get_ylim()[1] > 10
    assert "±2% of mean entropy" in words(figure) and "2 seeds of one base model" in words(figure)


def test_a_curve_of_entropy_never_shows_a_stage_before_it_begins() -> None:
    """A mean around a step would: at step 2 it holds the noise of step 3."""
    run = Run(
        Path("x"),
        {},
        {},
        True,
        {},
        pd.DataFrame({"kind": "train", "step": [1, 2, 3], "metric": "entropy", "value": [1.0, 1.0, 4.0]}),
    )
    column = replace(paired.ENTROPY, ratio=False)
    assert Curve("entropy", column, 3, trailing=True).of_run(run).tolist() == [1, 1, 2]
    assert Curve("entropy", column, 3).of_run(run).tolist() == [1, 2, 2.5]


def test_noise_is_compared_with_none_in_each_format_and_a_missing_arm_is_named(study: Path) -> None:
    crossed = selected(study, "quant", "aqn.name").with_one_schedule()
    figure = noise_curves(crossed, [REWARD])
    assert [ax.get_title(loc="left").split("\n")[0] for ax in figure.axes[1:]] == ["BF16", "NF4", "NVFP4"]
    assert all(ax.get_title(loc="left").endswith("+0.000\n[+0.000, +0.000]") for ax in figure.axes[1:])
    assert r"AQN exp ($\sigma$ 0.01 to 0.001) minus no noise" in words(figure)
    with pytest.raises(ConfigError, match=r"Missing: quant=nf4 aqn=exp seed=0,1"):
        noise_curves(
            Study(
                [run for run in crossed.runs if run.option("quant.name") != "nf4" or run.option("aqn.name") == "none"]
            ),
            [REWARD],
        )


def test_runs_that_have_not_got_equally_far_have_no_number_above_their_curve(study: Path) -> None:
    runs = [run for run in selected(study, "quant").runs if run.option("quant.name") != "nf4"]
    cut = [
        replace(run, metrics=run.metrics[run.metrics["step"] < 3]) if run.option("quant.name") == "nvfp4" else run
        for run in runs
    ]
    figure = format_curves(Study(cut), [REWARD])
    assert figure.axes[1].get_title(loc="left") == "NVFP4 \N{MINUS SIGN} BF16"
    assert figure.axes[1].get_lines()[1].get_xdata().tolist() == [1, 2]


def test_formats_are_put_together_over_the_settings_that_all_of_them_have(study: Path, tmp_path: Path) -> None:
    """Without nf4, which was run at one rank and rate, there are more settings, but at the same rate."""
    runs = loaded(study)
    found, settings = scores(runs, final_accuracy("sampled"))
    assert list(found) == ["bf16", "nf4", "nvfp4"]
    assert found["bf16"] == pytest.approx(np.array([[0.542, 0.532], [0.552, 0.542]]))
    assert found["nvfp4"] - found["bf16"] == pytest.approx(np.array([[0.02, 0.02], [0.04, 0.04]]))
    assert settings == (
        "2 settings (AQN exp; no noise) at learning rate 0.0003, each of 2 seeds of one base model (tiny) on arithmetic"
    )
    two, _ = scores([run for run in runs if run.option("quant.name") != "nf4"], final_accuracy("sampled"))
    assert two["bf16"].shape == (2, 4)  # noise, two other ranks; not the two other rates
    with pytest.raises(ConfigError, match=r"grid is incomplete.*seed=1"):
        scores(
            [run for run in runs if (run.option("quant.name"), run.option("seed")) != ("nf4", 1)],
            final_accuracy("sampled"),
        )
    with pytest.raises(ConfigError, match="no setting was run with each of the formats bf16, mxfp4, nf4, nvfp4"):
        scores([*runs, make(tmp_path, 0, "mxfp4", rank=5)], final_accuracy("sampled"))
    with pytest.raises(ConfigError, match="are one format in one setting"):
        scores([*runs, make(tmp_path, 0, "nf4", quantizer="awq")], final_accuracy("sampled"))


def test_the_overview_shows_middle_chance_and_profile() -> None:
    """Of eight runs the middle four count; nvfp4 wins against five of the eight runs of its own seed and setting."""
    found = {"bf16": np.arange(8.0).reshape(4, 2) / 10, "nvfp4": np.full((4, 2), 0.45)}
    figure = overview(found, "two settings", "held-out", np.random.default_rng(0))
    middle, better, profile = figure.axes
    assert {name: dot[:2] for name, dot in dots_of(middle).items()} == {
        "_bf16 0": (0, pytest.approx(0.35)), "_nvfp4 1": (1, pytest.approx(0.45)),
    }  # fmt: skip
    assert dots_of(middle)["_nvfp4 1"][2] == pytest.approx(0)
    assert dots_of(better) == {"_nvfp4 1": (1, pytest.approx(5 / 8), pytest.approx(0, abs=0.5))}
    assert probability_of_improvement(np.array([[0.1, -0.1], [0.0, 0.2]])) == 5 / 8
    curves = {str(line.get_label()): line.get_ydata() for line in profile.get_lines()}
    assert list(curves) == ["BF16", "NVFP4"] and set(curves["NVFP4"]) == {0.0, 1.0}
    assert [curves["BF16"][0], curves["BF16"][-1]] == [7 / 8, 0.0]
    assert "Two settings." in words(figure)


# --- scripts ---------------------------------------------------------------------------------------------------------


SCRIPTS = ["reward", "entropy", "aqn", "schedules", "ranks", "learning_rates", "accuracy", "controls", "speed"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_draws_its_part_of_a_study(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    draw_figure([name, str(study), "--out", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.svg"]
    said = capsys.readouterr().err
    assert "of 38 runs, the largest set that differs in" in said and "_target_" not in said


def test_methods_that_differ_in_more_than_the_factor_are_drawn_when_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 1):
        make(tmp_path / "runs", seed, lr=1e-4)
        make(tmp_path / "runs", seed, "nvfp4")
    arguments = [str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match="no two of these 4 runs differ"):
        draw_figure(["accuracy", *arguments])
    draw_figure(["accuracy", *arguments, "--also", "optim.lr"])
    for wrong, says in (
        (["--also", "optim.rl"], "optim.rl: no config key"),
        (["--except", "x*"], r"x\* fits none of the"),
    ):
        with pytest.raises(ConfigError, match=says):
            draw_figure(["accuracy", *arguments, *wrong])
    assert (tmp_path / "out" / "accuracy.svg").is_file() and "compared" not in capsys.readouterr().err


def test_the_overview_is_drawn_of_a_whole_study(study: Path, tmp_path: Path) -> None:
    for out in (tmp_path / "one", tmp_path / "two"):
        draw_figure(["overview", str(study), "--out", str(out)])
    first, second = ((tmp_path / out / "overview.svg").read_bytes() for out in ("one", "two"))
    assert first == second


def test_a_sweep_over_sigma_is_not_mixed_with_other_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        for rank in (8, 32):
            make(tmp_path / "runs", seed, rank=rank)  # sigma 0, at two ranks
        for level in (0.01, 0.02):
            make(tmp_path / "runs", seed, aqn="constant", level=level)
    draw_figure(["sigma", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    rows = (tmp_path / "out" / "sigma.csv").read_text().splitlines()[1:]
    assert len(rows) == 6 and all(row.startswith("BF16,") for row in rows)  # two levels x three measures
    assert "6 of 8 runs" in capsys.readouterr().err


def test_quantizers_are_compared_of_one_run_each(tmp_path: Path) -> None:
    """Answers of two questions, of which the base gets the first right with rtn and both with mse."""
    accuracy = script("studies/quantizers/accuracy.py")
    compare = accuracy.compare
    runs = [make(tmp_path, 0, "nvfp4", quantizer=name) for name in ("rtn", "mse", "mse")]
    for run, second in zip(runs, (False, True, True), strict=True):
        answers = [
            {"mode": mode, "question": question, "step": step, "correct": question == 0 or second or step > 0}
            for mode, question, step in itertools.product(("greedy", "sampled"), (0, 1), (0, 3))
        ]
        pd.DataFrame(answers).to_parquet(run.path / "samples.parquet")
        pd.DataFrame({"relative_error": [0.1], "output_error": [0.2]}).to_parquet(run.path / "layers.parquet")
    table = compare(runs[:2]).set_index("quantizer")
    assert list(table["greedy"]) == [100.0, 50.0] and table.loc["mse", "greedy - rtn"] == 50.0
    shown = accuracy.for_paper(table.assign(**{"output error": math.nan}).reset_index()).shown.set_index("quantizer")
    assert shown.loc["rtn", "greedy - rtn"] == "-" and shown.loc["mse", "greedy - rtn"].startswith("+50.0 [")
    assert {*shown["output error"]} == {"-"} and {*shown["weight error"]} == {"0.100"}
    with pytest.raises(ConfigError, match="both quant=nvfp4 quantizer=mse: leave one out"):
        compare(runs)
    (runs[1].path / "layers.parquet").unlink()
    with pytest.raises(ConfigError, match=r"layers\.parquet is missing"):
        compare(runs[:2])


def test_a_run_without_a_final_evaluation_is_named(tmp_path: Path) -> None:
    run = make(tmp_path, 0)
    kept = [line for line in (run.path / "metrics.jsonl").read_text().splitlines() if '"step": 3, "eval' not in line]
    (run.path / "metrics.jsonl").write_text("\n".join(kept))
    with pytest.raises(ConfigError, match="was not evaluated after training"):
        final_accuracy("sampled")(load_run(run.path))
    assert math.isclose(final_accuracy("greedy")(make(tmp_path, 1)), 0.9)
    (setting,) = Study([run]).settings
    assert (setting["aqn.sigma_start"], setting.runs) == (None, (run,))


def test_ranks_of_two_quantizers_each_have_their_own_control_and_alpha_is_said(tmp_path: Path) -> None:
    cells = itertools.product(("rtn", "awq"), (8, 32))
    runs = [make(tmp_path, 0, "nvfp4", rank=rank, quantizer=quantizer) for quantizer, rank in cells]
    table = label_settings(Study(runs).settings, axis="lora.rank")
    controls = against.controls_of(table, "lora.rank", 32, "label")
    pairs = {(one.label, control.label) for one, control in controls.items()}
    assert pairs == {("NVFP4, rtn", "NVFP4, rtn"), ("NVFP4, awq", "NVFP4, awq")}
    assert "LoRA alpha differs with the rank" in words(named.ranks(Study(runs)))
