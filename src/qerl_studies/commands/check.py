"""Check published studies: whether all files are there and as they were written, and all runs complete.

    qerl-bench check community          # every study in the folder
    qerl-bench check FOLDER ...

What is looked at: files and their seals (SHA-256 in croissant.json), fingerprints and configs, finished runs with a
number for every step and the evaluation after the last, versions of code and libraries, licence and author, and paths
or keys that should not be there. Of a study that others reported: that its table can be read. Of a registered claim:
that it is the one that was registered, before the runs. Says what is wrong with each study; exit code 2 if anything is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qerl_core.checks import ConfigError, require
from qerl_core.process.arguments import KeyValueParser
from qerl_core.rundir.checksums import digest
from qerl_core.rundir.read_files import read_object
from qerl_studies.claims.registration import REGISTERED, check_registration
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
    if any((folder / name).is_file() for name in (SETTINGS, CROISSANT, REPORTED, REGISTERED)):
        return [folder]
    inside = sorted(path for path in folder.iterdir() if path.is_dir())
    require(bool(inside), f"{folder} holds no published study. To make one: qerl-bench publish RUNS out={folder}/NAME")
    return inside


def check_study(folder: Path) -> str:
    """What the study has, in words. Raises ConfigError, with the remedy, for the first thing that is wrong."""
    reported = is_reported(folder)
    told = _of_others(folder) if reported else ""
    if (folder / REGISTERED).is_file():
        runs = load_runs([folder], mixed_code=True) if reported or is_study(folder) else []
        told = "; ".join(filter(None, (told, check_registration(folder, runs))))
        if not is_study(folder):
            return f"{told}; no runs yet"
    return told if reported else "; ".join(filter(None, (_published(folder), told)))


def _of_others(folder: Path) -> str:
    """What a reported study has. Raises ConfigError for a table that cannot be read, and for private things."""
    check_private(folder, Private("", ""))
    runs = load_runs([folder])
    left_out = sum(not run.finished for run in runs)
    arms = {run.option("arm.name") for run in runs}
    return f"{len(runs)} runs of {len(arms)} arms, reported" + (f", {left_out} of them not judged" if left_out else "")


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
    return f"{len(runs)} runs of {settings} settings, complete"


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
    require(run.finished, f"{run.name} is not finished. Finish it with the command that began it. {AGAIN}")
    steps = run.option("steps")
    lacking = sorted(set(range(1, steps + 1)) - {*run.series("train", "loss").index})
    require(
        not lacking, f"{run.name} has no loss of {len(lacking)} of its {steps} steps, the first {lacking[:1]}. {AGAIN}"
    )
    evaluated = run.metrics.loc[run.metrics["kind"] == "eval", "step"].max()
    require(
        run.option("eval.name") == "none" or evaluated == steps,
        f"{run.name} has no evaluation after its last step, {steps}. {AGAIN}",
    )
    packages = run.environment.get("packages", {})
    unknown = [name for name in NEEDED if not packages.get(name)]
    unknown += [key for key in ("code", "device") if not run.environment.get(key)]
    require(
        not unknown,
        f"{run.name} does not say which version of {first_names(unknown)} it was made with (env.json). Run it again "
        "with a version of QeRL-Bench that does",
    )
