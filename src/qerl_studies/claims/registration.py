"""A claim that was fixed before its data: a copy of its file, what was promised, the time, and a hash of all that.

    STUDY/claim/NAME.yaml     the claim; beside it copies of the files that it takes values from
    STUDY/registered.json     measure, margin, contrasts, units and looks, the time, the hash of the claim, and the seal

The seal is a hash of the rest of registered.json. Whoever changes a file and its seal alike is found only by a copy of
the seal elsewhere: in a commit, a pull request, a thread. So the command prints it, and `check` does too.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qerl_core.checks import ConfigError, require
from qerl_core.options.names import layer_files, layers
from qerl_core.process.installation import CONF_DIR
from qerl_core.rundir.read_files import read_object, read_yaml
from qerl_core.sweeps.status import runs_below
from qerl_studies.claims.read import GROUP, read_claim
from qerl_studies.runs.load import Run
from qerl_studies.runs.parse import first_names
from qerl_studies.runs.settings import unit_count

REGISTERED = "registered.json"
REMEDY = "A claim that changed is another claim: register it anew, and cite it for runs that come later"
MOST_UNITS = 10_000


@dataclass(frozen=True)
class Registration:
    """What was fixed. `claim` is its name, `sha256` of its content with all defaults; `looks` are numbers of units."""

    claim: str
    title: str
    sha256: str
    expected: str
    measure: str
    margin: str
    contrasts: tuple[str, ...]
    units: int
    looks: tuple[int, ...]
    date: str  # in UTC: a day, which earlier versions kept, or a second

    @property
    def seal(self) -> str:
        """Of everything else, by which others cite it."""
        return _hash(asdict(self))


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def content_hash(file: Path) -> str:
    """Of what a claim says, with the values that it takes from others: comments and the order of keys do not count.
    Raises ConfigError for a file that is missing."""
    try:
        return _hash(layers(_folders(file), GROUP, file.stem))
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: defaults names {error.filename}, which is missing. {REMEDY}") from error


def register(file: Path, units: int, looks: Sequence[int], out: Path) -> Registration:
    """Write both files to `out`. Raises ConfigError for a wrong claim, for looks that are not in order or beyond the
    units, and if `out` has a registration or runs already.
    """
    require(file.is_file(), f"there is no file {file}: give claim/NAME.yaml of a folder of yours")
    require(file.suffix == ".yaml", f"{file} is no claim: give claim/NAME.yaml of a folder of yours")
    require(
        file.parent.name == GROUP,
        f"{file} must lie in a folder that is called {GROUP}, as for --config-dir: mine/{GROUP}/{file.name}",
    )
    require(1 < units <= MOST_UNITS, f"units must be from 2 to {MOST_UNITS:,}, got {units}")
    require(
        [*looks] == sorted({*looks}) and all(1 < look <= units for look in looks) and looks[-1:] == [units],
        f"looks must be numbers of units in order, the last of them units={units}, got {', '.join(map(str, looks))}",
    )
    require(not (out / REGISTERED).exists(), f"{out / REGISTERED} is there already. {REMEDY}")
    held = [name for name in ("data", "metrics.jsonl", "reported.csv", "tidy.parquet") if (out / name).exists()]
    held += [str(run.relative_to(out)) for run in runs_below(out) if run != out][:1]
    require(
        not held,
        f"{out} has {' and '.join(held)} already: a claim is registered before its runs, in a folder without any",
    )
    claim = read_claim(_folders(file), file.stem)
    made = Registration(
        file.stem,
        claim.title,
        content_hash(file),
        claim.expected,
        claim.measure.name,
        claim.measure.size_text(claim.measure.margin),
        tuple(one.label for one in claim.contrasts if one.votes),
        units,
        tuple(looks),
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    _copy(files_of(file), out)
    (out / REGISTERED).write_text(json.dumps(asdict(made) | {"seal": made.seal}, indent=1) + "\n")
    return made


def files_of(file: Path) -> dict[str, Path]:
    """The file of a claim, and those that it takes values from, by their places in a folder of options: what lies
    beside it goes before what is in conf/, which later versions may change. Raises ConfigError for one elsewhere."""
    folders = _folders(file)
    found: dict[str, Path] = {}
    for one in layer_files(folders, GROUP, file.stem):
        roots = [folder for folder in folders if one.resolve().is_relative_to((folder / GROUP).resolve())]
        require(bool(roots), f"{file}: its defaults lead to {one}, outside of {file.parent}")
        found[one.resolve().relative_to(roots[0].resolve()).as_posix()] = one
    return found


def _folders(file: Path) -> list[Path]:
    return [file.parent.parent, CONF_DIR]


def _copy(files: Mapping[str, Path], out: Path) -> None:
    for name, file in files.items():
        copy = out / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if copy.resolve() != file.resolve():
            shutil.copyfile(file, copy)


def carry(source: Path, out: Path) -> None:
    """Copy a registration with its claim from one folder of a study to another, if it has one: as it was sealed, for
    `check_registration` of `out`. Raises ConfigError for one that is damaged, and if `out` has another."""
    if not (source / REGISTERED).is_file():
        return
    made = read_registration(source)
    known = read_registration(out) if (out / REGISTERED).is_file() else made
    require(known == made, f"{out / REGISTERED} and {source / REGISTERED} are of two claims: leave one out")
    _copy(files_of(claim_file(source, made)) | {REGISTERED: source / REGISTERED}, out)


def claim_file(folder: Path, made: Registration) -> Path:
    """The file of a registered claim. Raises ConfigError if it is not there or has another content; the folder may come
    from anybody."""
    file = folder / GROUP / f"{made.claim}.yaml"
    require(
        file.parent.parent == folder and file.is_file(), f"{file} is missing, which {REGISTERED} is about. {REMEDY}"
    )
    for one in sorted((folder / GROUP).rglob("*.yaml")):
        require(one.resolve().is_relative_to(folder.resolve()), f"{one} is a link to a place outside of {folder}")
        read_yaml(one)
    require(content_hash(file) == made.sha256, f"{file} was changed after it was registered on {made.date}. {REMEDY}")
    return file


def registered_files(folder: Path) -> list[str]:
    """The names of the files of a registration within `folder`; none without one."""
    if not (folder / REGISTERED).is_file():
        return []
    named = files_of(claim_file(folder, read_registration(folder)))
    return [REGISTERED, *(name for name in named if (folder / name).is_file())]


def read_registration(folder: Path) -> Registration:
    """Raises ConfigError for entries that are missing, or that do not have the seal."""
    where = folder / REGISTERED
    content = read_object(where, REMEDY)
    keys = {*Registration.__dataclass_fields__, "seal"}
    require({*content} == keys, f"{where} must have exactly the keys {', '.join(sorted(keys))}. {REMEDY}")
    seal = content.pop("seal")
    lists = all(isinstance(content[key], list) for key in ("contrasts", "looks"))
    require(
        lists and type(content["units"]) is int, f"{where}: contrasts, looks or units are of another kind. {REMEDY}"
    )
    texts: dict[str, Any] = content | {key: tuple(content[key]) for key in ("contrasts", "looks")}
    read = Registration(**texts)
    require(read.seal == seal, f"{where} was changed after it was written: its seal is of other content. {REMEDY}")
    return read


def check_registration(folder: Path, runs: Sequence[Run]) -> str:
    """What was registered, in words, with its seal. Raises ConfigError if the claim beside it has another content, or
    if a run began before."""
    made = read_registration(folder)
    claim_file(folder, made)
    since = datetime.datetime.fromisoformat(made.date).replace(tzinfo=datetime.UTC).timestamp()
    early = sorted(run.name for run in runs if run.done.get("started", since) < since)
    require(not early, f"{first_names(early)} began before the registration of {made.date}")
    unknown = sum("started" not in run.done for run in runs)
    units = unit_count(runs) if runs else 0
    reached = [look for look in made.looks if look <= units]
    told = f"registered on {made.date}: {made.title}, margin {made.margin}, seal {made.seal[:16]}"
    told += f"; {units} of {made.units} units, " + (f"look at {reached[-1]} reached" if reached else "no look reached")
    return told + (f"; when {unknown} runs began is not known" if unknown else "")
