"""What the figures hold, read back from their axes: never pixels."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.lines import Line2D

from qerl_core.checks import ConfigError
from qerl_core.process.arguments import whole
from qerl_studies.commands.figure import main as draw_figure
from qerl_studies.figures import run as figures
from qerl_studies.figures import style
from qerl_studies.figures.named import FIGURES
from qerl_studies.runs.find import find_runs
from qerl_studies.runs.load import load_run
from qerl_studies.runs.settings import Study
from tests import run_folders
from tests.run_folders import DONE, SHORT

REPOSITORY = Path(__file__).parents[2]
FORMATS = ("bf16", "nf4", "mxfp4", "nvfp4", "fp8", "mxfp8", "int8", "int4")


def write_run(
    folder: Path,
    train: Mapping[str, Sequence[float | None]],
    *,
    quant: str = "nvfp4",
    aqn: str = "exp",
    seed: int = 0,
    rank: int = 32,
    evals: Sequence[int] = (),
    **changes: Any,
) -> Path:
    """A run whose metric m at step i is train[m][i - 1], evaluated at the steps `evals`."""
    named: dict[str, Any] = {"quant": {"name": quant}, "aqn": {"name": aqn}, "lora": {"name": "default", "rank": rank}}
    config = SHORT | named | {"seed": seed, "optim": {"lr": 0.001}} | changes
    lines: list[dict[str, Any]] = [
        {"kind": "train", "step": step, **dict(zip(train, values, strict=True))}
        for step, values in enumerate(zip(*train.values(), strict=True), start=1)
    ]
    for step in evals:
        held_out = {"greedy": 0.5 + step / 100, "sampled": 0.4 + step / 100}
        found = {f"eval/accuracy_{decoding}": value for decoding, value in held_out.items()}
        lines.append({"kind": "eval", "step": step, **found, **{f"{name}_stderr": 0.02 for name in found}})
    return run_folders.write_run(folder, config, lines, DONE)


def study_of(*folders: Path) -> Study:
    return Study([load_run(folder) for folder in folders])


def curve(folders: Sequence[Path], metric: str, smooth: int = 1) -> tuple[Axes, list[Line2D]]:
    """The panel of a comparison of one metric, and its lines."""
    ax = figures.comparison(study_of(*folders), [metric], smooth).axes[0]
    return ax, [line for line in ax.get_lines() if isinstance(line, Line2D)]


def points(line: Any) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in line.get_xydata()]


def labelled(ax: Axes) -> dict[str, Any]:
    return {str(line.get_label()): line for line in ax.get_lines() if not str(line.get_label()).startswith("_")}


def reward_run(folder: Path, steps: int = 40, **options: Any) -> Path:
    rewards = [step / steps for step in range(steps)]
    train = {"reward/mean": rewards, "accuracy": [reward / 2 for reward in rewards], "entropy": [1.0] * steps}
    return write_run(folder, train, **options)


# --- marks -----------------------------------------------------------------------------------------------------------


def test_each_format_has_a_color_of_its_own_and_an_unknown_one_keeps_to_other_colors() -> None:
    assert tuple(style.FORMAT_COLORS) == FORMATS
    assert len({style.color(name) for name in FORMATS}) == len(FORMATS)
    assert not set(style.OTHER_COLORS) & set(style.FORMAT_COLORS.values())
    for name in ("hif4", "awq", "q4_k_m"):
        assert style.color(name) == style.color(name)
    # The same in every process: text hashes differ between processes, this number does not.
    assert style.color("hif4") == style.OTHER_COLORS[zlib.crc32(b"hif4") % len(style.OTHER_COLORS)]


def test_only_runs_without_noise_are_dashed() -> None:
    assert [style.line_style(aqn) for aqn in ("none", "exp", "linear")] == ["dashed", "solid", "solid"]


def test_a_caption_is_wrapped_at_the_width_of_its_figure_and_makes_it_taller() -> None:
    with style.paper_style():
        figure, _ = style.panels(1, 1, 1.0)
        words = [f"word{number}" for number in range(60)]
        style.caption(figure, " ".join(words[:30]), "", " ".join(words[30:]))
    text = figure.get_supxlabel()
    assert text.split() == words and text.count("\n") >= 3
    assert figure.get_figheight() == pytest.approx(1.0 + (1.3 * 7 * (text.count("\n") + 1) + 4) / 72)
    figure.draw_without_rendering()
    (drawn,) = [artist for artist in figure.texts if artist.get_text() == text]
    box = drawn.get_window_extent()
    assert box.x0 > 0 and box.x1 < figure.bbox.width and box.y0 >= 0
    assert box.y1 < figure.axes[0].get_window_extent().y0


def test_labels_at_the_ends_of_lines_keep_their_order_and_their_distance() -> None:
    with style.paper_style():
        figure, axes = style.panels(1, 1, 2.0)
        ax = axes[0, 0]
        ax.set_ylim(0, 1)
        style.label_ends(ax, [(0.5, "b", "red"), (0.49, "a", "blue"), (0.9, "far", "black")])
        figure.draw_without_rendering()
    boxes = {text.get_text(): text.get_window_extent() for text in ax.texts}
    assert boxes["a"].y1 <= boxes["b"].y0 + 1 and boxes["b"].y1 < boxes["far"].y0
    middle = (boxes["a"].y0 + boxes["b"].y1) / 2
    assert ax.transData.inverted().transform((0, middle))[1] == pytest.approx(0.495, abs=0.02)
    assert ax.transData.inverted().transform((0, (boxes["far"].y0 + boxes["far"].y1) / 2))[1] == pytest.approx(
        0.9, abs=0.02
    )


# --- several runs ----------------------------------------------------------------------------------------------------


def test_one_seed_is_a_line_through_its_numbers_without_a_band(tmp_path: Path) -> None:
    ax, (line,) = curve([write_run(tmp_path / "a", {"accuracy": [0.1, 0.4, 0.2]})], "accuracy")
    assert points(line) == [(1, 0.1), (2, 0.4), (3, 0.2)]
    assert line.get_color() == "#D55E00" and line.get_linestyle() == "-" and not ax.collections
    assert line.get_label() == "NVFP4, AQN exp"


def test_seeds_are_averaged_and_banded_over_the_steps_that_all_have(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", {"accuracy": [0.1, 0.4, 0.2]}, seed=0),
        write_run(tmp_path / "b", {"accuracy": [0.3, 0.2]}, seed=1),
        write_run(tmp_path / "c", {"accuracy": [0.2, 0.6, 0.1]}, seed=2),
    ]
    ax, (line,) = curve(runs, "accuracy")
    np.testing.assert_allclose(line.get_xydata(), [(1, 0.2), (2, 0.4)])
    (band,) = ax.collections
    corners = {(round(float(x), 9), round(float(y), 9)) for x, y in band.get_paths()[0].vertices}
    # Student's t with two degrees of freedom, 4.302653: half = t s / sqrt(3), s = 0.1 and 0.2.
    halves = 4.302653 * 0.1 / math.sqrt(3), 4.302653 * 0.2 / math.sqrt(3)
    expected = [(1, 0), (1, 0.2 + halves[0]), (2, 0), (2, 0.4 + halves[1])]  # no share is below 0
    np.testing.assert_allclose(sorted(corners), expected, atol=1e-6)
    assert band.get_label() == "_95% interval of 3 seeds"
    assert ax.get_ylim() == pytest.approx((0.1 - 0.025, 0.6 + 0.025))  # of the seeds, not of the band


def test_two_seeds_are_drawn_beside_their_mean_because_their_interval_says_nothing(tmp_path: Path) -> None:
    values = {0: [0.1, 0.4], 1: [0.3, 0.2]}
    runs = [write_run(tmp_path / str(seed), {"accuracy": one}, seed=seed) for seed, one in values.items()]
    ax, lines = curve(runs, "accuracy")
    assert not ax.collections
    np.testing.assert_allclose([line.get_ydata() for line in lines], [[0.2, 0.3], *values.values()])
    assert [str(line.get_label())[0] for line in lines[1:]] == ["_", "_"]


def test_smoothing_is_a_centred_mean_that_shortens_at_the_ends(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", {"accuracy": [0.0, 0.3, 0.9] * 5})
    _, (line,) = curve([run], "accuracy", smooth=3)
    np.testing.assert_allclose(line.get_ydata(), [0.15, *[0.4] * 13, 0.6])
    short = write_run(tmp_path / "b", {"accuracy": ([0.0, 0.3, 0.9] * 5)[:14]})
    _, (line,) = curve([short], "accuracy", smooth=3)  # more than a fifth of it
    np.testing.assert_allclose(line.get_ydata(), ([0.0, 0.3, 0.9] * 5)[:14])
    for smooth in (0, 4):
        with pytest.raises(ConfigError, match="odd"):
            curve([run], "accuracy", smooth=smooth)


@pytest.mark.parametrize("smooth", [1, 3])
def test_a_number_that_was_not_finite_leaves_a_gap_in_the_mean(tmp_path: Path, smooth: int) -> None:
    runs = [
        write_run(tmp_path / "a", {"loss": [1.0, None, *[1.0] * 13]}, seed=0),
        write_run(tmp_path / "b", {"loss": [3.0] * 15}, seed=1),
    ]
    _, (line, *_) = curve(runs, "loss", smooth)
    assert [math.isnan(y) for _, y in points(line)] == [False, True, *[False] * 13]
    assert np.nanmax(np.asarray(line.get_ydata())) == 2.0


def test_settings_come_in_one_order_with_their_own_marks(tmp_path: Path) -> None:
    runs = [
        reward_run(tmp_path / f"{quant}-{aqn}", quant=quant, aqn=aqn)
        for quant, aqn in product(("hif4", *reversed(FORMATS)), ("exp", "none"))
    ]
    _, lines = curve(runs, "accuracy")
    assert [line.get_label() for line in lines] == [
        f"{quant.upper()}{noise}" for quant in (*FORMATS, "hif4") for noise in ("", ", AQN exp")
    ]
    marks = {(line.get_color(), line.get_linestyle()) for line in lines}
    assert len(marks) == 2 * (len(FORMATS) + 1) and {line.get_marker() for line in lines} == {"None"}


def test_where_no_arm_has_noise_lines_are_solid(tmp_path: Path) -> None:
    _, lines = curve([reward_run(tmp_path / quant, quant=quant, aqn="none") for quant in FORMATS], "accuracy")
    assert {line.get_linestyle() for line in lines} == {"-"}


def test_what_color_and_dashes_do_not_show_gets_a_marker_and_a_word(tmp_path: Path) -> None:
    _, lines = curve([reward_run(tmp_path / f"r{rank}", rank=rank) for rank in (64, 16)], "accuracy")
    assert {line.get_label() for line in lines} == {"NVFP4, rank 16, AQN exp", "NVFP4, rank 64, AQN exp"}
    assert len({line.get_marker() for line in lines}) == 2


def test_runs_that_differ_in_an_option_that_labels_do_not_know_are_never_averaged(tmp_path: Path) -> None:
    runs = [
        reward_run(tmp_path / name, seed=seed, aqn="exp", rollout={"top_p": top_p})
        for seed, (name, top_p) in enumerate([("a", 1.0), ("b", 0.6), ("c", 1.0)])
    ]
    ax, _ = curve(runs, "accuracy")
    lines = labelled(ax).values()
    fingerprints = [load_run(run).identity()["fingerprint"] for run in runs]
    assert {line.get_label() for line in lines} == {f"NVFP4, AQN exp, {name}" for name in fingerprints}
    assert len(lines) == 2 and len({line.get_marker() for line in lines}) == 2


def test_seeds_of_a_base_are_averaged_before_bases_are(tmp_path: Path) -> None:
    """Three bases with two seeds each: means 0.2, 0.6 and 1.0, so that the mean is 0.6 and s = 0.4."""
    runs = [
        write_run(tmp_path / f"{base}-{seed}", {"loss": [value]}, seed=seed, model={"name": "tiny", "seed": base})
        for base, seed, value in ((0, 0, 0.1), (0, 1, 0.3), (1, 0, 0.5), (1, 1, 0.7), (2, 0, 0.9), (2, 1, 1.1))
    ]
    ax, (line,) = curve(runs, "loss")
    assert points(line) == [(1, pytest.approx(0.6))]
    ends = {float(y) for _, y in ax.collections[0].get_paths()[0].vertices}
    half = 4.302653 * 0.4 / math.sqrt(3)  # Student's t, two degrees of freedom
    assert (min(ends), max(ends)) == pytest.approx((0.6 - half, 0.6 + half))


def test_a_repeated_seed_and_a_metric_that_nobody_wrote_are_refused(tmp_path: Path) -> None:
    runs = [reward_run(tmp_path / "a"), reward_run(tmp_path / "b")]
    with pytest.raises(ConfigError, match="two runs of one setting"):
        curve(runs, "accuracy")
    with pytest.raises(ConfigError, match="none of these runs has the metric kl"):
        curve(runs[:1], "kl")


def test_the_comparison_says_what_its_bands_and_lines_are(tmp_path: Path) -> None:
    folders = [reward_run(tmp_path / f"{quant}-{seed}", quant=quant, seed=seed) for quant in FORMATS for seed in (0, 1)]
    runs = study_of(*folders)
    figure = figures.comparison(runs, ["reward/mean", "accuracy"], smooth=3)
    left, right = figure.axes
    assert (left.get_ylabel(), right.get_ylabel()) == ("reward per completion", "accuracy of rollouts")
    np.testing.assert_allclose(
        np.asarray(left.get_lines()[0].get_ydata()), 2 * np.asarray(right.get_lines()[0].get_ydata())
    )
    (legend,) = figure.legends
    assert (
        legend.get_title().get_text()
        == "mean and each of 2 seeds of one base model (tiny) on arithmetic, smoothed over 3 steps"
    )
    assert len(legend.get_texts()) == len(FORMATS)
    single = figures.comparison(Study(runs.runs[:1]), ["accuracy"])
    assert single.legends[0].get_title().get_text() == "a seed of tiny on arithmetic"


def test_a_long_legend_stays_inside_the_figure_and_above_the_panels(tmp_path: Path) -> None:
    runs = [
        load_run(reward_run(tmp_path / f"{quant}-{aqn}-{rank}", quant=quant, aqn=aqn, rank=rank))
        for quant, aqn, rank in product(FORMATS, ("none", "exp"), (16, 64))
    ]
    figure = figures.comparison(Study(runs), ["reward/mean", "accuracy"])
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width
    assert all(ax.get_window_extent().y1 < box.y0 for ax in figure.axes)
    single = figures.comparison(Study(runs[:1]), ["reward/mean", "accuracy"])
    single.canvas.draw()
    heights = [shown.axes[0].get_window_extent().height for shown in (figure, single)]
    assert heights[0] == pytest.approx(heights[1], rel=0.1)  # more lines make the figure taller, not its panels flatter


# --- one run ---------------------------------------------------------------------------------------------------------


def test_the_curve_of_a_few_held_out_questions_is_apart_from_the_whole_evaluations(tmp_path: Path) -> None:
    """Three points make a curve; the two at the ends alone do not."""
    for name, steps, curves in (("ends", (0, 40), 0), ("curve", (0, 20, 40), 1)):
        folder = reward_run(tmp_path / name, evals=(0, 40))
        with open(folder / "metrics.jsonl", "a") as file:
            for step in steps:
                values = {"accuracy_greedy": step / 100, "accuracy_greedy_stderr": 0.1, "questions": 32}
                line = {"kind": "validation", "step": step} | {f"validation/{key}": one for key, one in values.items()}
                file.write(json.dumps(line) + "\n")
        right = figures.reward_figure(load_run(folder)).axes[1]
        bars = {str(one.get_label()): one for one in right.containers if isinstance(one, ErrorbarContainer)}
        assert [points(bars[label].lines[0]) for label in bars if label.startswith("first 32 held-out, greedy")] == [
            [(0, 0), (20, 0.2), (40, 0.4)]
        ] * curves
        assert len(points(bars["held-out, greedy (±1 s.e.)"].lines[0])) == 2


def test_accuracy_by_the_last_number_is_drawn_where_it_was_measured(tmp_path: Path) -> None:
    folder = reward_run(tmp_path / "a", evals=(0, 40))
    plain = [*labelled(figures.reward_figure(load_run(folder)).axes[1])]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "eval":
            line |= {"eval/lenient_greedy": 0.7 + line["step"] / 400}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = labelled(figures.reward_figure(load_run(folder)).axes[1])
    (new,) = drawn.keys() - {*plain}
    assert "greedy" in new and [y for _, y in points(drawn[new])] == pytest.approx([0.7, 0.8])


def test_the_reward_figure_holds_each_step_its_mean_and_the_held_out_points(tmp_path: Path) -> None:
    figure = figures.reward_figure(load_run(reward_run(tmp_path / "a", evals=(0, 40))))
    left, right = figure.axes
    thin, mean = left.get_lines()
    assert points(thin) == [(step + 1, step / 40) for step in range(40)]
    assert points(mean)[20] == pytest.approx((21, 20 / 40)) and mean.get_linewidth() > thin.get_linewidth()
    assert points(mean)[0] == pytest.approx((1, np.mean([0, 1, 2]) / 40))  # 5 steps around each, 3 of them at the end
    assert points(labelled(right)["rollouts"])[20] == pytest.approx((21, 20 / 80))
    held_out = {bars.get_label(): bars for bars in right.containers if isinstance(bars, ErrorbarContainer)}
    assert set(held_out) == {"held-out, greedy (±1 s.e.)", "held-out, sampled (±1 s.e.)"}
    for label, first in (("held-out, greedy (±1 s.e.)", 0.5), ("held-out, sampled (±1 s.e.)", 0.4)):
        data, _, (bars,) = held_out[label].lines
        expected = np.array([first, first + 0.4])  # at steps 0 and 40
        assert data is not None
        np.testing.assert_allclose(np.asarray(data.get_ydata(), dtype=float), expected)
        np.testing.assert_allclose(np.asarray(data.get_xdata(), dtype=float), [0, 40], atol=0.5)
        ends = np.array([segment[:, 1] for segment in bars.get_segments()], dtype=float)
        np.testing.assert_allclose(ends, np.stack([expected - 0.02, expected + 0.02], axis=1))
    assert figure.legends[0].get_title().get_text() == "a on arithmetic, smoothed over 5 steps (thin: each step)"


def test_the_entropy_figure_shows_each_step_and_the_stages_below(tmp_path: Path) -> None:
    train = {
        "reward/mean": [0.5] * 4,
        "entropy": [0.9, 1.2, 1.1, 0.8],
        "entropy_clean": [0.9, 0.8, 0.7, 0.6],
        "aqn/sigma": [0.0, 0.01, 0.01, 0.0005],
    }
    top, bottom = figures.entropy_figure(load_run(write_run(tmp_path / "a", train))).axes
    sampled, clean = labelled(top).values()
    assert points(sampled) == list(enumerate(train["entropy"], start=1)) and sampled.get_linestyle() == "-"
    assert points(clean) == list(enumerate(train["entropy_clean"], start=1)) and clean.get_linestyle() == "--"
    noise, *starts = bottom.get_lines()
    assert points(noise) == list(enumerate(train["aqn/sigma"], start=1))
    assert [start.get_xdata()[0] for start in starts] == [1.5, 3.5]
    assert [line.get_xdata()[0] for line in top.get_lines() if line.get_label() == "_stage"] == [1.5, 3.5]
    assert bottom.get_yscale() == "symlog" and bottom.get_xlim() == top.get_xlim()
    assert [tick for tick in bottom.get_yticks() if tick <= bottom.get_ylim()[1]] == pytest.approx([0, 0.001, 0.01])


def test_a_narrow_range_of_noise_is_drawn_on_a_linear_scale(tmp_path: Path) -> None:
    train = {"entropy": [1.0] * 3, "aqn/sigma": [0.0, 0.02, 0.01]}
    _, bottom = figures.entropy_figure(load_run(write_run(tmp_path / "a", train))).axes
    assert bottom.get_yscale() == "linear" and bottom.get_ylim()[0] == 0 and bottom.get_ylim()[1] > 0.02


def test_a_schedule_that_changes_each_step_gets_no_stage_lines(tmp_path: Path) -> None:
    train = {"entropy": [1.0] * 50, "aqn/sigma": [0.01 + step / 1000 for step in range(50)]}
    _, bottom = figures.entropy_figure(load_run(write_run(tmp_path / "a", train))).axes
    assert len(bottom.get_lines()) == 1


def test_a_run_without_noise_has_no_noise_panel(tmp_path: Path) -> None:
    train = {"entropy": [1.0, 0.9], "entropy_clean": [1.0, 0.9], "aqn/sigma": [0.0, 0.0]}
    figure = figures.entropy_figure(load_run(write_run(tmp_path / "a", train, aqn="none")))
    (only,) = figure.axes
    assert list(labelled(only)) == ["as sampled"] and only.get_xlabel() == "step"


def test_run_figures_of_a_run_with_rollouts(tmp_path: Path) -> None:
    folder = reward_run(tmp_path / "a", evals=(0, 40))
    assert figures.run_figures(folder) == [
        folder / "figures" / name for name in ("reward.svg", "reward.png", "entropy.svg", "entropy.png")
    ]
    assert b"<svg" in (folder / "figures" / "reward.svg").read_bytes()[:1000]
    assert (folder / "figures" / "entropy.png").read_bytes().startswith(b"\x89PNG")
    assert find_runs(tmp_path) == [folder]


@pytest.mark.parametrize("evals", [(), (0, 2)])
def test_run_figures_of_a_run_without_rollouts_shows_its_loss(tmp_path: Path, evals: tuple[int, ...]) -> None:
    folder = write_run(tmp_path / "sft", {"loss": [2.0, 1.0], "entropy_clean": [1.0, 1.0]}, evals=evals)
    assert figures.run_figures(folder) == [folder / "figures" / name for name in ("loss.svg", "loss.png")]
    figure = figures.loss_figure(load_run(folder))
    assert len(figure.axes) == (2 if evals else 1)
    assert points(labelled(figure.axes[0])["training"]) == [(1, 2.0), (2, 1.0)]


def test_a_run_of_one_step_shows_its_points(tmp_path: Path) -> None:
    train = {"reward/mean": [0.5], "accuracy": [0.25], "entropy": [1.0], "entropy_clean": [1.0], "aqn/sigma": [0.01]}
    folder = write_run(tmp_path / "a", train, evals=(0, 1))
    assert len(figures.run_figures(folder)) == 4
    (line,) = figures.reward_figure(load_run(folder)).axes[0].get_lines()
    assert points(line) == [(1, 0.5)] and line.get_marker() == "o"


def test_a_run_without_a_training_step_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", {}, evals=(0,))
    with pytest.raises(ConfigError, match="no training step"):
        figures.run_figures(folder)


# --- files -----------------------------------------------------------------------------------------------------------


def test_files_are_the_same_on_any_day_with_real_fonts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, kinds = load_run(reward_run(tmp_path / "a", evals=(0, 40))), ("svg", "pdf", "png")
    figure = figures.reward_figure(run)
    first = [path.read_bytes() for path in style.save(figure, tmp_path / "one.v1", kinds)]
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    again = [path.read_bytes() for path in style.save(figure, tmp_path / "two.v1", kinds)]
    redrawn = [path.read_bytes() for path in style.save(figures.reward_figure(run), tmp_path / "three", kinds)]
    assert first == again == redrawn
    assert all((tmp_path / f"one.v1.{kind}").exists() for kind in kinds)
    svg, pdf, _ = first
    assert b"<dc:date>" not in svg and b"CreationDate" not in pdf
    assert b"<text" not in svg and b"<use" in svg and b"<!-- " in svg  # text as outlines: no page has the same fonts
    assert b"/FontType 42" in pdf or b"/CIDFontType2" in pdf  # TrueType outlines, not Type 3 drawings
    assert b"/Type3" not in pdf


def test_a_vector_file_is_what_is_written_unless_asked_otherwise(tmp_path: Path) -> None:
    assert style.save(figures.reward_figure(load_run(reward_run(tmp_path / "a"))), tmp_path / "b") == [
        tmp_path / "b.svg"
    ]


def test_drawing_leaves_no_global_state(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    figures.run_figures(reward_run(tmp_path / "a"))
    assert dict(matplotlib.rcParams) == before
    code = "import sys, qerl_studies.figures.run; print('matplotlib.pyplot' in sys.modules, 'torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "False"]


def test_a_notebook_can_show_a_figure_at_its_size(tmp_path: Path) -> None:
    figure = figures.comparison(study_of(reward_run(tmp_path / "a")), ["accuracy"])
    assert isinstance(figure, style.PaperFigure)
    png = figure._repr_png_()
    assert int.from_bytes(png[16:20], "big") == round(style.TEXT_WIDTH * 144)


# --- qerl-bench figure ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reward", "entropy"])
def test_figures_draw_what_they_find(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    steps = {"entropy": [1.0, 0.9], "entropy_clean": [1.0, 0.8], "reward/mean": [0.1, 0.2], "accuracy": [0.1, 0.2]}
    write_run(tmp_path / "runs" / "whole", steps)
    (write_run(tmp_path / "runs" / "cut", steps, quant="bf16") / "done.json").unlink()
    draw_figure([name, str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--formats", "svg", "pdf"])
    said = capsys.readouterr()
    assert said.out.split() == [str(tmp_path / "out" / f"{name}.svg"), str(tmp_path / "out" / f"{name}.pdf")]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"{name}.pdf", f"{name}.svg"]
    assert "cut is not finished" in said.err and "whole" not in said.err


def test_a_figure_that_finds_no_run_says_so_once_and_exits_with_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "qerl_bench", "figure", "reward", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert whole(done.stderr).count("\n") == 1 and f"no run in {tmp_path}" in done.stderr


def test_a_name_that_no_figure_has_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"no figure rewards\. Did you mean reward\?"):
        draw_figure(["rewards", "runs"])
    with pytest.raises(SystemExit):
        draw_figure(["--help"])
    lines = capsys.readouterr().out.splitlines()
    listed = {words[0]: set(words[1:]) for line in lines if line.startswith("    ") and (words := line.split())}
    assert {*FIGURES} <= {*listed} and all({*named.shows.split()} <= listed[name] for name, named in FIGURES.items())


def test_scripts_are_short() -> None:
    for script in (REPOSITORY / "analysis").glob("*.py"):
        assert len(script.read_text().splitlines()) <= 60, script
