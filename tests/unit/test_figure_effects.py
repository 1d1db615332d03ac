"""Which runs a figure of a whole study shows, and the numbers in its axes; a study is made up of three-step runs."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from qerl_bench.errors import BadInput
from qerl_bench.results import effects
from qerl_bench.results.aggregate import overview, scores
from qerl_bench.results.effects import Column, final
from qerl_bench.results.figures import by_format
from qerl_bench.results.load import Run, load_run, load_runs, tidy
from qerl_bench.results.measure import area
from qerl_bench.results.select import arms, by_setting, varying, with_one_noise

REPOSITORY = Path(__file__).parents[2]
T = 12.706205  # Student's t, 97.5 %, one degree of freedom: two seeds a, b have half = T |a - b| / 2
SIGMAS = {"exp": (0, 0.01, 0.001), "linear": (0, 0.01, 0.005), "none": (0, 0, 0), "format_error": (0.1, 0.1, 0.1)}
SIGMAS["constant"] = (0.01, 0.01, 0.01)


def make(
    root: Path, seed: int, quant: str = "bf16", aqn: str = "none", rank: int = 32, lr: float = 3e-4, **changes: Any
) -> Run:
    """A run whose held-out accuracy is 0.5 + rank / 1000 + seed / 100, and whose mean reward is 0.4 + seed / 10."""
    noise: dict[str, Any] = {"name": aqn, "_target_": f"schedule.{aqn}"}
    if aqn in ("exp", "linear"):
        noise |= {"sigma_start": changes.pop("sigma", 0.01)}
    if aqn == "constant":
        noise |= {"level": changes["level"]}
    config = {
        "name": f"{quant}-{aqn}-{rank}-{lr}-{'-'.join(map(str, changes.values()))}-s{seed}-x",
        "steps": 3,
        "seed": seed,
        "quant": {"name": quant},
        "quantizer": {"name": changes.get("quantizer", "rtn")},
        "aqn": noise,
        "algo": {"name": "grpo"},
        "eval": {"name": "task"},
        "lora": {"name": "default", "rank": rank, "alpha": rank},
        "model": {"name": "tiny", "lr": 3e-4},
        "task": {"name": "arithmetic"},
        "rollout": {"temperature": changes.get("temperature", 1.0)},
        "inject": {"cadence": changes.get("cadence", "step")},
        "optim": {"lr": lr, "entropy_coef": changes.get("entropy_coef", 0.0)},
    }
    config["name"] += f"{len(list(root.glob('*')))}"
    folder = root / config["name"]
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    for step, sigma in zip((1, 2, 3), SIGMAS[aqn], strict=True):
        line = {"kind": "train", "step": step, "reward/mean": 0.4 + seed / 10, "accuracy": 0.5, "entropy": 0.1 * step}
        line |= {"mismatch/kl": 1e-3, "mismatch/ess": 0.99}
        line |= {"entropy_clean": 0.1, "aqn/sigma": sigma, "speed/rollout_tok_s": 1000.0, "time/step_s": 1.0}
        lines.append(line | {"memory/peak_gib": 0.5})
    for step, accuracy in ((0, 0.3), (3, 0.5 + rank / 1000 + seed / 100)):
        lines.append({"kind": "eval", "step": step, "eval/accuracy_sampled": accuracy, "eval/accuracy_greedy": 0.9})
    (folder / "config.yaml").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "done.json").write_text(json.dumps({"wall_s": 1.0, "final": {}, "peak_memory_gib": 0.5}))
    return load_run(folder)


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
        make(root, seed, "nvfp4", "linear")
        make(root, seed, "nvfp4", "exp", sigma=0.05)
        make(root, seed, temperature=1.5)
        make(root, seed, entropy_coef=0.01)
        make(root, seed, aqn="format_error", cadence="run")
    return root


def described(runs: list[Run]) -> set[tuple[Any, ...]]:
    keys = ("quant.name", "aqn.name", "lora.rank", "optim.lr", "rollout.temperature")
    return {tuple(run.option(key) for key in keys) for run in runs}


def dots_of(ax: Any) -> dict[str, tuple[float, float, float]]:
    """Position, value and half of its interval of each labelled dot."""
    found = {}
    for container in ax.containers:
        assert isinstance(container, ErrorbarContainer)
        ((x, y),) = container.lines[0].get_xydata()
        ((low, _), (high, _)) = container.lines[2][0].get_segments()[0]
        found[str(container.get_label())] = float(y), float(x), float(high - low) / 2
    return found


# --- which runs ------------------------------------------------------------------------------------------------------


def test_formats_are_compared_without_noise_at_the_models_own_rate(study: Path) -> None:
    chosen = described(varying(load_runs([study]), "quant"))
    assert chosen == {(quant, "none", 32, 3e-4, 1.0) for quant in ("bf16", "nvfp4", "nf4")}


def test_what_a_setting_does_not_have_does_not_set_it_apart(study: Path) -> None:
    chosen = varying(load_runs([study]), "quant", "aqn.name")
    expected = {
        ("bf16", "none"),
        ("bf16", "exp"),
        ("nvfp4", "none"),
        ("nvfp4", "exp"),
        ("nvfp4", "linear"),
        ("nf4", "none"),
    }
    assert {setting[:2] for setting in described(chosen)} == expected
    assert all(run.option("aqn.sigma_start") == 0.01 for run in chosen if run.option("aqn.name") != "none")
    assert {setting[:2] for setting in described(with_one_noise(chosen))} == expected - {("nvfp4", "linear")}


@pytest.mark.parametrize(
    ("factors", "key", "values"),
    [
        (("quant", "lora.rank", "lora.alpha"), "lora.rank", {8, 32, 128}),
        (("optim.lr",), "optim.lr", {1e-4, 3e-4, 1e-3}),
    ],
)
def test_a_numeric_factor(study: Path, factors: tuple[str, ...], key: str, values: set[float]) -> None:
    assert {run.option(key) for run in varying(load_runs([study]), *factors)} == values


def test_what_noise_does_not_use_without_noise_does_not_set_runs_apart(tmp_path: Path) -> None:
    runs = [make(tmp_path, 0, "nvfp4"), make(tmp_path, 0, "nvfp4", "exp", cadence="group")]
    assert varying(runs, "quant.", "aqn.") == runs
    apart = make(tmp_path, 0, "nvfp4", "linear", cadence="batch")
    assert varying([*runs, apart], "quant.", "aqn.") in (runs, [runs[0], apart])


def test_nothing_to_compare_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no finished run"):
        varying([], "quant")
    runs = [make(tmp_path, 0), make(tmp_path, 1), make(tmp_path, 0, "nvfp4", lr=1e-3)]
    with pytest.raises(BadInput, match="no two of these 3 runs differ in quant"):
        varying(runs, "quant")
    with pytest.raises(BadInput, match=r"is one run, and no two differ in aqn\.name \(and the seed\) alone"):
        varying(runs[:1], "aqn.name")


def test_seeds_of_a_setting_stand_together_and_a_gap_in_the_grid_is_named(tmp_path: Path) -> None:
    runs = [make(tmp_path, 1), make(tmp_path, 0), make(tmp_path, 0, "nvfp4")]
    assert [[run.option("seed") for run in group] for group in by_setting(runs).values()] == [[0, 1], [0]]
    with pytest.raises(BadInput, match=r"Missing: nvfp4-none.* seed=1"):
        arms(runs, [])
    with pytest.raises(BadInput, match="several runs of one seed"):
        arms([*runs, make(tmp_path, 0)], [])


# --- what is drawn ---------------------------------------------------------------------------------------------------


def test_a_row_of_dots_is_a_mean_and_an_interval(study: Path) -> None:
    runs = with_one_noise(varying(load_runs([study]), "quant", "aqn.name"))
    table = effects.format_rows(arms(runs, ["quant.name", "aqn.name"]))
    figure = effects.dots(table, [Column("held-out", final("sampled"), True), Column("reward", area("reward/mean"))])
    names = ["BF16, no noise", "BF16, AQN exp", "NF4, no noise", "NVFP4, no noise", "NVFP4, AQN exp"]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == names
    for ax, mean, half in zip(figure.axes, (0.537, 0.45), (T * 0.005, T * 0.05), strict=True):
        found = dots_of(ax)
        assert list(found) == [f"_{name}" for name in names]
        for place, name in enumerate(names):
            assert found[f"_{name}"] == pytest.approx((place, mean, half), abs=1e-6)
        filled = [container.lines[0].get_markerfacecolor() != "white" for container in ax.containers]
        assert filled == ["AQN" in name for name in names]
        assert [container.lines[0].get_color() for container in ax.containers][::2] == ["#000000", "#0072B2", "#D55E00"]


def test_a_single_seed_has_no_interval_and_is_called_that(tmp_path: Path) -> None:
    runs = [make(tmp_path, 0), make(tmp_path, 0, "nvfp4")]
    table = effects.format_rows(arms(runs, ["quant.name", "aqn.name"]))
    figure = effects.dots(table, [Column("held-out", final("sampled"))])
    assert dots_of(figure.axes[0])["_BF16, no noise"] == pytest.approx((0, 0.532, 0))
    assert figure.get_suptitle() == "a single seed"


def test_rows_that_format_and_noise_do_not_tell_apart_name_what_does(tmp_path: Path) -> None:
    """Quantizers of 4-bit weights and learning rates; an axis is not named, nor a quantizer of 16-bit weights."""
    runs = [make(tmp_path, 0, lr=1e-3), make(tmp_path, 0, "nvfp4"), make(tmp_path, 0, "nvfp4", quantizer="awq")]
    table = arms(runs, ["quant.name", "aqn.name", "optim.lr"])
    assert [row["label"] for row in effects.format_rows(table)] == [
        "BF16, no noise, lr 0.001", "NVFP4, no noise, awq, lr 0.0003", "NVFP4, no noise, rtn, lr 0.0003",
    ]  # fmt: skip
    labels = [row["label"] for row in effects.format_rows(table[:2], axis="optim.lr")]
    assert labels == ["BF16, no noise", "NVFP4, no noise"]


def test_a_number_against_rank_has_a_line_for_each_format(study: Path) -> None:
    runs = varying(load_runs([study]), "quant", "lora.rank", "lora.alpha")
    table = arms(runs, ["quant.name", "aqn.name", "lora.rank"])
    ax = effects.against(table, "lora.rank", [Column("held-out", final("sampled"), True)], "LoRA rank").axes[0]
    drawn = {str(container.get_label()): container for container in ax.containers}
    assert list(drawn) == ["BF16, no noise", "NVFP4, no noise"]  # nf4 has one rank: no line
    for container in drawn.values():
        xs, ys = container.lines[0].get_xydata().T
        assert xs == pytest.approx([8, 32, 128], rel=0.05) and ys == pytest.approx([0.513, 0.537, 0.633])
        (low, high), *_ = container.lines[2][0].get_segments()
        assert high[1] - low[1] == pytest.approx(2 * T * 0.005, rel=1e-5)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["8", "32", "128"]


def test_schedules_show_their_sigma_and_what_came_of_it(study: Path) -> None:
    runs = varying([run for run in load_runs([study]) if run.option("quant.name") == "nvfp4"], "aqn.name")
    figure = effects.schedules(arms(runs, ["aqn.name"]), [Column("held-out", final("sampled"))])
    lines = {line.get_label(): line.get_ydata().tolist() for line in figure.axes[0].get_lines()}
    assert lines == {"none": [0, 0, 0], "exp": [0, 0.01, 0.001], "linear": [0, 0.01, 0.005]}
    assert list(dots_of(figure.axes[1])) == ["_none", "_exp", "_linear"]


def test_controls_are_named_by_what_they_add(study: Path) -> None:
    keys = ["quant.name", "aqn.name", "aqn.sigma_start", "inject.cadence", "rollout.temperature", "optim.entropy_coef"]
    runs = varying(load_runs([study]), "quant", "aqn", "inject", "rollout.temperature", "optim.entropy_coef")
    assert [row["label"] for row in effects.control_rows(arms(runs, keys))] == [
        *(
            "BF16",
            "BF16, entropy bonus 0.01",
            "BF16, temperature 1.5",
            "BF16, AQN from 0.01",
            "BF16, format_error_fixed",
        ),
        *("NVFP4", "NVFP4, AQN from 0.01", "NVFP4, AQN from 0.05"),
    ]


def test_noise_on_and_off_stand_in_one_panel_per_format(study: Path) -> None:
    runs = with_one_noise(varying(load_runs([study]), "quant", "aqn.name"))
    figure = by_format(tidy(runs), ["reward/mean", "entropy"], smooth=1)
    assert isinstance(figure, Figure)
    assert [ax.get_title(loc="left") for ax in figure.axes[:3]] == ["BF16", "NF4", "NVFP4"]
    lines = {str(line.get_label()): line for line in figure.axes[5].get_lines()}
    assert {label: line.get_linestyle() for label, line in lines.items()} == {
        "NVFP4, no noise": "--",
        "NVFP4, AQN exp": "-",
    }
    assert lines["NVFP4, AQN exp"].get_ydata() == pytest.approx([0.1, 0.2, 0.3])


def test_formats_are_put_together_over_the_settings_that_all_of_them_have(study: Path, tmp_path: Path) -> None:
    """Two seeds: 0.5 + rank / 1000 + seed / 100. In the study nf4 was run at one setting, without it there are more."""
    runs = load_runs([study])
    found = scores(runs, final("sampled"))
    assert list(found) == ["bf16", "nf4", "nvfp4"]
    assert all(table == pytest.approx(np.array([[0.532], [0.542]])) for table in found.values())
    two = scores([run for run in runs if run.option("quant.name") != "nf4"], final("sampled"))
    assert two["bf16"].shape == (2, 6)  # noise, three rates, two other ranks
    with pytest.raises(BadInput, match=r"grid is incomplete.*seed=1"):
        scores([run for run in runs if (run.option("quant.name"), run.option("seed")) != ("nf4", 1)], final("sampled"))
    with pytest.raises(BadInput, match="no setting was run with each of the formats bf16, mxfp4, nf4, nvfp4"):
        scores([*runs, make(tmp_path, 0, "mxfp4", rank=5)], final("sampled"))
    with pytest.raises(BadInput, match="are one setting, format and seed"):
        scores([*runs, make(tmp_path, 0, "nf4", quantizer="awq")], final("sampled"))


def test_the_overview_shows_middle_chance_and_profile() -> None:
    """Of eight runs the middle four count; nvfp4 wins against two of three quarters; profiles fall from 1 to 0."""
    found = {"bf16": np.arange(8.0).reshape(4, 2) / 10, "nvfp4": np.full((4, 2), 0.45)}
    middle, better, profile = overview(found, "held-out", np.random.default_rng(0)).axes
    assert {name: dot[:2] for name, dot in dots_of(middle).items()} == {
        "_bf16": (0, pytest.approx(0.35)), "_nvfp4": (1, pytest.approx(0.45)),
    }  # fmt: skip
    assert dots_of(middle)["_nvfp4"][2] == pytest.approx(0)
    # against 0, .2, .4, .6 (three below) and .1, .3, .5, .7 (two below)
    assert dots_of(better) == {"_nvfp4": (1, pytest.approx(5 / 8), pytest.approx(0, abs=0.5))}
    lines = {str(line.get_label()): line.get_ydata() for line in profile.get_lines()}
    assert list(lines) == ["BF16", "NVFP4"] and set(lines["NVFP4"]) == {0.0, 1.0}
    assert [lines["BF16"][0], lines["BF16"][-1]] == [7 / 8, 0.0]


# --- scripts ---------------------------------------------------------------------------------------------------------


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "analysis" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPTS = ["reward", "entropy", "aqn", "schedules", "ranks", "learning_rates", "accuracy", "controls", "speed"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_draws_its_part_of_a_study(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    script(f"fig_{name}").main([str(study), "--out", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.pdf", f"{name}.png"]
    said = capsys.readouterr().err
    assert "of 36 runs, the largest set that differs in" in said and "_target_" not in said


def test_methods_that_differ_in_more_than_the_factor_are_drawn_when_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 1):
        make(tmp_path / "runs", seed, lr=1e-4)
        make(tmp_path / "runs", seed, "nvfp4")
    arguments = [str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    with pytest.raises(BadInput, match="no two of these 4 runs differ"):
        script("fig_accuracy").main(arguments)
    script("fig_accuracy").main([*arguments, "--also", "optim.lr"])
    assert (tmp_path / "out" / "accuracy.png").is_file() and "compared" not in capsys.readouterr().err


def test_the_overview_is_drawn_of_a_whole_study(study: Path, tmp_path: Path) -> None:
    for out in (tmp_path / "one", tmp_path / "two"):
        script("fig_overview").main([str(study), "--out", str(out)])
    assert (tmp_path / "one" / "overview.png").read_bytes() == (tmp_path / "two" / "overview.png").read_bytes()


def test_a_sweep_over_sigma_is_not_mixed_with_other_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        for rank in (8, 32):
            make(tmp_path / "runs", seed, rank=rank)  # sigma 0, at two ranks
        for level in (0.01, 0.02):
            make(tmp_path / "runs", seed, aqn="constant", level=level)
    script("fig_sigma").main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    rows = (tmp_path / "out" / "sigma.csv").read_text().splitlines()[1:]
    assert len(rows) == 6 and not any("-8-" in row for row in rows)
    assert "6 of 8 runs" in capsys.readouterr().err


def test_quantizers_are_compared_of_one_run_each(tmp_path: Path) -> None:
    """Answers of two questions, of which the base gets the first right with rtn and both with mse."""
    compare = script("quantizers").compare
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
    with pytest.raises(BadInput, match="both quant=nvfp4 quantizer=mse: leave one out"):
        compare(runs)
    (runs[1].path / "layers.parquet").unlink()
    with pytest.raises(BadInput, match=r"layers\.parquet is missing"):
        compare(runs[:2])


def test_a_run_without_a_final_evaluation_is_named(tmp_path: Path) -> None:
    run = make(tmp_path, 0)
    kept = [line for line in (run.path / "metrics.jsonl").read_text().splitlines() if '"step": 3, "eval' not in line]
    (run.path / "metrics.jsonl").write_text("\n".join(kept))
    with pytest.raises(BadInput, match="was not evaluated after training"):
        final("sampled")(load_run(run.path))
    assert math.isclose(final("greedy")(make(tmp_path, 1)), 0.9)
    assert arms([run], ["aqn.sigma_start"]) == [{"aqn.sigma_start": None, "runs": [run]}]
