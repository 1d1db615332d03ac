"""Reads a committed study: the part of many runs that fits into a repository, and from which its claims page follows.

    settings.json     the config keys that all runs share; those that vary, by fingerprint; the distinct environments;
                      for each run its fingerprint, seed, environment, base, duration and peak memory, and when it
                      started and ended (unix seconds; older runs do not say)
    tidy.parquet      the long table of metrics (load.tidy)
    answers.parquet   run, mode, question, step, and how many of `samples` answers were correct; only if any were kept.
                      Also how many were right by their last number (`lenient`), how many had an end (`finished`), and
                      the tokens of all; older studies lack these, and `lenient` is null for tasks without it

collect.py writes it, and load_runs reads its runs like run folders. Left out: rollouts, checkpoints, the command line,
and `root` and `logger` of the config, which decide no number and may be private. Runs that others made have other
files (reported.py), and are read here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet

from qerl_core.checks import ConfigError, require
from qerl_core.file_state import FileState, file_states
from qerl_core.options.fingerprint import fingerprint
from qerl_core.rundir.read_files import read_object
from qerl_core.rundir.recorded_types import FLAG, OBJECT, OBJECTS, WHOLE, require_environment, require_kinds
from qerl_core.rundir.recorded_types import TEXT as TEXT_KIND
from qerl_studies.runs.parse import first_names
from qerl_studies.runs.reported import ABOUT, REPORTED, is_reported
from qerl_studies.runs.reported_runs import parts_of

SETTINGS, TIDY, ANSWERS = "settings.json", "tidy.parquet", "answers.parquet"
TEXT = pa.dictionary(pa.int32(), pa.string())
ANSWERS_SCHEMA = pa.schema(
    {"run": TEXT, "mode": TEXT, "question": TEXT, "step": pa.int32()}
    | dict.fromkeys(("correct", "samples", "lenient", "finished"), pa.uint16())
    | {"tokens": pa.uint32()}
)
TIDY_COLUMNS = pa.schema(
    {"run": TEXT, "fingerprint": TEXT, "kind": TEXT, "step": pa.int64(), "metric": TEXT, "value": pa.float64()}
)
EVERY_STEP = "reward/mean"  # which each step of training has
LATER = ("lenient", "finished", "tokens")  # columns that older studies lack
# Config keys that decide no number and may be private; a run that is read again has these values instead.
NOT_KEPT = {"root": ".", "logger": {"_target_": "qerl_bench.logger.jsonl.LocalOnly", "name": "jsonl"}}
KEPT_OF_DONE = ("started", "ended", "wall_s", "energy_j", "peak_memory_gib")
REMEDY = "It is incomplete, or was edited. Collect it again: qerl-bench collect RUNS out="


OF_RUN = {"fingerprint": TEXT_KIND, "seed": WHOLE, "environment": WHOLE, "finished": FLAG}  # what each run has


@dataclass(frozen=True)
class CommittedStudy:
    """`configs` are by fingerprint; `runs`, `metrics` and `answers`, if kept, are by the name of the run."""

    path: Path
    configs: dict[str, dict[str, Any]]
    environments: list[dict[str, Any]]
    runs: dict[str, dict[str, Any]]
    metrics: dict[str, pd.DataFrame]
    answers: dict[str, pd.DataFrame]

    def config(self, name: str) -> dict[str, Any]:
        """The resolved config of one run, with the values of NOT_KEPT."""
        run = self.runs[name]
        return nested(self.configs[run["fingerprint"]]) | NOT_KEPT | {"name": name, "seed": run["seed"]}

    def environment(self, name: str) -> dict[str, Any]:
        """The env.json of one run without its private part."""
        run = self.runs[name]
        return self.environments[run["environment"]] | {key: run[key] for key in ("base",) if key in run}

    def done(self, name: str) -> dict[str, Any]:
        """The part of done.json that was kept; empty for an unfinished run."""
        run = self.runs[name]
        return {key: run[key] for key in KEPT_OF_DONE if run["finished"] and key in run}


def is_study(path: Path) -> bool:
    """Whether `path` is the folder of a committed study."""
    return (settings_file(path).is_file() and (path / TIDY).is_file()) or is_reported(path)


def settings_file(path: Path) -> Path:
    """settings.json of a study, or gzip of it, which a checkout has."""
    zipped = path / f"{SETTINGS}.gz"
    return zipped if zipped.is_file() else path / SETTINGS


def find_study(path: Path) -> tuple[CommittedStudy, str] | None:
    """The study that holds the run `path`, STUDY/NAME, and the name of the run; None if there is none."""
    for folder in path.parents:
        if is_study(folder):
            study, name = read_study(folder), path.relative_to(folder).as_posix()
            return (study, name) if name in study.runs else None
    return None


def read_study(path: Path) -> CommittedStudy:
    """Read a study, or return the one read before if its files have not changed.

    Raises ConfigError if its files do not belong together, or if a config does not have the fingerprint it is listed
    by.
    """
    files = (path / REPORTED, path / ABOUT) if is_reported(path) else (settings_file(path), path / TIDY, path / ANSWERS)
    files = [file for file in files if file.is_file()]
    return _read(path, tuple(file_states(files).items()))


@lru_cache(maxsize=8)
def _read(path: Path, _states: tuple[tuple[Path, FileState], ...]) -> CommittedStudy:
    if is_reported(path):
        parts = parts_of(path)
        return CommittedStudy(path, parts.configs, parts.environments, parts.runs, parts.metrics, parts.answers)
    content = read_object(settings_file(path), f"{REMEDY}{path}")
    missing = sorted({"config", "settings", "environment", "environments", "runs"} - content.keys())
    require(not missing, f"{path / SETTINGS} has no {', '.join(missing)}. {REMEDY}{path}")
    where, remedy = str(path / SETTINGS), f"{REMEDY}{path}"
    require_kinds(where, content, dict.fromkeys(("config", "settings", "environment", "runs"), OBJECT), remedy)
    require_kinds(where, content, {"environments": OBJECTS}, remedy)
    for part in ("settings", "runs"):
        require_kinds(f"{where}: {part}", content[part], dict.fromkeys(content[part], OBJECT), remedy)
    configs = {listed: content["config"] | varying for listed, varying in content["settings"].items()}
    for listed, config in configs.items():
        actual = fingerprint(nested(config))
        require(
            actual == listed,
            f"{where}: the config listed as {listed} has the fingerprint {actual}. {remedy}",
        )
    runs: dict[str, dict[str, Any]] = content["runs"]
    environments = [content["environment"] | varying for varying in content["environments"]]
    for environment in environments:
        require_environment(where, environment, remedy)
    for name, run in runs.items():
        require_kinds(f"{where}: {name}", run, OF_RUN, remedy)
    broken = [
        name
        for name, run in runs.items()
        if not run.keys() >= OF_RUN.keys()
        or run["fingerprint"] not in configs
        or run["environment"] not in range(len(environments))
    ]
    require(
        not broken,
        f"{where} lacks the setting, the environment or the seed of {first_names(broken)}. {remedy}",
    )
    steps = {name: configs[run["fingerprint"]].get("steps") for name, run in runs.items() if run["finished"]}
    return CommittedStudy(
        path, configs, environments, runs, _read_metrics(path, runs, steps), _read_answers(path, runs)
    )


def _read_metrics(path: Path, runs: Mapping[str, Any], steps: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """tidy.parquet cut into the tables of the runs, as parse.read_metrics makes them. `steps` are of finished runs."""
    frame = _read_columns(path / TIDY, TIDY_COLUMNS).unify_dictionaries().to_pandas()
    pairs = frame[["run", "fingerprint"]].drop_duplicates().astype(str).to_numpy().tolist()
    unknown = {name: listed for name, listed in pairs if runs.get(name, {}).get("fingerprint") != listed}
    require(
        not unknown,
        f"{path / SETTINGS} does not know {len(unknown)} runs of {TIDY}, or lists them under other fingerprints than "
        f"{first_names({*unknown.values()})}: {first_names(unknown)}. {REMEDY}{path}",
    )
    _require_once(path / TIDY, frame, ["run", "kind", "metric", "step"])
    _require_all_steps(path, frame, steps)
    metrics = {}
    for name, rows in frame.groupby("run", observed=True, sort=False).indices.items():
        part = frame.take(rows).reset_index(drop=True)
        kind, metric = (_used_categories(part[column].cat) for column in ("kind", "metric"))
        metrics[str(name)] = pd.DataFrame(
            {"kind": kind, "step": part["step"], "metric": metric, "value": part["value"]}
        )
    return metrics


def _require_once(file: Path, frame: Any, keys: list[str]) -> None:
    """Raise ConfigError unless each row has its own `keys`, and a step from 0 on."""
    twice = frame[frame.duplicated(keys)][keys].astype(str).to_numpy()
    require(not len(twice), f"{file} has {' '.join(twice[:1].ravel())} twice. {REMEDY}{file.parent}")
    require(bool((frame["step"] >= 0).all()), f"{file}: step is below 0. {REMEDY}{file.parent}")


def _require_all_steps(path: Path, frame: pd.DataFrame, steps: Mapping[str, Any]) -> None:
    """Raise ConfigError for a finished run that lacks a step, or the evaluation after the last one."""
    trained = _steps_by_run(frame[(frame["kind"] == "train") & (frame["metric"] == EVERY_STEP)])
    asked = _steps_by_run(frame[frame["kind"] == "eval"])
    written = {*frame["run"].unique()}
    lacking = [
        name
        for name, last in steps.items()
        if ((found := trained.get(name)) and (len(found), max(found)) != (last, last))
        or last not in asked.get(name, {last})
        or (trained and last and name not in written)
    ]
    require(not lacking, f"{path / TIDY} lacks steps of finished runs: {first_names(lacking)}. {REMEDY}{path}")


def _steps_by_run(frame: Any) -> dict[str, set[int]]:
    return {str(name): {*rows["step"].tolist()} for name, rows in frame.groupby("run", observed=True)}


def _used_categories(column: Any) -> pd.Categorical:
    """The column with only the categories that occur, in order of first appearance."""
    codes, used = pd.factorize(np.asarray(column.codes))
    return pd.Categorical.from_codes(codes, pd.Index([column.categories[code] for code in used], dtype="str"))


def _read_answers(path: Path, runs: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    if not (path / ANSWERS).is_file():
        return {}
    fields = schema_of(path / ANSWERS)
    plain = pa.schema([(field.name, pa.string() if field.type == TEXT else pa.int64()) for field in fields])
    frame = _read_columns(path / ANSWERS, plain).to_pandas()
    _require_once(path / ANSWERS, frame, ["run", "mode", "question", "step"])
    possible = frame["correct"].between(0, frame["samples"]) & (frame["samples"] > 0)
    require(bool(possible.all()), f"{path / ANSWERS}: correct must be from 0 to samples. {REMEDY}{path}")
    answers = {str(name): part.drop(columns="run") for name, part in frame.groupby("run", sort=False)}
    unknown = answers.keys() - runs.keys()
    require(
        not unknown,
        f"{path / ANSWERS} has answers of {len(unknown)} runs that {SETTINGS} does not know: {first_names(unknown)}. "
        f"{REMEDY}{path}",
    )
    return answers


def schema_of(answers: Path) -> pa.Schema:
    """ANSWERS_SCHEMA without what the file `answers` lacks because it is older."""
    has = {*_columns_of(answers)}
    return pa.schema([field for field in ANSWERS_SCHEMA if field.name in has or field.name not in LATER])


def _columns_of(path: Path) -> list[str]:
    try:
        return list(parquet.read_schema(path).names)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{path} is no Parquet file ({error}). {REMEDY}{path.parent}") from error


def _read_columns(path: Path, schema: pa.Schema) -> pa.Table:
    """The columns of `schema` in its types, whatever types the program that wrote the file has for the same values."""
    missing = sorted({*schema.names} - {*_columns_of(path)})
    require(not missing, f"{path} has no column {', '.join(missing)}. {REMEDY}{path.parent}")
    try:
        table = parquet.read_table(path, columns=schema.names)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is damaged ({error}). {REMEDY}{path.parent}") from error
    return pa.table([_as_type(path, table[field.name], field) for field in schema], schema=schema)


def _as_type(path: Path, column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    """A column in the type of `field`. Raises ConfigError if values are missing or would change."""
    may_miss = pa.types.is_floating(field.type) or field.name in LATER  # NaN is written as null
    require(may_miss or column.null_count == 0, f"{path}: {field.name} lacks values. {REMEDY}{path.parent}")
    try:
        if field.type == TEXT and column.type != TEXT:
            return column.cast(pa.string()).dictionary_encode()
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise ConfigError(
            f"{path}: {field.name} has values of the type {column.type}, not {field.type} ({error}). "
            f"{REMEDY}{path.parent}"
        ) from error


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of a mapping with dotted keys. Raises ConfigError if a key is both a value and the parent of others."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            require(isinstance(node, dict), f"{SETTINGS}: {key} lies below {parent}, which has a value")
        node[last] = value
    return tree
