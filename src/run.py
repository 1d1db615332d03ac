"""`python src/run.py quant=nvfp4 aqn=exp -m lora.rank=16,32,64`: run one experiment, or a sweep with -m."""

from __future__ import annotations

import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from qerl_bench.cli import exit_code, flags_first, mention_sweep, preflight
from qerl_bench.config import build, register_resolvers, resolved
from qerl_bench.option_names import check_labels


@hydra.main(config_path="../conf", config_name="run", version_base="1.3")
def run(cfg: DictConfig) -> None:
    check_labels(cfg, HydraConfig.get().runtime)
    from qerl_bench.experiment import run_experiment

    mention_sweep(HydraConfig.get())
    run_experiment(build(resolved(cfg)), resolved(cfg))


def main() -> int:
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # let errors reach us instead of Hydra's own printer
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # OpenMP threads wait actively for microseconds, not milliseconds
    register_resolvers()
    sys.argv[1:] = flags_first(sys.argv[1:])
    return exit_code(preflight_and_run, "stopped; the same command continues from the last checkpoint")


def preflight_and_run() -> None:
    preflight(sys.argv[1:])
    run()


if __name__ == "__main__":
    sys.exit(main())
