"""What a program or a notebook calls: `from qerl_bench import run, load_runs, effects, claims, figure`.

Nothing is imported before it is called, and all but `run` need no torch. Bad input raises ConfigError.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qerl_core.checks import ConfigError, TrainingStopped, require

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from qerl_studies.runs.load import Run


def run(*words: str, quiet: bool = False) -> Run:
    """Make one run in a process of its own, or continue it, and read it; one that is finished is only read.

    `words` are those of `qerl-bench run`: run("quant=nvfp4", "aqn=exp", "root=out"). Its lines go to stderr; with
    `quiet` only steps, warnings and errors. Ctrl-C lets it save a checkpoint. Raises ConfigError for words that cannot
    work, before anything is written, and TrainingStopped, with the reason, for a run that ends early.
    """
    from qerl_bench.sweep.check import check_single
    from qerl_core.options import user_options
    from qerl_core.options.composer import register_resolvers
    from qerl_core.process.children import Child, wait
    from qerl_core.process.failure import reason_of, size_of
    from qerl_core.process.installation import run_command
    from qerl_core.rundir.refusals import CODE as REFUSED
    from qerl_studies.runs.load import load_run

    given = user_options.with_search_path(words)
    user_options.use(user_options.folders_in(given))
    register_resolvers()
    point = check_single(given)
    require(point is not None, "run makes one run: call it in a loop, or sweep with `qerl-bench run ... -m`")
    assert point is not None
    if not point.finished:
        log_size = size_of(point.run_dir / "run.log")
        code = wait(Child([*run_command(), *given, *(["-q"] if quiet else [])]))
        if code:
            reason = reason_of(point.run_dir, code, log_size)
            raise (ConfigError if code == REFUSED else TrainingStopped)(f"{point.name}: {reason}")
    return load_run(point.run_dir)


def load_runs(
    *folders: str | os.PathLike[str], without: Sequence[str] = (), mixed_code: bool = False, finished: bool = False
) -> list[Run]:
    """All runs at or below `folders`, of committed studies too, by name; runs/ without any.

    `without` are patterns of names to leave out. Raises ConfigError if there is no run, if one cannot be read, or if
    they cannot be compared: two of one name, or of several versions of the code unless `mixed_code`. With `finished`
    what is unfinished or damaged is left out in place of that, a printed line each; then the list may be empty.
    """
    from qerl_studies.design.looks import shown_runs
    from qerl_studies.runs.comparable import check_comparable
    from qerl_studies.runs.load import load_run

    places = [*map(Path, folders)] or [Path(os.environ.get("QERL_ROOT", "."), "runs")]
    runs = _finished(places, without) if finished else [*map(load_run, shown_runs(places, without))]
    check_comparable(runs, mixed_code)
    return runs


def _finished(places: Sequence[Path], without: Sequence[str]) -> list[Run]:
    from qerl_studies.design.looks import shown_runs
    from qerl_studies.runs.load import load_run

    runs: list[Run] = []
    try:
        paths = shown_runs(places, without)
    except ConfigError as error:  # no such folder, or no run in it
        print(error)
        paths = []
    for path in paths:
        try:
            require(load_run(path, metrics=False).finished, f"{path} is not finished; the same command continues it")
            runs.append(load_run(path))
        except ConfigError as error:
            print("left out:", error)
    print(f"{len(runs)} finished runs in {', '.join(map(str, places))}")
    return runs


def effects(runs: Sequence[Run]) -> pd.DataFrame:
    """What differs between the arms of finished runs, a row for each contrast and number (docs/how-to/python.md).

    Arms differ in one factor, and runs are compared within base model and seed. Accuracies are shares. `low` and `high`
    are a 95 % interval, not adjusted for how many rows one looks at, and NaN where nothing varied.
    """
    from qerl_studies.report.effect_table import effect_table

    return effect_table(_together(runs))


def claims(runs: Sequence[Run], papers: str = "qerl", everything: bool = False) -> pd.DataFrame:
    """What runs say about each claim of `papers`, a row for each contrast that votes, model and task.

    Claims without a run are left out, unless `everything`; p-values are adjusted for all of them in any case. Raises
    ConfigError for a family of claims that there is not.
    """
    from qerl_studies.claims.registry import QERL, families, shown_claims
    from qerl_studies.report.claim_table import claim_table

    require(papers in families(), f"there are no claims of papers={papers!r}: {', '.join(families())}")
    return claim_table(shown_claims() if papers == QERL else families()[papers], _together(runs), everything)


def figure(name: str, runs: Sequence[Run], also: Sequence[str] = (), style: str = "docs") -> Figure | pd.DataFrame:
    """The figure of this name, as `qerl-bench figure` draws it; of a name that is a table alone, the table.

    `also` are config keys in which the runs of a figure may differ too. A notebook shows what is returned; a figure
    has `savefig`. Raises ConfigError for an unknown name, and if the runs do not suffice.
    """
    from qerl_studies.figures.named import FIGURES
    from qerl_studies.figures.read import found_in
    from qerl_studies.figures.style import STYLES, use_style

    require(name in FIGURES, f"there is no figure {name!r}: {', '.join(FIGURES)}")
    require(style in STYLES, f"there is no style {style!r}: {', '.join(STYLES)}")
    use_style(style)
    named = FIGURES[name]
    found = found_in(named.read, _together(runs), Namespace(also=[*also]))
    if named.draw:
        return named.draw(found)
    assert named.table is not None
    return named.table(found).numbers


def _together(runs: Sequence[Run]) -> list[Run]:
    from qerl_studies.runs.comparable import check_comparable

    require(len(runs) > 0, "no run is given")
    check_comparable(runs, mixed_code=True)  # which load_runs asked
    return [*runs]
