"""Reads finished and running runs: the one way that figures, tables and notebooks read them.

A run is read from its own folder, or from a committed study (committed.py), which holds many. Nothing is parsed from
folder names or log text, and no service is asked. Left out: rollouts.jsonl, which few readers need.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from qerl_bench.checkpoints import is_finished
from qerl_bench.checks import ConfigError, require
from qerl_bench.fingerprint import canonical, fingerprint, flat, scientific
from qerl_bench.run_checks import check_records, saved
from qerl_bench.seals import DONE
from qerl_bench.stored import read_config, read_object, read_table
from qerl_bench.study import parse
from qerl_bench.study.committed import SETTINGS, TEXT, find_study, is_study, read_study
from qerl_bench.study.parse import first_names

Cell = tuple[str, int]  # base model and seed: runs of different settings are compared within a cell

OPTIONS = ("quant", "aqn", "quantizer", "algo", "lora_rank", "model", "task")
IDENTITY = ("run", *OPTIONS, "base", "seed", "lr", "fingerprint", "finished")
BASE_KEYS = frozenset(
    {"model.seed", "model.dither", "aqn.sigma_of_base"}
)  # config keys that select the base model, or belong to it
PLACE_KEYS = frozenset({"model.id", "model.revision"})  # where it came from, which its digest makes irrelevant
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "numpy")  # those that any run may compute with
MEASURED = ("kind", "step", "metric", "value")
NUMERIC = dict.fromkeys(("lora_rank", "seed", "step"), "int64") | {
    "lr": "float64",
    "value": "float64",
    "finished": "bool",
}
SCHEMA = pa.schema([(name, NUMERIC.get(name, TEXT)) for name in (*IDENTITY, *MEASURED)])  # the others are categories


@dataclass(frozen=True)
class Run:
    """One run. `metrics` is long: kind (category), step, metric (category), value; one row per number written.

    A null in metrics.jsonl stands for a non-finite number and is a row with value NaN; a number that was never written
    has no row. The time of a line, in unix seconds, is the metric `time`. `done` is empty while the run is unfinished,
    and `environment`, the content of env.json, is empty without that file.

    A run of a committed study has the path STUDY/NAME, which need not exist, the metrics that were kept, and its
    answers in `kept_answers`: mode, question, step, correct, samples.
    """

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    finished: bool
    done: dict[str, Any]
    metrics: pd.DataFrame
    kept_answers: pd.DataFrame | None = None

    @property
    def name(self) -> str:
        return self.option("name")

    @property
    def noise(self) -> str:
        return noise_of(self.config_items)

    @property
    def code(self) -> str:
        """The version of the code that made this run: the digest of its sources or, without it, the commit."""
        env = self.environment
        return str(env.get("code") or f"of commit {env.get('commit')}{' with changes' if env.get('dirty') else ''}")

    @property
    def device(self) -> str:
        """The name of the GPU, cpu, or unknown."""
        return str(self.environment.get("gpu") or self.environment.get("device", "unknown"))

    @property
    def base(self) -> str:
        """The base model: the digest of its weights, if env.json has one.

        Otherwise its config: id and revision of a hub model; seed, shape and warm-start task of one that is made from
        `model.seed`. The same seed can give other weights on another machine.
        """
        if recorded := self.environment.get("base"):
            return str(recorded)
        model = self.config.get("model", {})
        if "id" in model:
            return f"{model['id']}{'' if model.get('revision') is None else '@' + model['revision']}"
        made = {key: value for key, value in model.items() if key not in ("_target_", "name", "dtype", "lr")}
        made["task"] = self.option("task.name")
        return f"{self.option('model.name')}: {', '.join(f'{key}={value}' for key, value in made.items())}"

    @property
    def block(self) -> str:
        """Machine and library versions, which can change numbers, as far as they were recorded."""
        packages: dict[str, Any] = self.environment.get("packages", {})
        cpu = self.environment.get("cpu")
        versions = [f"{name} {packages[name]}" for name in LIBRARIES if packages.get(name)]
        if self.environment.get("gpu") and packages.get("triton"):
            versions.append(f"triton {packages['triton']}")
        return ", ".join([self.device, *([cpu] if cpu else []), *versions])

    @property
    def cell(self) -> Cell:
        return self.base, self.option("seed")

    @property
    def last_step(self) -> int:
        """The largest step of any line; 0 if there is none."""
        return max(self.metrics["step"].tolist(), default=0)

    def option(self, key: str) -> Any:
        """The value of a dotted config key; ConfigError if config.yaml has no such key."""
        value: Any = self.config
        for part in key.split("."):
            require(
                isinstance(value, dict) and part in value,
                f"{self.path / 'config.yaml'} has no key {key}: it must be the resolved config of a run, complete",
            )
            value = value[part]
        return value

    def identity(self) -> dict[str, Any]:
        """The columns IDENTITY of this run; full-parameter training has rank 0.

        The fingerprint covers every option but the seed, also those without a column.
        """
        return {
            "run": self.name,
            "quant": self.option("quant.name"),
            "aqn": self.option("aqn.name"),
            "quantizer": self.option("quantizer.name"),
            "algo": self.option("algo.name"),
            "lora_rank": 0 if self.option("lora.name") == "none" else self.option("lora.rank"),
            "model": self.option("model.name"),
            "task": self.option("task.name"),
            "base": self.base,
            "seed": self.option("seed"),
            "lr": float(self.option("optim.lr")),
            "fingerprint": fingerprint(self.config),
            "finished": self.finished,
        }

    @cached_property
    def config_items(self) -> dict[str, Any]:
        """The part of the config that decides numbers, with dotted keys, and the device; without base and seed."""
        items = flat(scientific(self.config))
        base_keys = BASE_KEYS | (PLACE_KEYS if self.environment.get("base") else frozenset())
        return {key: value for key, value in items.items() if key not in base_keys} | {"device": self.device}

    @cached_property
    def setting_items(self) -> frozenset[tuple[str, str]]:
        """`config_items` as a set; runs of one setting have equal ones."""
        return frozenset((key, repr(canonical(value))) for key, value in self.config_items.items())

    def series(self, kind: str, metric: str) -> pd.Series:
        """One metric indexed by step, in order of steps; empty if it was never written."""
        rows = self._rows.get((kind, metric), [])
        values, steps = (self.metrics[column].to_numpy()[rows] for column in ("value", "step"))
        order = np.argsort(steps, kind="stable")
        return pd.Series(values[order], index=steps[order], name=metric)

    @cached_property
    def _rows(self) -> dict[Any, np.ndarray]:
        """The row numbers of each metric."""
        return self.metrics.groupby(["kind", "metric"], observed=True, sort=False).indices

    def answers(self, mode: str) -> pd.DataFrame:
        """Share of correct answers to each held-out question, sorted: index question, a column for each evaluated step.

        `mode` is greedy or sampled. Raises ConfigError if answers were not kept, or if none are of this mode.
        """
        where = self.path / "samples.parquet"
        require(
            self._answers is not None,
            f"the held-out answers of {self.name} were not kept: {where} is missing (or, in a committed study, its "
            "rows of answers.parquet). Run it with eval=task",
        )
        assert self._answers is not None
        require(mode in self._answers, f"{where} has no answers with mode={mode}: leave the run out, or run it again")
        return self._answers[mode]

    @cached_property
    def _answers(self) -> dict[str, pd.DataFrame] | None:
        """What `answers` returns of each mode, made once: reports ask for it in many ways. None if none were kept."""
        rows = self.answer_counts()
        if rows is None:
            return None
        rows = rows.assign(share=rows["correct"] / rows["samples"])
        return {
            str(mode): of_mode.pivot(index="question", columns="step", values="share")
            for mode, of_mode in rows.groupby("mode", observed=True)
        }

    def answer_counts(self) -> pd.DataFrame | None:
        """Columns mode, question, step, correct and samples, both counts; None if no answers were kept.

        Raises ConfigError if samples.parquet lacks a column.
        """
        path = self.path / "samples.parquet"
        if self.kept_answers is not None or not path.is_file():
            return self.kept_answers
        rows = read_table(path, ["mode", "question", "step", "correct"]).astype({"correct": "int64"})
        return rows.groupby(["mode", "question", "step"])["correct"].agg(correct="sum", samples="count").reset_index()


def noise_of(items: Mapping[str, Any]) -> str:
    """The schedule in the config with these dotted keys, and where its noise is if not in norms: exp on adapters."""
    adapted = items["aqn.name"] != "none" and items.get("noise.where") == "adapters"
    return f"{items['aqn.name']}{' on adapters' if adapted else ''}"


def find_runs(root: str | os.PathLike[str]) -> list[Path]:
    """The runs at or below `root`, sorted: each folder with metrics.jsonl, or with config.yaml and checkpoints, and
    STUDY/NAME for each run of a committed study.

    Folders inside a run or a study are not searched. Raises ConfigError if there is no such folder, or no run.
    """
    root = Path(root)
    if find_study(root) is not None:
        return [root]
    require(root.is_dir(), f"{root} is not a folder: pass a run directory, or a folder that holds runs")
    runs = []
    for folder, subfolders, files in os.walk(root):
        if "metrics.jsonl" in files or ("config.yaml" in files and "checkpoints" in subfolders):
            runs.append(Path(folder))
            subfolders.clear()
        elif SETTINGS in files and is_study(Path(folder)):
            runs += [Path(folder) / name for name in read_study(Path(folder)).runs]
            subfolders.clear()
    require(
        bool(runs),
        f"no run in {root}: a run is a folder with config.yaml and metrics.jsonl. "
        "Pass the folder that holds them (runs/ by default), or start one with python src/run.py",
    )
    return sorted(runs)


def chosen_runs(folders: Iterable[str | os.PathLike[str]], without: Sequence[str] = ()) -> list[Path]:
    """Every run at or below `folders`, but those whose names fit a pattern of `without`.

    Raises ConfigError as `find_runs` and `leave_out`.
    """
    return leave_out([path for folder in folders for path in find_runs(folder)], without)


def by_folder(paths: Iterable[Path]) -> dict[Path, list[Path]]:
    """The runs by the folder of their study, which holds them or whose `data` does; each once."""
    folders: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(paths):
        folder = path.absolute().parent
        folders.setdefault(folder.parent if folder.name == "data" and is_study(folder) else folder, []).append(path)
    return folders


def leave_out(paths: Sequence[Path], without: Sequence[str]) -> list[Path]:
    """The folders whose names fit no pattern of `without`. Raises ConfigError for a pattern that fits none."""
    idle = [pattern for pattern in without if not fnmatch.filter([path.name for path in paths], pattern)]
    require(not idle, f"--except {' '.join(idle)} fits none of the {len(paths)} runs; * stands for anything: '*-s1-*'")
    return [path for path in paths if not any(fnmatch.fnmatchcase(path.name, pattern) for pattern in without)]


def load_runs(
    folders: Iterable[str | os.PathLike[str]], mixed_code: bool = False, without: Sequence[str] = ()
) -> list[Run]:
    """The runs of `chosen_runs`, for a comparison. Raises ConfigError as it does, `load_run` and `check_comparable`."""
    runs = [load_run(path) for path in chosen_runs(folders, without)]
    check_comparable(runs, mixed_code)
    return runs


def check_comparable(runs: Sequence[Run], mixed_code: bool) -> None:
    """Raise ConfigError, naming the runs, if two have one name, if two models do, if a metric has several definitions,
    or if the runs come from several versions of the code or of a user's own file, and `mixed_code` does not allow that.
    """
    _require_one_model_per_name(runs)
    by_name: dict[str, list[Run]] = {}
    by_code: dict[str, list[str]] = {}
    by_own_code: dict[str, dict[str, list[str]]] = {}
    by_definition: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
        by_code.setdefault(run.code, []).append(run.name)
        for metric, definition in run.environment.get("metrics", {}).items():
            by_definition.setdefault(metric, {}).setdefault(definition, []).append(run.name)
        for file, version in run.environment.get("own_code", {}).items():
            by_own_code.setdefault(file, {}).setdefault(version[:12], []).append(run.name)
    for name, group in by_name.items():
        folders = " and ".join(str(run.path) for run in group)
        require(len(group) == 1, f"the run {name} was found twice, in {folders}: pass only one of them")
    mixed = {metric: groups for metric, groups in by_definition.items() if len(groups) > 1}
    for metric, groups in mixed.items():
        meanings = "\n".join(f"  {meaning!r}: {first_names(names)}" for meaning, names in groups.items())
        others = f" (and of {', '.join(sorted(mixed.keys() - {metric}))})" if len(mixed) > 1 else ""
        raise ConfigError(
            f"these runs have different definitions of {metric}{others}:\n{meanings}\nLeave all but one out"
        )
    versions = "\n".join(f"  code {code}: {first_names(names)}" for code, names in by_code.items())
    require(
        mixed_code or len(by_code) <= 1,
        f"these runs come from {len(by_code)} versions of the code:\n{versions}\nLeave all but one group out, or pass "
        "--mixed-code if what changed in between cannot have changed the numbers",
    )
    for file, groups in by_own_code.items():
        versions = "\n".join(f"  {version}: {first_names(names)}" for version, names in groups.items())
        require(
            mixed_code or len(groups) == 1,
            f"these runs were made with {len(groups)} versions of {file}:\n{versions}\nLeave all but one group out, or "
            "pass --mixed-code",
        )


def _require_one_model_per_name(runs: Sequence[Run]) -> None:
    """A model that is loaded has one base. One that is made from a seed may have many: repetitions of one kind.

    So may a GGUF file, of which model.dither draws copies.
    """
    by_model: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        loaded = "id" in run.config.get("model", {})
        file = run.environment.get("gguf", {}).get("digest")
        weights = by_model.setdefault(str(run.option("model.name")), {})
        weights.setdefault(file or (run.base if loaded else "made from model.seed"), []).append(run.name)
    for name, weights in by_model.items():
        listed = "\n".join(f"  {base}: {first_names(names)}" for base, names in weights.items())
        require(
            len(weights) == 1,
            f"{len(weights)} models are called {name} in these runs:\n{listed}\nLeave all but one out. A folder with "
            "another name gives a model another name: model=hub model.id=DIR",
        )


def load_run(path: str | os.PathLike[str], metrics: bool = True) -> Run:
    """Read one run, from its folder or as STUDY/NAME. Raises ConfigError for a damaged file, naming it and the line.

    A run without done.json may still be written to, so its half-written last line is dropped with a warning. With
    `metrics=False` that table stays empty, nothing is checked, and the run is read in a millisecond.
    """
    path = Path(path)
    kept = find_study(path)
    if kept is not None:
        study, name = kept
        return Run(
            path=path,
            config=study.config(name),
            environment=study.environment(name),
            finished=study.runs[name]["finished"],
            done=study.done(name),
            metrics=study.metrics[name] if metrics and name in study.metrics else parse.long_table({}, {}),
            kept_answers=study.answers.get(name),
        )
    for name in ("config.yaml", "metrics.jsonl"):
        require((path / name).is_file(), f"{path} is not a run directory: it has no {name}")
    finished = is_finished(path)
    if metrics:
        check_records(path, "Or leave the run out")
    return Run(
        path=path,
        config=read_config(path / "config.yaml"),
        environment=_object(path, "env.json", finished),
        finished=finished,
        done=_object(path, DONE, finished),
        metrics=parse.read_metrics(path / "metrics.jsonl", finished) if metrics else parse.long_table({}, {}),
    )


def _object(run: Path, name: str, finished: bool) -> dict[str, Any]:
    """The object in a JSON file of a run; empty without the file."""
    return read_object(run / name, saved(run, name, finished)) if (run / name).is_file() else {}


def tidy(runs: Iterable[Run]) -> pd.DataFrame:
    """The long table of several runs: the columns IDENTITY, then MEASURED; text columns are categories.

    Raises ConfigError if two runs have one name, or if a metric has several definitions.
    """
    runs = list(runs)
    require(bool(runs), "no runs to put in a table: pass at least one")
    check_comparable(runs, mixed_code=True)
    return pa.concat_tables([tidy_rows(run) for run in runs]).unify_dictionaries().to_pandas()


def tidy_rows(run: Run) -> pa.Table:
    """The rows of one run in the long table; text columns are dictionaries."""
    first = np.zeros(len(run.metrics), np.int32)
    columns: dict[str, Any] = {
        name: pa.DictionaryArray.from_arrays(first, pa.array([value])) for name, value in run.identity().items()
    }
    return pa.table(columns | {name: pa.array(run.metrics[name]) for name in MEASURED}).cast(SCHEMA)
