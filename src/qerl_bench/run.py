"""`qerl-bench run quant=nvfp4 aqn=exp -m lora.rank=16,32,64`: run one experiment, or a sweep with -m.

`python src/run.py` in a checkout is the same command. `--cfg job` prints all options, `--help` the choices of each
group.
"""

from __future__ import annotations

import logging
import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from qerl_bench.checks import require
from qerl_bench.cli import flags_first, is_to_do, warn_of_single_point
from qerl_bench.config import HYDRA_DEFAULTS, build, register_resolvers, resolved
from qerl_bench.failure import failure_in_log
from qerl_bench.hidden_packages import hidden_packages
from qerl_bench.installation import CONF_DIR
from qerl_bench.option_names import check_option_names
from qerl_bench.parallel import World, joined


def run(world: World) -> None:
    """Do what the words in sys.argv say."""

    @hydra.main(config_path=str(CONF_DIR), config_name="run", **HYDRA_DEFAULTS)
    def run_one(cfg: DictConfig) -> None:
        check_option_names(cfg, HydraConfig.get().runtime)
        with hidden_packages():
            from qerl_bench.experiment import run_experiment

        warn_of_single_point(HydraConfig.get())
        with failure_in_log():
            run_experiment(build(resolved(cfg)), resolved(cfg), world)

    run_one()


def main(words: list[str]) -> None:
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach our own messages, not Hydra's printer
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # OpenMP threads wait actively for microseconds, not milliseconds
    logging.raiseExceptions = False  # a full disk is reported once, by the run, and not for each line of run.log
    register_resolvers()
    with joined() as world:
        require(
            world.size == 1 or not {"-m", "--multirun"} & {*words},
            "torchrun makes one run on several GPUs, and -m many runs: leave torchrun out, and each takes one GPU",
        )
        if world.from_first(lambda: is_to_do(words)):
            sys.argv[1:] = flags_first([*words, *world.words])  # where Hydra reads them
            run(world)
