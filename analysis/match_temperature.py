"""The sampling temperature that gives an unquantized policy without noise the entropy of a noisy arm, at one step.

python analysis/match_temperature.py runs/ --noisy nvfp4 --sigma 1e-2
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pandas as pd

from qerl_core.checks import ConfigError, require
from qerl_core.exits import guarded
from qerl_core.statistics import mean_ci
from qerl_studies.design.looks import shown_runs
from qerl_studies.figures.noise import SIGMA_FACTORS, sigma_of, with_constant_sigma
from qerl_studies.figures.read import select
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.load import Run
from qerl_studies.runs.script import parser_for


def main(arguments: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--noisy", default="nvfp4", help="format of the arm to match (default: nvfp4)")
    parser.add_argument("--sigma", type=float, default=1e-2, help="its noise (default: 1e-2)")
    parser.add_argument("--clean", default="bf16", help="format of the control (default: bf16)")
    parser.add_argument("--step", type=int, default=1, help="training step to match at (default: 1)")
    options = parser.parse_args(arguments)

    runs = load_runs(shown_runs(options.runs, options.without), options.mixed_code)
    factors = (*SIGMA_FACTORS, "rollout.temperature")
    table = entropies(select(with_constant_sigma(runs), factors).runs, options.step)
    arm = table[(table["quant"] == options.noisy) & (table["sigma"] == options.sigma) & (table["temperature"] == 1.0)]
    require(not arm.empty, f"no run of quant={options.noisy} with sigma {options.sigma:g} at temperature 1")
    target = mean_ci(arm["entropy"].tolist())
    matched = matched_temperature(table, options.clean, target.value)
    print(
        f"{options.noisy} with sigma {options.sigma:g}: entropy {target.value:.4f} +- {target.half_width:.4f} "
        f"nats/token, {target.n} seeds"
    )
    print(f"{options.clean} without noise has it at rollout.temperature={matched:.3f}")


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


if __name__ == "__main__":
    guarded(main)
