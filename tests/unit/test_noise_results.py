"""What the figure `sigma` and analysis/match_temperature.py make of runs with known metrics."""

from __future__ import annotations

import math
import statistics
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from qerl_core.checks import ConfigError
from qerl_studies.figures.noise import (
    DIFFERENCES,
    entropies,
    matched_temperature,
    sigma_doses,
    sigma_effects,
    sigma_figure,
    with_constant_sigma,
)
from qerl_studies.runs.load import Run, load_run
from qerl_studies.runs.settings import Study
from tests.run_folders import SHORT, write_run


def _run(
    folder: Path, aqn: dict[str, Any], train: list[dict[str, float]], quant: str = "nvfp4", seed: int = 0, **more: Any
) -> Any:
    temperature, held_out = more.get("temperature", 1.0), more.get("held_out")
    config = {key: SHORT[key] for key in ("quantizer", "task")} | {
        "steps": len(train),
        "seed": seed,
        "quant": {"name": quant},
        "aqn": aqn,
        "rollout": {"temperature": temperature},
        "model": {"name": "tiny", "seed": more.get("base", 0)},
    }
    lines = [{"kind": "train", "step": step, **values} for step, values in enumerate(train, start=1)]
    if held_out is not None:
        lines = [
            {"kind": "eval", "step": 0, "eval/accuracy_sampled": 0.1},
            *lines,
            {"kind": "eval", "step": len(train), "eval/accuracy_sampled": held_out},
        ]
    return load_run(write_run(folder, config, lines))


def _step(entropy: float, **more: float) -> dict[str, float]:
    return {"entropy": entropy, "entropy_clean": 0.1, "accuracy": 0.5, "mismatch/kl": 1e-3, "mismatch/ess": 0.99} | more


LEVELS = (0.0, 1e-2, 1e-1)


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Formats x sigmas x three seeds, whose entropies lie far apart, while noise multiplies them by nearly the same.

    At sigma 0.01 by 1.04, 1.05 and 1.06; reward falls by sigma, accuracy by twice sigma.
    """
    found = []
    for quant, level, (seed, off) in product(("nvfp4", "bf16"), LEVELS, enumerate((0.20, 0.30, 0.40))):
        noise = {"name": "constant", "level": level} if level else {"name": "none"}
        steps = [
            _step(off * (1 + (4 + seed) * level), **{"reward/mean": 1 - level, "mismatch/kl": 1e-6 + level**2})
        ] * 5
        folder = tmp_path / f"{quant}-{level}-{seed}"
        found.append(_run(folder, noise, steps, quant, seed=seed, held_out=0.8 - 2 * level))
    return found


@pytest.fixture
def table(tmp_path: Path) -> pd.DataFrame:
    """Three seeds of two temperatures on BF16, and a run of a schedule, which has no single sigma."""
    runs = [
        _run(tmp_path / f"bf{seed}", {"name": "none"}, [_step(0.2 + seed / 10)], "bf16", seed=seed) for seed in range(3)
    ]
    runs.append(_run(tmp_path / "hot", {"name": "none"}, [_step(0.5)], "bf16", temperature=1.2))
    runs.append(_run(tmp_path / "on", {"name": "constant", "level": 1e-2}, [_step(0.31)]))
    runs.append(_run(tmp_path / "scheduled", {"name": "exp"}, [_step(9.0)]))
    return entropies(runs, step=1)


def test_the_table_has_one_row_for_each_run_with_a_sigma(table: pd.DataFrame) -> None:
    assert len(table) == 5 and sorted(set(table["sigma"])) == [0.0, 1e-2]
    assert table[["quant", "seed", "temperature", "entropy"]].iloc[1].tolist() == ["bf16", 1, 1.0, pytest.approx(0.3)]


def test_effects_of_each_sigma_are_paired_within_seeds_and_formats(runs: list[Run]) -> None:
    """Between seeds entropy spreads by a half, its ratio by one per cent: only the paired interval excludes 1."""
    table = sigma_effects(sigma_doses(Study(runs))).set_index(["quant", "sigma", "measure"]).sort_index()
    assert len(table) == 2 * 2 * 3 and set(table["n"]) == {3}
    row = table.loc[("NVFP4", 1e-2, "entropy")]
    logs = [math.log(1.04), math.log(1.05), math.log(1.06)]
    half = 4.3026527 * statistics.stdev(logs) / 3**0.5
    expected = [100 * math.expm1(statistics.fmean(logs) + side) for side in (0, -half, half)]
    assert [row["mean"], row["low"], row["high"]] == pytest.approx(expected)
    assert table.loc[("BF16", 1e-1, "late reward")]["mean"] == pytest.approx(-0.1)
    assert table.loc[("BF16", 1e-1, "held-out (sampled)")]["mean"] == pytest.approx(-20)
    assert table.loc[("BF16", 1e-1, "entropy")]["mismatch"] == pytest.approx(1e-2 + 1e-6)


def test_each_format_has_a_column_of_its_own_and_each_measure_a_row_with_its_margin(runs: list[Run]) -> None:
    figure = sigma_figure(sigma_doses(Study(runs)))
    axes = np.array(figure.axes).reshape(4, 2)
    assert [ax.get_title(loc="left") for ax in axes[0]] == ["BF16", "NVFP4"]
    for row, measure in zip(axes, DIFFERENCES, strict=False):
        for ax in row:
            assert [container.lines[0].get_xdata()[0] for container in ax.containers] == [1e-2, 1e-1]
            box = ax.patches[0].get_extents().transformed(ax.transData.inverted())
            assert (box.y0, box.y1) == pytest.approx(
                (measure.on_axis(-measure.margin), measure.on_axis(measure.margin))
            )
    (joined,) = (line for line in axes[1, 1].get_lines() if line.get_label() == "_NVFP4" and len(line.get_xdata()) > 1)
    assert list(joined.get_xdata()) == [0, *LEVELS[1:]] and list(joined.get_ydata()) == pytest.approx([0, -0.01, -0.1])
    kl = [line.get_ydata()[0] for line in axes[3, 0].get_lines() if line.get_marker() == "o"]
    assert kl == pytest.approx([1e-4 + 1e-6, 1e-2 + 1e-6]) and axes[3, 0].get_yscale() == "log"
    ticks = axes[3, 0].get_xticklabels()
    assert [tick.get_text() for tick in ticks] == ["0", "0.01", "0.1"] and ticks[0].get_fontsize() >= 7
    assert "3 seeds of one base model" in " ".join(figure.get_supxlabel().split())


def test_bases_are_the_unit_of_a_sweep_over_several(tmp_path: Path) -> None:
    noises: tuple[dict[str, Any], ...] = ({"name": "none"}, {"name": "constant", "level": 1e-2})
    cells = product(noises, range(2), range(2))
    runs = [
        _run(tmp_path / str(i), noise, [_step(0.2, **{"reward/mean": 1.0})], seed=seed, base=base)
        for i, (noise, base, seed) in enumerate(cells)
    ]
    assert set(sigma_effects(sigma_doses(Study(runs)))["n"]) == {2}


def test_a_sweep_without_an_evaluation_has_no_row_for_accuracy(tmp_path: Path) -> None:
    steps = [_step(0.2, **{"reward/mean": 1.0})]
    runs = [
        _run(tmp_path / "a", {"name": "none"}, steps),
        _run(tmp_path / "b", {"name": "constant", "level": 0.05}, steps),
    ]
    assert set(sigma_effects(sigma_doses(Study(runs)))["measure"]) == {"entropy", "late reward"}
    axes = sigma_figure(sigma_doses(Study(runs))).axes
    assert len(axes) == 3 and [tick.get_text() for tick in axes[-1].get_xticklabels()] == ["0", "0.05"]


def test_a_sweep_with_holes_or_without_a_zero_is_refused(runs: list[Run]) -> None:
    hole = [run for run in runs if not (run.option("quant.name") == "bf16" and run.option("aqn").get("level") == 1e-2)]
    with pytest.raises(ConfigError, match=r"Missing: quant=bf16 aqn\.level=0\.01 seed=0,1,2"):
        sigma_doses(Study(hole))
    with pytest.raises(ConfigError, match="every run has sigma 0"):
        sigma_doses(Study([run for run in runs if run.option("aqn.name") == "none"]))
    with pytest.raises(ConfigError, match="no run without noise to compare with"):
        sigma_doses(Study([run for run in runs if run.option("aqn.name") != "none"]))
    with pytest.raises(ConfigError, match="there is no sigma to compare"):
        with_constant_sigma([])


def test_matched_temperature_is_interpolated_and_never_extrapolated(table: pd.DataFrame) -> None:
    """BF16 has 0.3 at temperature 1 and 0.5 at 1.2: 0.312 lies 6 % of the way."""
    assert matched_temperature(table, "bf16", 0.312) == pytest.approx(1.012)
    with pytest.raises(ConfigError, match=r"outside of the runs without noise, 0\.3 to 0\.5"):
        matched_temperature(table, "bf16", 0.6)
    with pytest.raises(ConfigError, match="fewer than two temperatures"):
        matched_temperature(table, "nvfp4", 0.3)
