"""The sampling temperature that gives an unquantized policy without noise the entropy of a noisy arm, at one step.

python analysis/match_temperature.py runs/ --noisy nvfp4 --sigma 1e-2
"""

from __future__ import annotations

from qerl_core.checks import require
from qerl_core.exits import guarded
from qerl_core.statistics import mean_ci
from qerl_studies.design.looks import shown_runs
from qerl_studies.figures.noise import SIGMA_FACTORS, entropies, matched_temperature, with_constant_sigma
from qerl_studies.figures.read import select
from qerl_studies.runs.comparable import load_runs
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


if __name__ == "__main__":
    guarded(main)
