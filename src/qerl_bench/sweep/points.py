"""The command line: checks before any training. Whatever can be found wrong is refused before a file is written."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf

from qerl_bench.checks import ConfigError, TrainingStopped, require
from qerl_bench.config import build
from qerl_bench.experiment_spec import Experiment
from qerl_bench.options.composer import Composer
from qerl_bench.process.installation import CONF_DIR
from qerl_bench.rundir.checkpoints import is_finished
from qerl_bench.rundir.run_checks import RunDamaged, check_run_dir, refuse_locked

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    overrides: list[str]
    name: str
    run_dir: Path
    finished: bool
    damage: str | None = None  # why it can neither run nor count as finished


class SweepFailed(TrainingStopped):
    """Some runs of a sweep failed; the others are done."""

    def __init__(self, total: int, failed: Sequence[tuple[Point, str]]) -> None:
        listed = "\n".join(f"  {point.run_dir}: {reason}" for point, reason in failed)
        super().__init__(
            f"{len(failed)} of {total} runs failed:\n{listed}\n"
            "The same command runs these again and skips the finished ones."
        )


def flags_first(argv: list[str]) -> list[str]:
    """Move flags in front of overrides: `a=1 -m b=2` becomes `-m a=1 b=2`.

    argparse in Hydra 1.3 refuses overrides on both sides of a flag (hydra issue 3053).
    """
    flags: list[str] = []
    words: list[str] = []
    long = ("--config-name", "--config-path", "--config-dir", "--cfg", "--info", "--package", "--experimental-rerun")
    takes_value = (*long, "-cn", "-cp", "-cd", "-c", "-i", "-p")
    remaining = iter(argv)
    for word in remaining:
        if not word.startswith("-"):
            words.append(word)
            continue
        flags.append(word)
        if word in takes_value:
            flags += [value for value in [next(remaining, None)] if value is not None]
    return flags + words


def with_swept_axes(words: Sequence[str]) -> list[str]:
    """The words of a sweep, where a value of an axis that is swept becomes a sweep over one value: with
    aqn=exp,linear, aqn.stages=5 becomes aqn.stages=choice(5).

    Hydra composes the grid with one option of each axis, its default, which need not have the key.
    """
    pairs = [word.partition("=") for word in words]
    swept = {axis for axis, _, value in pairs if (CONF_DIR / axis).is_dir() and "," in value}
    return [
        f"{key}=choice({value})" if key.partition(".")[0] in swept and "." in key and is_one_value(word) else word
        for word, (key, _, value) in zip(words, pairs, strict=True)
    ]


def is_one_value(word: str) -> bool:
    """Whether a word of the command line sets one value, which is not empty, and is no sweep over several."""
    try:
        return not word.endswith("=") and not OverridesParser.create().parse_override(word).is_sweep_override()
    except OverrideParseException:
        return False


def check_single(argv: list[str]) -> Point | None:
    """Check a single run before Hydra creates its folder. None for a sweep, which the launcher checks, and without run.

    Raises ConfigError, or RunLocked if another process is running it.
    """
    parsed, unknown = get_args_parser().parse_known_args(flags_first(argv))
    require(
        not unknown,
        f"{' '.join(unknown)}: no such flag. An option is a word KEY=VALUE, such as steps=5; --help lists the flags",
    )
    given = {key: value for key, value in vars(parsed).items() if value}
    require(not {"multirun", "cfg"} <= given.keys(), "--cfg shows the config of one run: leave -m out")
    if "multirun" in given:
        return None
    words = given.get("overrides", [])
    if given.keys() - {"overrides", "run"}:  # Hydra prints something
        Composer().tree(words)
        return None
    point = check_point(Composer(), words)
    if not point.finished:
        refuse_locked(point.run_dir)
    return point


def tell_finished(run_dir: Path) -> None:
    """Print the result of a run that is complete, as the run itself did."""
    from qerl_bench.studies.tables.terminal import places, render, summary

    print(f"finished before: {run_dir} (delete the folder to run it again)", file=sys.stderr)
    print(render(summary([run_dir])), *places(run_dir), sep="\n")


def warn_of_single_point(hydra: HydraConf) -> None:
    """Warn if one run was started of a study that sweeps over keys which the command line does not set."""
    given = {word.lstrip("+~").partition("=")[0] for word in hydra.overrides.task}
    unset = [str(key) for key in hydra.sweeper.params or {} if key not in given]
    if unset:
        log.warning("this is one run of an experiment that sweeps over %s; -m runs all points", ", ".join(unset))


def check(cfg: DictConfig) -> Experiment:
    """Build the specs of a composed config and check that all they need is there. Raises ConfigError."""
    experiment = build(cfg)
    experiment.engine.check(experiment.device, experiment.quant)
    experiment.task.check()
    if not experiment.algo.on_policy:
        experiment.task.demonstrations(step=1, count=1, seed=experiment.seed)  # a task may have none
    experiment.check_model()
    experiment.eval.check(experiment.task)
    experiment.logger.check()
    check_run_dir(experiment.run_dir, cfg)
    return experiment


def check_points(job_overrides: Sequence[Sequence[str]]) -> list[Point]:
    """Compose and check every point of a sweep. Raises ConfigError naming the first point that cannot run.

    A point whose folder is damaged does not keep the others from running.
    """
    points: dict[str, Point] = {}
    composer = Composer()
    for overrides in job_overrides:
        try:
            point = check_point(composer, overrides, keep_damaged=True)
        except ConfigError as error:
            raise ConfigError(f"{' '.join(overrides)}: {error}") from error
        if point.name in points:
            raise ConfigError(f"{' '.join(overrides)} and {' '.join(points[point.name].overrides)} are the same run")
        points[point.name] = point
    return list(points.values())


def check_point(composer: Composer, overrides: Sequence[str], keep_damaged: bool = False) -> Point:
    """Compose and check one point. A finished one needs no more than the config that it was made with.

    Raises ConfigError; what is damaged is noted in the point instead, if `keep_damaged`.
    """
    tree = composer.tree(overrides)
    name, run_dir = str(tree["name"]), Path(str(tree["root"]), "runs", str(tree["name"]))
    finished, damage = is_finished(run_dir), None
    try:
        if finished:
            check_run_dir(run_dir, tree)
        else:
            check(OmegaConf.create(tree))
    except RunDamaged as error:
        if not keep_damaged:
            raise
        damage = str(error)
    return Point(list(overrides), name, run_dir, finished and damage is None, damage)
