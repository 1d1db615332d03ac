"""`qerl-bench run quant=nvfp4 aqn=exp -m lora.rank=16,32,64`: run one experiment, or a sweep with -m.

`python src/run.py` in a checkout is the same command. `--help` prints the options of each axis, `--explain KEY` what
one means.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig

from qerl_bench.config import build
from qerl_bench.experiment_spec import Experiment
from qerl_bench.parallel import ALONE, World, is_rank0_output, joined_ranks
from qerl_bench.sweep.check import check_single, print_finished, warn_of_single_point
from qerl_core import __version__
from qerl_core.checks import ConfigError, require
from qerl_core.options import user_options
from qerl_core.options.composer import HYDRA_DEFAULTS, Composer, reading_once, register_resolvers, resolved
from qerl_core.options.explain import explain, usage
from qerl_core.options.names import check_option_names, search_folders
from qerl_core.process.children import is_child
from qerl_core.process.failure import failure_in_log
from qerl_core.process.hidden_packages import hidden_packages
from qerl_core.process.importing import set_environment, uncollected
from qerl_core.process.installation import CONF_DIR
from qerl_core.process.out_of_memory import memory_for
from qerl_core.process.progress import LEVEL, phase, quiet
from qerl_core.process.termination import terminations_held
from qerl_core.rundir.refusals import nothing_left_if_refused
from qerl_core.rundir.stops import note_at_stop, stop_line
from qerl_core.sweeps.points import flags_first, with_swept_axes

log = logging.getLogger(__name__)
QUIET = {"-q", "--quiet"}


class HydraBypass(BaseException):
    """An error on its way through Hydra, which would print the whole command line in front of its message."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def run_experiment(experiment: Experiment, cfg: DictConfig, world: World = ALONE, words: Sequence[str] = ()) -> None:
    """Make a run, or continue it; draw its figures, and print what came of it. `experiment` is built from `cfg`, and
    that from `words`."""
    from qerl_bench.experiment import trained

    with trained(experiment, cfg, world) as run:
        if run is None:
            return
        if experiment.steps:
            draw_figures(run.path)
    from qerl_bench.conduct.run_messages import ending
    from qerl_studies.runs.load import load_run
    from qerl_studies.tables.terminal import no_gradient_warning, places, render, summary

    table = summary([run.path])
    if warning := no_gradient_warning(table):
        log.warning(warning)
    shown = [] if is_child() else [render(table)]
    if not quiet():
        shown += [*places(run.path), *([] if is_child() else ending(load_run(run.path), words))]
    if shown:
        print("\n".join(shown))


def draw_figures(run_dir: Path) -> None:
    """Draw the figures of a finished run. They are for looking at: what keeps them from being drawn is a warning."""
    try:
        with phase("drawing figures"):  # pandas, scipy and matplotlib take a second to import
            from qerl_studies.figures.run import run_figures

            run_figures(run_dir)
    except Exception as error:
        words = f"{type(error).__name__}: {error}".partition("\n")[0]
        log.warning("%s is finished, but its figures are not drawn: %s. Later: qerl-bench report", run_dir, words)


def run(world: World, single: bool) -> None:
    """Do what the words in sys.argv say. Those of a `single` run are checked, so that Hydra need not look for more."""

    def run_one(cfg: DictConfig) -> None:
        user_options.use(search_folders(HydraConfig.get().runtime))
        check_option_names(cfg, HydraConfig.get().runtime)
        with hidden_packages(), uncollected(), phase("importing PyTorch"), terminations_held():
            import_module("qerl_bench.experiment")

        warn_of_single_point(HydraConfig.get())
        try:
            with failure_in_log(), memory_for("run"):  # for what happens outside of its phases
                words = HydraConfig.get().overrides.task
                run_experiment(build(resolved(cfg)), resolved(cfg), world, words)
        except Exception as error:
            raise HydraBypass(error) from error

    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    try:
        if single:
            with reading_once() as hydra_of_one:
                hydra_of_one.run("run", run_one, words)
        else:
            hydra.main(config_path=str(CONF_DIR), config_name="run", **HYDRA_DEFAULTS)(run_one)()
    except HydraBypass as carried:
        error = carried.error
    except HydraException as refused:  # of a sweep, whose words Hydra is the first to compose
        error = ConfigError(Composer().explained(refused, words))
    else:
        return
    raise error


def described(words: list[str]) -> str:
    """What is asked for in place of a run."""
    if {"-h", "--help"} & {*words}:
        return usage(words)
    return __version__ if "--version" in words else explain([word for word in words if word != "--explain"])


def main(words: list[str]) -> None:
    if {"-h", "--help", "--version", "--explain"} & {*words}:
        if is_rank0_output():
            print(described(words))
        return
    if QUIET & {*words}:
        words = [word for word in words if word not in QUIET]
        os.environ[LEVEL] = "WARNING"
    set_environment()
    logging.raiseExceptions = False  # a full disk is reported once, by the run, and not for each line of run.log
    register_resolvers()
    with joined_ranks() as world:
        sweep = bool({"-m", "--multirun"} & {*words})
        require(
            world.size == 1 or not sweep,
            "torchrun makes one run on several GPUs, and -m many runs: leave torchrun out, and each takes one GPU",
        )
        point = world.from_first(lambda: check_single(words))
        if point is not None and point.finished:
            print_finished(point.run_dir)
            return
        words = Composer().spelled_out(words)
        words = with_swept_axes(words) if sweep else words
        sys.argv[1:] = flags_first([*words, *world.words])  # where Hydra reads them
        with ExitStack() as around:
            if point is not None:
                around.enter_context(note_at_stop(partial(stop_line, point.run_dir)))
            if point is not None and world.first:
                around.enter_context(nothing_left_if_refused(point.run_dir))
            run(world, single=point is not None)
