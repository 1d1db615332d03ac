"""The command line: checks before any training, messages in words, and exit codes.

Whatever can be found wrong is refused before a file is written.
"""

from __future__ import annotations

import difflib
import logging
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra.conf import HydraConf
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qerl_bench.checks import ConfigError, TrainingStopped
from qerl_bench.config import CONF_DIR, Experiment, build, compose
from qerl_bench.renamed_keys import renamed, renamed_value
from qerl_bench.rundir import as_dict, check_run_dir, flat, is_finished

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

    def __init__(self, total: int, failed: Sequence[Point]) -> None:
        listed = "\n".join(f"  {point.run_dir}/run.log" for point in failed)
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


def preflight(argv: list[str]) -> None:
    """Check a single run before Hydra creates its folder. The launcher checks the points of a sweep."""
    if not any(word.startswith("-") for word in argv):
        check(compose(argv))


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
    experiment.eval.check(experiment.task)
    experiment.logger.check()
    check_run_dir(experiment.run_dir, cfg)
    return experiment


def check_points(job_overrides: Sequence[Sequence[str]]) -> list[Point]:
    """Compose and check every point of a sweep. Raises ConfigError naming the first point that cannot run."""
    points: dict[str, Point] = {}
    for overrides in job_overrides:
        try:
            experiment = check(compose(list(overrides)))
        except ConfigError as error:
            raise ConfigError(f"{' '.join(overrides)}: {error}") from error
        if experiment.name in points:
            raise ConfigError(
                f"{' '.join(overrides)} and {' '.join(points[experiment.name].overrides)} are the same run"
            )
        points[experiment.name] = Point(
            list(overrides), experiment.name, experiment.run_dir, is_finished(experiment.run_dir)
        )
    return list(points.values())


@contextmanager
def exit_in_words(stopped: str) -> Iterator[None]:
    """Exit with a message, not a traceback: code 2 for bad input, 1 for failed runs, 130 and `stopped` for Ctrl-C."""
    try:
        yield
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        message, code = explain(error), 2
    except (SweepFailed, TrainingStopped) as error:
        message, code = str(error), 1
    except KeyboardInterrupt:
        message, code = stopped, 130
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
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown is None:
        return "error: " + " ".join(text.split())
    key = unknown.group(1)
    if sentence := renamed(key):
        return f"error: {sentence}"
    group = key.split(".")[0]
    elsewhere = keys_of_group(group)
    if key in elsewhere:
        return f"error: the chosen {group} has no option {key}; it belongs to {group}={'|'.join(elsewhere[key])}"
    close = difflib.get_close_matches(key, [*known_keys(), *elsewhere], n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"error: there is no option {key}.{hint} All options: python src/run.py --cfg job"


def keys_of_group(group: str) -> dict[str, list[str]]:
    """Every dotted key of the files in a folder of conf/, with the options that have it; empty without the folder."""
    options: dict[str, list[str]] = defaultdict(list)
    for path in sorted((CONF_DIR / group).rglob("*.yaml")):
        tree = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(tree, dict)
        for key in flat({str(name): value for name, value in tree.items() if name not in ("_target_", "defaults")}):
            options[f"{group}.{key}"].append(str(path.relative_to(CONF_DIR / group).with_suffix("")))
    return options


def known_keys() -> list[str]:
    """Every dotted key of the default config, and the names of its groups."""
    tree = as_dict(compose())
    return [key for key in (*tree, *flat(tree)) if "_target_" not in key]
