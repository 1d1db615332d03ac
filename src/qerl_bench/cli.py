"""The command line: checks before any training, messages in words, and exit codes.

Whatever can be found wrong is refused before a file is written.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import signal
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qerl_bench.checks import ConfigError, TrainingStopped
from qerl_bench.config import CONF_DIR, Composer, Experiment, build
from qerl_bench.locks import RunLocked
from qerl_bench.memory import shortage
from qerl_bench.renamed_keys import renamed, renamed_value
from qerl_bench.rundir import check_run_dir, flat, is_finished, refuse_locked
from qerl_bench.storage import failure
from qerl_bench.termination import Terminated, terminations_raise

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    overrides: list[str]
    name: str
    run_dir: Path
    finished: bool


class SweepFailed(Exception):
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


def is_to_do(argv: list[str]) -> bool:
    """Check a single run before Hydra creates its folder. False if it is finished. The launcher checks sweeps."""
    given = {key: value for key, value in vars(get_args_parser().parse_args(flags_first(argv))).items() if value}
    if given.keys() - {"overrides", "run"}:
        return True
    point = check_point(Composer(), given.get("overrides", []))
    if point.finished:
        print(finished_before(point.run_dir))
    else:
        refuse_locked(point.run_dir)
    return not point.finished


def finished_before(run_dir: Path) -> str:
    """What is said of a run that is complete, with its table."""
    from qerl_bench.study.table import render, summary

    return f"finished before: {run_dir} (delete the folder to run it again)\n{render(summary([run_dir]))}"


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
    experiment.check_model()
    experiment.eval.check(experiment.task)
    experiment.logger.check()
    check_run_dir(experiment.run_dir, cfg)
    return experiment


def check_points(job_overrides: Sequence[Sequence[str]]) -> list[Point]:
    """Compose and check every point of a sweep. Raises ConfigError naming the first point that cannot run."""
    points: dict[str, Point] = {}
    composer = Composer()
    for overrides in job_overrides:
        try:
            point = check_point(composer, overrides)
        except ConfigError as error:
            raise ConfigError(f"{' '.join(overrides)}: {error}") from error
        if point.name in points:
            raise ConfigError(f"{' '.join(overrides)} and {' '.join(points[point.name].overrides)} are the same run")
        points[point.name] = point
    return list(points.values())


def check_point(composer: Composer, overrides: Sequence[str]) -> Point:
    """Compose and check one point. A finished one needs no more than the config that it was made with."""
    tree = composer.tree(overrides)
    name, run_dir = str(tree["name"]), Path(str(tree["root"]), "runs", str(tree["name"]))
    finished = is_finished(run_dir)
    if finished:
        check_run_dir(run_dir, tree)
    else:
        check(OmegaConf.create(tree))
    return Point(list(overrides), name, run_dir, finished)


@contextmanager
def exit_in_words(stopped: str) -> Iterator[None]:
    """Exit with a message, not a traceback: code 2 for bad input, 1 for failed runs and disks.

    Ctrl-C gives `stopped` and code 130, SIGTERM 143, SIGHUP 129; a run of another process 75.
    """
    try:
        with terminations_raise():
            yield
    except RunLocked as error:
        message, code = explain(error), os.EX_TEMPFAIL
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        message, code = explain(error), 2
    except (SweepFailed, TrainingStopped) as error:
        message, code = str(error), 1
    except KeyboardInterrupt:
        message, code = stopped, 128 + signal.SIGINT
    except Terminated as error:
        message, code = f"{error}: {stopped}", 128 + error.signum
    except Exception as error:
        reason = failure(error) or shortage(error)
        if reason is None:
            raise
        message, code = f"error: {reason}. When that is solved, repeat the command: it continues", 1
    else:
        return
    print(message, file=sys.stderr)
    sys.exit(code)


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Print warnings as one line each, without the place in the code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_place, **_more: print(message, file=sys.stderr)
        yield


def explain(error: Exception) -> str:
    """One message for the terminal: Hydra's errors without its advice to append keys and without its search path."""
    text = str(error).split("\nConfig search path:")[0].strip()
    option = re.search(r"Could not find '(\w+)/([^']+)'", text)
    if option and (sentence := renamed_value(option[1], option[2])):
        return f"error: {sentence}"
    if unread := re.match(r"LexerNoViableAltException: (.*)", text):
        return f"error: cannot read {unread[1]}: a value with other signs needs quotes of its own, as in 'name=\"ü\"'"
    if lost := re.match(r"Interpolation key '([^']+)' not found", text):
        return f"error: there is no {lost[1]}, which another key refers to; leave ~ overrides out"
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown is None:
        return "error: " + " ".join(text.split())
    key = unknown.group(1)
    if sentence := renamed(key):
        return f"error: {sentence}"
    if key.startswith("model.template"):
        return f"error: {key} is not set yet, so add it with a plus: +model.template.KEYWORD=VALUE"
    group = key.split(".")[0]
    elsewhere = keys_of_group(group)
    if key in elsewhere:
        return f"error: the chosen {group} has no option {key}; it belongs to {group}={'|'.join(elsewhere[key])}"
    close = difflib.get_close_matches(key, [*known_keys(), *elsewhere], n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"error: there is no option {key}.{hint} All options: python src/run.py --cfg job"


def keys_of_group(group: str) -> dict[str, list[str]]:
    """Every dotted key of the files in a folder of conf/, with the options that have it; empty without the folder.

    Presets, which take their other values from an option of the same folder, are left out.
    """
    options: dict[str, list[str]] = defaultdict(list)
    for path in sorted((CONF_DIR / group).rglob("*.yaml")):
        tree = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(tree, dict)
        if any(isinstance(entry, str) for entry in tree.get("defaults", [])):
            continue
        for key in flat({str(name): value for name, value in tree.items() if name not in ("_target_", "defaults")}):
            options[f"{group}.{key}"].append(str(path.relative_to(CONF_DIR / group).with_suffix("")))
    return options


def known_keys() -> list[str]:
    """Every dotted key of the default config, and the names of its groups."""
    tree = Composer().tree([])
    return [key for key in (*tree, *flat(tree)) if "_target_" not in key]
