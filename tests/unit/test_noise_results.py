"""The numbers and the figure that analysis/fig_sigma.py and match_temperature.py make, from runs with known metrics."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from qerl_bench.errors import BadInput
from qerl_bench.results.load import load_run
from qerl_bench.results.noise import (
    HELD_OUT,
    entropy_effect,
    loop_report,
    matched_temperature,
    sigma_figure,
    sigma_table,
)
from qerl_bench.results.stats import interval


def _run(
    folder: Path, aqn: dict[str, Any], train: list[dict[str, float]], quant: str = "nvfp4", seed: int = 0, **more: Any
) -> Any:
    temperature, held_out = more.get("temperature", 1.0), more.get("held_out")
    folder.mkdir(parents=True)
    config = {
        "name": folder.name,
        "steps": len(train),
        "seed": seed,
        "quant": {"name": quant},
        "quantizer": {"name": "rtn"},
        "aqn": aqn,
        "rollout": {"temperature": temperature},
    }
    lines = [{"kind": "train", "step": step, **values} for step, values in enumerate(train, start=1)]
    if held_out is not None:
        lines = [
            {"kind": "eval", "step": 0, HELD_OUT: 0.1},
            *lines,
            {"kind": "eval", "step": len(train), HELD_OUT: held_out},
        ]
    (folder / "config.yaml").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_run(folder)


def _step(entropy: float, **more: float) -> dict[str, float]:
    return {"entropy": entropy, "entropy_clean": 0.1, "accuracy": 0.5, "mismatch/kl": 1e-3, "mismatch/ess": 0.99} | more


@pytest.fixture
def table(tmp_path: Path) -> pd.DataFrame:
    """Three seeds whose entropies lie far apart, while noise adds 0.010, 0.012 and 0.014 to them."""
    runs = []
    for seed, (off, on) in enumerate([(0.20, 0.210), (0.30, 0.312), (0.40, 0.414)]):
        runs.append(_run(tmp_path / f"off{seed}", {"name": "none"}, [_step(off)], seed=seed, held_out=0.7))
        runs.append(_run(tmp_path / f"on{seed}", {"name": "constant", "level": 1e-2}, [_step(on)], seed=seed))
        runs.append(_run(tmp_path / f"bf{seed}", {"name": "constant", "level": 0.0}, [_step(off)], "bf16", seed=seed))
    runs.append(_run(tmp_path / "hot", {"name": "none"}, [_step(0.5)], "bf16", temperature=1.2))
    runs.append(_run(tmp_path / "scheduled", {"name": "exp"}, [_step(9.0)]))  # has no single sigma
    return sigma_table(runs, step=1)


def test_interval_by_hand() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.mean, found.n) == (3.0, 5)
    assert found.half == pytest.approx(2.7764451 * statistics.stdev([1, 2, 3, 4, 5]) / math.sqrt(5))
    assert found.excludes_zero
    assert not interval([-1.0, 1.5]).excludes_zero
    assert math.isnan(interval([1.0]).half)
    assert interval([0.0, 1.0] * 50).half == pytest.approx(1.9842169 * statistics.stdev([0.0, 1.0] * 50) / 10)
    with pytest.raises(BadInput):
        interval([])


def test_the_table_has_one_row_for_each_run_with_a_sigma(table: pd.DataFrame) -> None:
    assert len(table) == 10
    assert sorted(set(table["sigma"])) == [0.0, 1e-2]
    row = table[table["run"] == "off1"].iloc[0]
    assert (row["entropy"], row["seed"], row[HELD_OUT]) == (0.30, 1, 0.7)
    assert math.isnan(table[table["run"] == "on1"].iloc[0][HELD_OUT])


def test_the_effect_is_paired_within_seeds(table: pd.DataFrame) -> None:
    """Between seeds the spread is 0.1, within them 0.002: only the paired interval excludes zero."""
    effect = entropy_effect(table, 1e-2)
    assert effect["quant"].tolist() == ["nvfp4"]  # bf16 has no run with noise
    row = effect.iloc[0]
    assert row["seeds"] == 3
    assert row["off"] == pytest.approx(0.3) and row["on"] == pytest.approx(0.312)
    assert row["off_half"] == pytest.approx(4.3026527 * 0.1 / 3**0.5)
    assert row["difference"] == pytest.approx(0.012)
    assert row["difference_half"] == pytest.approx(4.3026527 * 0.002 / 3**0.5)
    with pytest.raises(BadInput, match=r"at sigma 0 and at sigma 0\.5"):
        entropy_effect(table, 0.5)


def test_the_figure_shows_the_means_and_leaves_rounding_out(table: pd.DataFrame) -> None:
    entropy, accuracy, mismatch = sigma_figure(table).axes
    drawn = {container.get_label(): container for container in entropy.containers}
    line = drawn["NVFP4"].lines[0]
    assert line.get_xdata().tolist() == [0.0, 1e-2]
    assert line.get_ydata().tolist() == pytest.approx([0.3, 0.312])
    assert drawn["BF16"].lines[0].get_ydata().tolist() == pytest.approx([0.3])
    assert [c.lines[0].get_ydata().tolist() for c in accuracy.containers if HELD_OUT in c.get_label()] == [
        pytest.approx([0.7])
    ]
    assert [c.lines[0].get_xdata().tolist() for c in mismatch.containers] == [[1e-2]]
    with pytest.raises(BadInput, match="every run has sigma 0"):
        sigma_figure(table[table["sigma"] == 0])


def test_matched_temperature_is_interpolated_and_never_extrapolated(table: pd.DataFrame) -> None:
    """BF16 has 0.3 at temperature 1 and 0.5 at 1.2: 0.312 lies 6 % of the way."""
    assert matched_temperature(table, "bf16", 0.312) == pytest.approx(1.012)
    with pytest.raises(BadInput, match=r"outside of what was run without noise, 0\.3 to 0\.5"):
        matched_temperature(table, "bf16", 0.6)
    with pytest.raises(BadInput, match="fewer than two temperatures"):
        matched_temperature(table, "nvfp4", 0.3)


def _loop(folder: Path, ratios: list[float]) -> Any:
    train = [
        {"entropy": 0.2 * ratio, "aqn/entropy_target": 0.2, "aqn/sigma": 0.1, "aqn/saturated": float(ratio < 0.5)}
        for ratio in ratios
    ]
    return _run(folder, {"name": "entropy"}, train)


def test_loop_report_by_hand(tmp_path: Path) -> None:
    """Ten steps at 0.4 of the target, then on it: a ten-step mean with one of the former is 0.94, with two 0.88."""
    found = loop_report(_loop(tmp_path / "loop", [0.4] * 10 + [1.0] * 30))
    assert found["settled"] == 19  # of steps 10 to 19
    assert (found["steps_after"], found["held"]) == (22, 1.0)
    assert found["mean_ratio"] == pytest.approx(1.0)
    assert found["saturated_steps"] == 10


def test_a_loop_that_leaves_its_target_again_is_not_said_to_hold_it(tmp_path: Path) -> None:
    found = loop_report(_loop(tmp_path / "lost", [1.0] * 25 + [0.5] * 25))
    assert found["settled"] == 10
    assert found["held"] < 0.5
    never = loop_report(_loop(tmp_path / "never", [0.5] * 40))
    assert math.isnan(never["settled"]) and never["held"] == 0.0  # type: ignore[arg-type]
