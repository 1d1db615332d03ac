"""Checks of runs before any training: whatever can be found wrong is refused before a file is written."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from qerl_bench.config import build
from qerl_bench.eval.base import Evaluator
from qerl_bench.experiment_spec import Experiment
from qerl_bench.sweep.since_finished import changed_since, warn_of_changes
from qerl_bench.task.base import Task
from qerl_bench.task.dataset import DataRefused, TooFew
from qerl_core.checks import ConfigError, require
from qerl_core.options.composer import Composer
from qerl_core.options.foreign_names import WITHOUT_KEY
from qerl_core.options.hydra_options import first_values
from qerl_core.process.arguments import printable
from qerl_core.process.cards import require_gpu
from qerl_core.rundir.checkpoints import is_finished
from qerl_core.rundir.run_checks import RunDamaged, check_run_dir, refuse_locked
from qerl_core.sweeps.points import Point, flags_first

log = logging.getLogger(__name__)


def check_single(argv: list[str]) -> Point | None:
    """Check a single run before Hydra creates its folder. None for a sweep, which the launcher checks, and without run.

    Raises ConfigError, or RunLocked if another process is running it.
    """
    parser = get_args_parser()
    parser.allow_abbrev = False  # --experiment is no --experimental-rerun
    parsed, unknown = parser.parse_known_args(flags_first(argv))
    if unknown:
        raise ConfigError(no_flag(unknown))
    given = {key: value for key, value in vars(parsed).items() if value}
    words = given.get("overrides", [])
    warn_of_repeated(words)
    grids = [word for word in words if word.lstrip("+~").startswith("hydra.sweeper.params")]
    require(not grids, f"{' '.join(grids)}: that is for an experiment file; here a sweep is -m seed=0,1")
    require(
        "experimental_rerun" not in given,
        "--experimental-rerun reads a pickle, which may run anything: repeat a run by its command, argv in env.json",
    )
    if "cfg" in given:
        one = first_values(words)
        shown = " ".join(["--cfg", given["cfg"], *one])
        require("multirun" not in given and one == words, f"--cfg shows the config of one run: leave -m out, {shown}")
    if "multirun" in given:
        return None
    if given.keys() - {"overrides", "run"}:  # Hydra prints something
        Composer().tree(words)
        return None
    point = check_point(Composer(), words)
    warn_of_changes([point])
    if not point.finished:
        refuse_locked(point.run_dir)
    return point


def warn_of_repeated(words: Sequence[str]) -> None:
    """Warn of a key with several values in several words, of which Hydra takes the last: a shell makes two words of
    seed={0,1}."""
    given: dict[str, dict[str, None]] = {}
    for word in words:
        given.setdefault(word.partition("=")[0].lstrip("+"), {})[word] = None
    for key, those in given.items():
        if len(those) > 1:
            log.warning("%s is given %d times, and %s alone counts", key, len(those), [*those][-1])


def no_flag(given: Sequence[str]) -> str:
    """What is said of flags that there are not: the first is probably an option with dashes, or a file of options."""
    key, _, value = given[0].lstrip("-").partition("=")
    right = f"{key}={value or 'VALUE'}"
    if key == "config":
        right = "experiment=NAME, for which --config-dir DIR adds your own DIR/experiment/NAME.yaml"
    if said := WITHOUT_KEY.get(key.replace("-", "_")):
        return f"{' '.join(given)}: no such flag. {said}"
    return f"{' '.join(given)}: no such flag. An option is a word without dashes: {right}; --help lists the flags"


def print_finished(run_dir: Path) -> None:
    """Print the result of a run that is complete, as the run itself did."""
    from qerl_studies.tables.terminal import places, render, summary

    print(printable(f"finished before: {run_dir} (delete the folder to run it again)"), file=sys.stderr)
    print(render(summary([run_dir])), *places(run_dir), sep="\n")


def warn_of_single_point(hydra: HydraConf) -> None:
    """Warn if one run was started of a study that sweeps over keys which the command line does not set."""
    given = {word.lstrip("+~").partition("=")[0] for word in hydra.overrides.task}
    unset = [str(key) for key in hydra.sweeper.params or {} if key not in given]
    if unset:
        log.warning("this is one run of an experiment that sweeps over %s; -m runs all points", ", ".join(unset))


def check(cfg: DictConfig) -> Experiment:
    """Build the specs of a composed config and check that all they need is there but a GPU. Raises ConfigError."""
    experiment = build(cfg)
    experiment.model.check_files()
    experiment.engine.check(experiment.device, experiment.quant)
    check_data(experiment.task, experiment.eval)
    experiment.check_calibration()
    experiment.reward.check(experiment.task)
    if not experiment.algo.on_policy:
        experiment.task.demonstrations(step=1, count=1, seed=experiment.seed)  # a task may have none
    experiment.check_model()
    experiment.eval.check(experiment.task)
    experiment.logger.check()
    check_run_dir(experiment.run_dir, cfg)
    return experiment


def check_data(task: Task, evaluator: Evaluator) -> None:
    """Check the data of the task. Where words would mend them, too few held-out questions are refused with them."""
    try:
        task.check()
    except DataRefused as refused:
        if refused.mended is not None:
            try:
                refused.mended.eval_prompts(getattr(evaluator, "questions", None))
            except TooFew as error:
                raise DataRefused([*refused.said, str(error)], [*refused.words, *error.words], None) from None
        raise


def check_points(job_overrides: Sequence[Sequence[str]], here: bool = True) -> list[Point]:
    """Compose and check every point of a sweep, which runs `here` or on another machine.

    Raises ConfigError naming the first point that cannot run.
    A point whose folder is damaged does not keep the others from running.
    """
    points: dict[str, Point] = {}
    composer = Composer()
    for overrides in job_overrides:
        try:
            point = check_point(composer, overrides, here, keep_damaged=True)
        except ConfigError as error:
            raise ConfigError(f"{' '.join(overrides)}: {error}") from error
        if point.name in points:
            raise ConfigError(f"{' '.join(overrides)} and {' '.join(points[point.name].overrides)} are the same run")
        points[point.name] = point
    warn_of_changes([*points.values()])
    return list(points.values())


def check_point(composer: Composer, overrides: Sequence[str], here: bool = True, keep_damaged: bool = False) -> Point:
    """Compose and check one point, as `check`, and the GPU of one that runs `here`.

    A finished one needs no more than the config that it was made with.

    Raises ConfigError; what is damaged is noted in the point instead, if `keep_damaged`.
    """
    tree = composer.tree(overrides)
    name, run_dir = str(tree["name"]), Path(str(tree["root"]), "runs", str(tree["name"]))
    finished, damage, changed = is_finished(run_dir), None, []
    try:
        if finished:
            check_run_dir(run_dir, tree)
            changed = changed_since(run_dir, tree)
        else:
            if here:
                require_gpu(tree.get("device"))
            check(OmegaConf.create(tree))
    except RunDamaged as error:
        if not keep_damaged:
            raise
        damage = str(error)
    return Point(list(overrides), name, run_dir, finished and damage is None, damage, changed)


def note_following_alpha(points: Sequence[Sequence[str]]) -> None:
    """Say that lora.alpha differs between the points of a sweep over lora.rank, whose words do not name it."""
    by_rank = {word: words for words in points for word in words if word.startswith("lora.rank=")}
    if len(by_rank) < 2 or any(word.startswith("lora.alpha=") for words in points for word in words):
        return
    composer = Composer()
    if len({composer.tree(words)["lora"]["alpha"] for words in by_rank.values()}) > 1:
        log.info(
            "lora.alpha follows lora.rank, and the size of a step grows with it: for the rank alone add lora.alpha=32"
        )
