"""Make pages of a folder of runs, to look behind its verdicts: open index.html in a browser, no network needed.

    qerl-bench report runs/ out=report/
    qerl-bench report studies out=report/     # several studies: an index, a folder for each
    qerl-bench report runs/ watch=true             # again every half minute, until no run goes on
    qerl-bench report runs/ --config-dir mine      # with one's own claims, mine/claim/NAME.yaml

A study's page has the contrasts that are in its runs, curves by step, verdicts on the claims of QeRL, the effects
behind them, paired differences, noise as a dose, and all runs, with filters; each run that kept completions
(train.kept_groups) has a page of them, token by token. A study is a folder that holds runs, or a committed one, in one
session or several. Unfinished runs are listed.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from os.path import commonpath
from pathlib import Path

from qerl_core.checks import ConfigError
from qerl_core.process.arguments import printable
from qerl_core.rundir.durable import write_atomically
from qerl_core.sweeps.status import GOES_ON, statuses
from qerl_studies.claims.registry import with_own_folders
from qerl_studies.design.looks import shown_runs
from qerl_studies.design.sessions import read_study, study_of
from qerl_studies.report.page import page
from qerl_studies.report.run_page import has_samples, run_page
from qerl_studies.report.study_page import evaluated, study_page, verdict_counts
from qerl_studies.runs.comparable import check_comparable
from qerl_studies.runs.find import by_folder
from qerl_studies.runs.load import Run
from qerl_studies.runs.readable import readable, whole_run
from qerl_studies.runs.script import parser_for

WATCH_S = 30
INDEX = "index.html"


def main(arguments: list[str] | None = None) -> None:
    parser = parser_for(__doc__, out="report")
    parser.add_argument("--watch", action="store_true", help=f"again every {WATCH_S} s, until no run goes on")
    options = parser.parse_args(with_own_folders(arguments))
    folders: list[Path] = options.runs
    loaded: dict[Path, Run] = {}
    while True:
        live = options.watch and any(one.state in GOES_ON for one in statuses([f for f in folders if f.is_dir()]))
        try:
            written = report(options, WATCH_S if live else None, loaded)
        except ConfigError as error:
            if not live:
                raise
            print(printable(f"{time.strftime('%H:%M:%S')} not yet: {error}"), file=sys.stderr)
        else:
            print(f"{options.out / INDEX}  {written}", flush=True)
        if not live:
            return
        time.sleep(WATCH_S)


def report(options: Namespace, refresh_s: int | None, loaded: dict[Path, Run]) -> str:
    """Write the pages of all studies that `options` names; returns what was written, in words.

    `loaded` keeps finished runs from one call to the next. Raises ConfigError as `shown_runs`, `read_study` and
    `check_comparable` do, before a file is written, if no run can be read, and for damaged completions.
    """
    found, left_out = readable(shown_runs(options.runs, options.without), lambda path: (path, _load(path, loaded)))
    studies = by_study(dict(found))
    out: Path = options.out
    texts: dict[Path, str] = {}
    pages: list[tuple[str, Mapping[tuple[str, str], int], int]] = []
    samples: dict[Path, Path] = {}  # the page of a run
    for name, members in studies.items():
        folder = out if len(studies) == 1 else out / name
        runs = comparable(members, dict(found), options.mixed_code)
        folders = {path.parent for path in members}
        beside = {path.name: reason for path, reason in left_out.items() if path.parent in folders}
        viewers = {run.name: f"samples/{run.path.name}.html" for run in runs if has_samples(run.path)}
        title = name if len(studies) > 1 else _title(options.runs, members)
        results = evaluated(title, runs)
        texts[folder / INDEX] = study_page(title, runs, results, viewers, refresh_s, beside)
        pages.append((name, verdict_counts(results), len(runs)))
        targets = {run.path: folder / viewers[run.name] for run in runs if run.name in viewers}
        samples |= {run: target for run, target in targets.items() if not (refresh_s and _is_newer(target, run))}
    if len(studies) > 1:
        texts[out / INDEX] = page("index", pages=pages, refresh_s=refresh_s)
    for run, target in samples.items():
        _write(target, run_page(run, f"../{INDEX}"))
    for path, text in texts.items():
        _write(path, text)
    counted = "1 study" if len(studies) == 1 else f"{len(studies)} studies"
    return f"{counted}, {sum(count for _, _, count in pages)} runs, {len(samples)} pages of samples"


def by_study(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Runs by the folder of their study, named by its path below what all folders share: a/b is not a-b."""
    folders: dict[Path, list[Path]] = {}
    for folder, members in by_folder(paths).items():
        folders.setdefault(study_of(folder) or folder, []).extend(members)
    shared = Path(commonpath(folders))
    above = shared.parent if shared in folders else shared
    return {folder.relative_to(above).as_posix(): members for folder, members in folders.items()}


def comparable(members: Sequence[Path], found: Mapping[Path, Run], mixed_code: bool) -> list[Run]:
    """The runs of a study, checked. Sessions may be of several versions of the code: no pair of runs is from two."""
    in_sessions = _in_sessions(members)
    runs = [found[path] for path in members]
    if in_sessions is not None:
        chosen = {path.absolute() for path in members}
        runs = [run for run in read_study(in_sessions).runs.values() if run.path in chosen]
    check_comparable(runs, mixed_code or in_sessions is not None)
    return runs


def _in_sessions(members: Sequence[Path]) -> Path | None:
    return study_of(members[0].absolute().parent)


def _title(folders: Sequence[Path], members: Sequence[Path]) -> str:
    if study := _in_sessions(members):
        return study.name
    first = folders[0].absolute()
    return f"{first.parent.name}/{first.name}" if first.name == "runs" else first.name


def _load(path: Path, loaded: dict[Path, Run]) -> Run:
    if path not in loaded:
        run = whole_run(path)
        if not run.finished:
            return run
        loaded[path] = run
    return loaded[path]


def _is_newer(target: Path, run: Path) -> bool:
    """Whether a page was written after the last completion of the run, and after its end."""
    sources = [file for file in (run / "rollouts.jsonl", run / "samples.parquet") if file.exists()]
    return target.exists() and all(target.stat().st_mtime > file.stat().st_mtime for file in sources)


def _write(path: Path, text: str) -> None:
    """Replace a page as a whole: a browser may be reading it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
