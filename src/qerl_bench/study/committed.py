"""A committed study: of many runs what fits into a repository, and from which every number of a claims page follows.

    settings.json     the config keys that all runs share, then for each fingerprint those that vary; the distinct
                      environments; for each run its fingerprint, seed, environment, base, duration and peak memory
    tidy.parquet      the long table of metrics (load.tidy)
    answers.parquet   run, mode, question, step, and how many of `samples` answers were correct; only if any were kept

Its runs are read by load_runs like run folders. Left out: rollouts, checkpoints, the command line, and `root` and
`logger` of the config, which decide no number and may be private.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet

from qerl_bench.checks import require
from qerl_bench.config import fingerprint
from qerl_bench.study.parse import read_object
from qerl_bench.study.versions import named

if TYPE_CHECKING:
    from qerl_bench.study.load import Run

SETTINGS, TIDY, ANSWERS = "settings.json", "tidy.parquet", "answers.parquet"
TEXT = pa.dictionary(pa.int32(), pa.string())
ANSWERS_SCHEMA = pa.schema(
    {"run": TEXT, "mode": TEXT, "question": TEXT, "step": pa.int32(), "correct": pa.uint16(), "samples": pa.uint16()}
)
OF_A_RUN = ("name", "seed")  # config keys that stand with the run
# Config keys that decide no number and may be private; a run that is read again has these instead.
NOT_KEPT = {"root": ".", "logger": {"_target_": "qerl_bench.logger.jsonl.LocalOnly", "name": "jsonl"}}
PRIVATE = ("argv", "base")  # of env.json; the base stands with the run
KEPT_OF_DONE = ("wall_s", "peak_memory_gib")
REMEDY = "It was written by halves, or edited. Collect it again: python analysis/collect.py RUNS --out"


@dataclass(frozen=True)
class Study:
    """`configs` by fingerprint; `runs`, and where there are any `metrics` and `answers`, by the run's name."""

    path: Path
    configs: dict[str, dict[str, Any]]
    environments: list[dict[str, Any]]
    runs: dict[str, dict[str, Any]]
    metrics: dict[str, pd.DataFrame]
    answers: dict[str, pd.DataFrame]

    def config(self, name: str) -> dict[str, Any]:
        """The resolved config of one run, but for NOT_KEPT."""
        run = self.runs[name]
        return nested(self.configs[run["fingerprint"]]) | NOT_KEPT | {"name": name, "seed": run["seed"]}

    def environment(self, name: str) -> dict[str, Any]:
        """The env.json of one run, but for what is private."""
        run = self.runs[name]
        return self.environments[run["environment"]] | {key: run[key] for key in ("base",) if key in run}

    def done(self, name: str) -> dict[str, Any]:
        """Of done.json what was kept; empty for a run that is not finished."""
        run = self.runs[name]
        return {key: run[key] for key in KEPT_OF_DONE if run["finished"] and key in run}


def is_study(path: Path) -> bool:
    """Whether `path` is the folder of a committed study."""
    return (path / SETTINGS).is_file() and (path / TIDY).is_file()


def study_of(path: Path) -> tuple[Study, str] | None:
    """The study that holds the run `path`, STUDY/NAME, and the run's name; None if there is none."""
    for folder in path.parents:
        if is_study(folder):
            study, name = read_study(folder), path.relative_to(folder).as_posix()
            return (study, name) if name in study.runs else None
    return None


def read_study(path: Path) -> Study:
    """Read a study, once for as long as its files stay the same.

    Raises ConfigError, naming what is concerned, if its files do not belong together or a config is not that of its
    fingerprint.
    """
    files = [file for file in (path / SETTINGS, path / TIDY, path / ANSWERS) if file.is_file()]
    return _read(path, tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


@lru_cache(maxsize=8)
def _read(path: Path, _stamps: tuple[tuple[str, int, int], ...]) -> Study:
    content = read_object(path / SETTINGS)
    lacking = sorted({"config", "settings", "environment", "environments", "runs"} - content.keys())
    require(not lacking, f"{path / SETTINGS} has no {', '.join(lacking)}. {REMEDY} {path}")
    configs = {mark: content["config"] | varying for mark, varying in content["settings"].items()}
    for mark, config in configs.items():
        found = fingerprint(nested(config))
        require(
            found == mark,
            f"{path / SETTINGS}: the config under the fingerprint {mark} has the fingerprint {found}. {REMEDY} {path}",
        )
    runs: dict[str, dict[str, Any]] = content["runs"]
    environments = [content["environment"] | varying for varying in content["environments"]]
    astray = [
        name
        for name, run in runs.items()
        if not run.keys() >= {"fingerprint", "seed", "environment", "finished"}
        or run["fingerprint"] not in configs
        or run["environment"] >= len(environments)
    ]
    require(
        not astray,
        f"{path / SETTINGS} lacks the setting, the environment or the seed of {named(astray)}. {REMEDY} {path}",
    )
    metrics = _metrics(path, runs)
    return Study(path, configs, environments, runs, metrics, _answers(path, runs))


def _metrics(path: Path, runs: Mapping[str, dict[str, Any]]) -> dict[str, pd.DataFrame]:
    """tidy.parquet cut into the metrics of each run, in the order of its rows, as `parse.long` makes them."""
    table = _columns(path / TIDY, ("run", "fingerprint", "kind", "step", "metric", "value")).unify_dictionaries()
    frame = table.to_pandas()
    pairs = frame[["run", "fingerprint"]].drop_duplicates().astype(str).to_numpy().tolist()
    astray = [name for name, mark in pairs if name not in runs or runs[name]["fingerprint"] != mark]
    marks = sorted({mark for name, mark in pairs if name in astray})
    require(
        not astray,
        f"{path / SETTINGS} does not know {len(astray)} runs of {TIDY}, or has them under another fingerprint than "
        f"{', '.join(marks)}: {named(astray)}. {REMEDY} {path}",
    )
    found = {}
    for name, rows in frame.groupby("run", observed=True, sort=False).indices.items():
        part = {column: frame[column].take(rows).reset_index(drop=True) for column in ("step", "value")}
        kind, metric = (_used(frame[column].cat.codes.to_numpy()[rows], frame[column]) for column in ("kind", "metric"))
        found[str(name)] = pd.DataFrame({"kind": kind, "step": part["step"], "metric": metric, "value": part["value"]})
    return found


def _used(codes: np.ndarray, column: pd.Series) -> pd.Categorical:
    """Categories that occur, in order of their first row."""
    places, used = pd.factorize(codes)
    names = [column.cat.categories[code] for code in used]
    return pd.Categorical.from_codes(places, pd.Index(names, dtype="str"))


def _answers(path: Path, runs: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    if not (path / ANSWERS).is_file():
        return {}
    plain = pa.schema([(field.name, pa.string() if field.type == TEXT else pa.int64()) for field in ANSWERS_SCHEMA])
    frame = _columns(path / ANSWERS, ANSWERS_SCHEMA.names).cast(plain).to_pandas()
    found = {str(name): part.drop(columns="run") for name, part in frame.groupby("run", sort=False)}
    astray = [name for name in found if name not in runs]
    require(
        not astray,
        f"{path / ANSWERS} has answers of {len(astray)} runs that {SETTINGS} does not know: {named(astray)}. "
        f"{REMEDY} {path}",
    )
    return found


def _columns(path: Path, names: Iterable[str]) -> pa.Table:
    names = list(names)
    lacking = sorted(set(names) - set(parquet.read_schema(path).names))
    require(not lacking, f"{path} has no column {', '.join(lacking)}. {REMEDY} {path.parent}")
    return parquet.read_table(path, columns=names)


def describe(runs: Sequence[Run]) -> str:
    """The text of settings.json for `runs`, whose metrics are not looked at.

    Raises ConfigError for a config that could not be read again.
    """
    settings: dict[str, dict[str, Any]] = {}
    environments: list[dict[str, Any]] = []
    entries: dict[str, dict[str, Any]] = {}
    for run in sorted(runs, key=lambda run: run.name):
        mark, environment = fingerprint(run.config), _public(run.environment)
        if mark not in settings:
            kept = {key: part for key, part in run.config.items() if key not in (*OF_A_RUN, *NOT_KEPT)}
            settings[mark] = dotted(kept)
            require(
                fingerprint(nested(settings[mark])) == mark,
                f"the config of {run.path} cannot be kept: one of its keys has a dot in its name",
            )
        if environment not in environments:
            environments.append(environment)
        entries[run.name] = {
            "fingerprint": mark,
            "seed": run.option("seed"),
            "environment": environments.index(environment),
            "finished": run.finished,
            **({"base": run.environment["base"]} if run.environment.get("base") else {}),
            **{key: run.done[key] for key in KEPT_OF_DONE if key in run.done},
        }
    config, environment = _shared(list(settings.values())), _shared(environments)
    return text_of(
        {
            "config": config,
            "settings": {
                mark: {key: part for key, part in setting.items() if key not in config}
                for mark, setting in sorted(settings.items())
            },
            "environment": environment,
            "environments": [
                {key: part for key, part in one.items() if key not in environment} for one in environments
            ],
            "runs": entries,
        }
    )


def text_of(content: dict[str, Any]) -> str:
    """JSON for people: a line for each setting and each run."""
    sections = []
    for name, section in content.items():
        if name in ("settings", "runs"):
            lines = (f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in section.items())
            text = "{\n" + ",\n".join(lines) + "\n }"
        else:
            text = json.dumps(section, indent=1).replace("\n", "\n ")
        sections.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys; as `rundir.flat`, but an empty mapping is a value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= dotted(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """What `dotted` was made from."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def _shared(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries that all of `trees` have; 1 and 1.0 and true are three values."""
    first, *others = trees
    return {
        key: value
        for key, value in first.items()
        if all(key in other and json.dumps(other[key]) == json.dumps(value) for other in others)
    }


def _public(environment: Mapping[str, Any]) -> dict[str, Any]:
    """`environment` without the command line, and with the ends of paths to kernel tables instead of the paths."""
    kept = {key: value for key, value in environment.items() if key not in PRIVATE}
    if "kernel_tables" in kept:
        tables = kept["kernel_tables"].items()
        kept["kernel_tables"] = {"/".join(Path(table).parts[-2:]): digest for table, digest in tables}
    return kept
