"""Check studies, published or in sessions: whether all files are there and as they were written, and all runs complete.

    qerl-bench check community          # every study in the folder
    qerl-bench check FOLDER ...
    qerl-bench check studies/real-2026/05b     # a study in sessions, before it is published

What is looked at: files and their seals (SHA-256 in croissant.json), fingerprints and configs, finished runs with a
number for every step and the evaluation after the last, versions of code and libraries, licence and author, paths or
keys that should not be there. Of a study with a protocol: whether git has it, and the primary contrasts of study.yaml
as they are, from before its first run began. Of a study that others reported: that its table can be read. Of a
registered claim: that it is the one that was registered, before the runs. Says what is wrong with each study; exit
code 2 if anything is.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from qerl_core.checks import ConfigError, require
from qerl_core.process.arguments import KeyValueParser
from qerl_core.rundir.checkout import git_in
from qerl_core.rundir.checksums import digest
from qerl_core.rundir.read_files import read_object
from qerl_studies.claims.registration import REGISTERED, check_registration
from qerl_studies.design.protocol import commits_of, first_start, protocol_commit, protocol_commits, protocol_of
from qerl_studies.design.sessions import read_study as read_sessions
from qerl_studies.publish.crate import CRATE
from qerl_studies.publish.croissant import CROISSANT
from qerl_studies.publish.dataset import CARD
from qerl_studies.publish.folder import check_private
from qerl_studies.runs.committed import SETTINGS, TIDY, is_study, read_study
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.environments import LIBRARIES
from qerl_studies.runs.load import Run
from qerl_studies.runs.parse import first_names
from qerl_studies.runs.private import Private
from qerl_studies.runs.reported import REPORTED, is_reported

DESIGN, DATA = "study.yaml", "data"
FILES = (CARD, SETTINGS, TIDY, CROISSANT, CRATE)
AGAIN = "Publish it again: qerl-bench publish RUNS out=DIR"
NEEDED = tuple(name for name in LIBRARIES if name != "bitsandbytes")  # a run may do without


def main(words: list[str]) -> None:
    parser = KeyValueParser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="published studies, or folders that hold some")
    refusals = []
    for study in [study for folder in parser.parse_args(words).folders for study in studies_in(folder)]:
        try:
            print(f"{study}: {check_study(study)}")
        except ConfigError as error:
            refusals.append(f"{study}: {error}")
    require(not refusals, "\n".join(refusals))


def studies_in(folder: Path) -> list[Path]:
    """`folder` itself if it is a published study, else the folders in it, each of which must be one."""
    require(folder.is_dir(), f"{folder} is not a folder: give a published study, or a folder that holds some")
    if any((folder / name).is_file() for name in (SETTINGS, CROISSANT, REPORTED, REGISTERED, DESIGN)):
        return [folder]
    inside = sorted(path for path in folder.iterdir() if path.is_dir())
    require(
        bool(inside), f"no study is in {folder}. To make one: qerl-bench publish RUNS out={quote(str(folder))}/NAME"
    )
    return inside


def check_study(folder: Path) -> str:
    """What the study has, in words. Raises ConfigError, with the remedy, for the first thing that is wrong."""
    told = ""
    if (folder / REGISTERED).is_file():
        runs = _runs(folder)
        told = check_registration(folder, runs)
        if not runs:
            return f"{told}; no runs yet"
        if not (is_study(folder) or is_reported(folder) or _has_sessions(folder)):
            return f"{told}; {len(runs)} runs in {DATA}/, not published"
    found = _of_others if is_reported(folder) else _in_sessions if _has_sessions(folder) else _published
    return "; ".join(filter(None, (found(folder), told)))


def _has_sessions(folder: Path) -> bool:
    return (folder / DESIGN).is_file() and not (folder / CROISSANT).is_file()


def _runs(folder: Path) -> Sequence[Run]:
    """The runs of a registered claim, of which there may be none yet."""
    if _has_sessions(folder):
        return [*read_sessions(folder).runs.values()] if (folder / DATA).is_dir() or is_study(folder) else []
    found = next((one for one in (folder, folder / DATA) if is_study(one)), None)
    return load_runs([found], mixed_code=True) if found else []


def _of_others(folder: Path) -> str:
    """A reported study. Raises ConfigError for a table that cannot be read, and for private things."""
    check_private(folder, Private("", ""))
    runs = load_runs([folder])
    left_out = sum(not run.finished for run in runs)
    arms = {run.option("arm.name") for run in runs}
    told = f", {left_out} of them not judged" if left_out else ""
    return f"{len(runs)} runs of {len(arms)} arms, reported{told}"


def _published(folder: Path) -> str:
    missing = [name for name in FILES if not (folder / name).is_file()]
    require(not missing, f"{', '.join(missing)} is missing. {AGAIN}")
    described = read_object(folder / CROISSANT, AGAIN)
    _check_seals(folder, described)
    for key in ("license", "creator", "description", "datePublished"):
        require(bool(described.get(key)), f"{CROISSANT} states no {key}. {AGAIN} license=... author=...")
    check_private(folder, Private("", ""))
    read_study(folder)  # raises ConfigError unless fingerprints and configs agree
    runs = load_runs([folder])
    require(bool(runs), f"it holds no run. {AGAIN}")
    for run in runs:
        _check_run(run)
    settings = len({run.setting_items for run in runs})
    return f"{len(runs)} runs of {settings} settings, complete{_check_order(folder, runs)}"


def _in_sessions(folder: Path) -> str:
    """The same of a study in sessions, which is not published yet: no seals, and of training what it keeps."""
    study = read_sessions(folder)
    for session in {run.path.parent for run in study.runs.values()}:
        check_private(session, Private("", ""))
    runs = [*study.runs.values()]
    for run in runs:
        _check_end(run)
    arms = len(study.arms)
    return f"{len(runs)} runs of {arms} arms, finished{_check_order(folder, runs)}"


def _check_order(folder: Path, runs: Sequence[Run]) -> str:
    """Which commit of the protocol the first run began after; what cannot be told is said."""
    file, commits, began = protocol_of(folder), protocol_commits(folder), first_start(runs)
    if file is None:
        return ""
    if not commits:
        return f"; git does not know {file.name}, or its history is cut off"
    if began is None:
        return f"; {file.name} is there, and no run says when it began"
    held, since = protocol_commit(folder, began), _when(commits[0][1])
    require(
        held is not None,
        f"{file} came on {since}, in {commits[0][0][:8]}, and the first run began on {_when(began)}: nothing shows "
        "that it was written before its data. Say so on its page, or leave the protocol out",
    )
    _check_contrasts(folder / DESIGN, began)
    return f"; {file.name} of {str(held)[:8]} before the first run, {_when(began)}"


def _check_contrasts(design: Path, began: float) -> None:
    """The `primary` of study.yaml is what it was when the first run began."""
    before = [commit for commit, when in commits_of(design) if when <= began] if design.is_file() else []
    text = git_in(design.parent, "show", f"{before[-1]}:./{design.name}") if before else None
    then, now = (yaml.safe_load(one or "") or {} for one in (text, design.read_text() if text else ""))
    require(
        then.get("primary") == now.get("primary"),
        f"primary of {design} is {now.get('primary')} and was {then.get('primary')} when the first run began, in "
        f"{''.join(before[-1:])[:8]}: take back what was changed after there were data",
    )


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%d %B %Y, %H:%M:%S UTC")


def _check_seals(folder: Path, described: dict[str, Any]) -> None:
    files = described.get("distribution", [])
    sealed = {str(file.get("name")): file.get("sha256") for file in files if isinstance(file, dict)}
    unsealed = sorted({SETTINGS, TIDY} - sealed.keys())
    require(not unsealed, f"{CROISSANT} has no SHA-256 of {', '.join(unsealed)}. {AGAIN}")
    for name, expected in sealed.items():
        require(Path(name).name == name, f"{CROISSANT} names {name!r}, which is no file of the folder. {AGAIN}")
        require((folder / name).is_file(), f"{CROISSANT} names {name}, which is not there. {AGAIN}")
        require(digest(folder / name) == expected, f"{name} was changed after it was written (SHA-256). {AGAIN}")


def _check_run(run: Run) -> None:
    _check_end(run)
    steps = run.option("steps")
    lacking = sorted(set(range(1, steps + 1)) - {*run.series("train", "loss").index})
    require(
        not lacking, f"{run.name} has no loss of {len(lacking)} of its {steps} steps, the first {lacking[:1]}. {AGAIN}"
    )
    packages = run.environment.get("packages", {})
    unknown = [name for name in NEEDED if not packages.get(name)]
    unknown += [key for key in ("code", "device") if not run.environment.get(key)]
    require(
        not unknown,
        f"{run.name} does not say which version of {first_names(unknown)} it was made with (env.json). Run it again "
        "with a version of QeRL-Bench that does",
    )


def _check_end(run: Run) -> None:
    require(run.finished, f"{run.name} is not finished. Finish it with the command that began it. {AGAIN}")
    evaluated = run.metrics.loc[run.metrics["kind"] == "eval", "step"].max()
    require(
        run.option("eval.name") == "none" or evaluated == run.option("steps"),
        f"{run.name} has no evaluation after its last step, {run.option('steps')}. {AGAIN}",
    )
