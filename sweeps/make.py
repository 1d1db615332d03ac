"""usage: python sweeps/make.py STUDY ...

Print the grid of a study as a sweep for `wandb agent`, one process per run.

    python sweeps/make.py tiny/main > sweeps/tiny_main.yaml
    wandb sweep sweeps/tiny_main.yaml             # prints the name of the sweep
    wandb agent ENTITY/PROJECT/SWEEP              # once per machine or GPU; each takes the next point

Any study of conf/experiment that sweeps will do; several with the same grid become one sweep.
"""

from __future__ import annotations

import sys
from functools import cache

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from qerl_core.checks import require
from qerl_core.exits import exit_in_words
from qerl_core.options.composer import HYDRA_DEFAULTS, register_resolvers
from qerl_core.process.installation import CONF_DIR


@cache
def composed(study: str) -> DictConfig:
    register_resolvers()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF_DIR), **HYDRA_DEFAULTS):
        return hydra_compose("run", [f"experiment={study}"], return_hydra_config=True)


def sweep(studies: list[str]) -> str:
    """The sweep as YAML. Raises ConfigError for studies without a grid, or with different ones."""
    configs = [composed(study) for study in studies]
    grids = [dict(config.hydra.sweeper.params or {}) for config in configs]
    require(bool(grids) and all(grid == grids[0] for grid in grids), f"not one grid: {grids}")
    require(bool(grids[0]), f"experiment={studies[0]} sweeps over nothing")
    trains_for_accuracy = configs[0].eval.name != "none"
    metric = ("eval/accuracy_sampled", "maximize") if trains_for_accuracy else ("time/step_s", "minimize")
    chosen = [f"experiment={studies[0]}"] if len(studies) == 1 else []
    parameters = {"experiment": ",".join(studies)} | grids[0] if len(studies) > 1 else grids[0]
    words = ["${env}", "${interpreter}", "${program}", "${args_no_hyphens}", *chosen, "logger=wandb"]
    quoted = [f'"{word}"' for word in words]
    return "\n".join(
        [
            f"# Made by: python sweeps/make.py {' '.join(studies)}",
            "program: src/run.py",
            "method: grid",
            f"metric: {{name: {metric[0]}, goal: {metric[1]}}}",
            "parameters:",
            *(f"  {key}: {{values: [{str(values).replace(',', ', ')}]}}" for key, values in parameters.items()),
            f"command: [{', '.join(quoted)}]\n",
        ]
    )


if __name__ == "__main__":
    with exit_in_words("stopped"):
        require(len(sys.argv) > 1, "name a study: python sweeps/make.py tiny/main")
        sys.stdout.write(__doc__ if {"-h", "--help"} & {*sys.argv} else sweep(sys.argv[1:]))
