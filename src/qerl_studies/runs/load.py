"""Reads finished and running runs: the one way that figures, tables and notebooks read them.

A run is read from its own folder, or from a committed study (committed.py), which holds many. Nothing is parsed from
folder names or log text, and no service is asked. Left out: rollouts.jsonl, which few readers need.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from qerl_core.checks import require
from qerl_core.options.fingerprint import canonical, fingerprint, flat, scientific
from qerl_core.rundir.checkpoints import is_finished
from qerl_core.rundir.checksums import DONE
from qerl_core.rundir.read_files import read_config, read_object, read_table
from qerl_core.rundir.recorded_types import RESULT, require_config, require_environment, require_kinds
from qerl_core.rundir.run_checks import check_records, damage_remedy
from qerl_studies.runs import parse
from qerl_studies.runs.committed import LATER, TEXT, find_study
from qerl_studies.runs.environments import block_of, codes_of, device_of

Cell = tuple[str, int]  # base model and seed: runs of different settings are compared within a cell

OPTIONS = ("quant", "aqn", "quantizer", "algo", "lora_rank", "model", "task")
IDENTITY = ("run", *OPTIONS, "base", "seed", "lr", "fingerprint", "finished")
BASE_KEYS = frozenset(
    {"model.seed", "model.dither", "aqn.sigma_of_base"}
)  # config keys that select the base model, or belong to it
PLACE_KEYS = frozenset({"model.id", "model.revision"})  # where it came from, which its digest makes irrelevant
OUT = "Leave the run out"
MEASURED = ("kind", "step", "metric", "value")
NUMERIC = dict.fromkeys(("lora_rank", "seed", "step"), "int64") | {
    "lr": "float64",
    "value": "float64",
    "finished": "bool",
}
_SETTINGS: dict[frozenset[tuple[str, str]], frozenset[tuple[str, str]]] = {}
SCHEMA = pa.schema([(name, NUMERIC.get(name, TEXT)) for name in (*IDENTITY, *MEASURED)])  # the others are categories


@dataclass(frozen=True)
class Run:
    """One run. `metrics` is long: kind (category), step, metric (category), value; one row per number written.

    A null in metrics.jsonl stands for a non-finite number and is a row with value NaN; a number that was never written
    has no row. The time of a line, in unix seconds, is the metric `time`. `done` is empty while the run is unfinished,
    and `environment`, the content of env.json, is empty without that file.

    A run of a committed study has the path STUDY/NAME, which need not exist, the metrics that were kept, and its
    answers in `kept_answers`: mode, question, step, correct, samples, and of newer ones lenient, finished, tokens.
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
        """The version of the code that made this run, or those that made its steps one after the other."""
        return ", then ".join(codes_of(self.environment))

    @property
    def device(self) -> str:
        """The name of the GPU, cpu, or unknown."""
        return device_of(self.environment)

    @cached_property
    def base(self) -> str:
        """The base model: a GGUF file's digest and which copy of it; the digest of other weights, if env.json has one.

        A GGUF file's weights have another digest in each model.dtype. Without a digest it is the config: id and
        revision of a hub model; seed, shape and warm-start task of one that is made from `model.seed`. The same seed
        can give other weights on another machine.
        """
        if file := self.environment.get("gguf"):
            drawn, scale = file.get("dither"), file.get("dither_scale")  # None, unless model.dither is given
            copy = "" if drawn is None else f", copy {drawn}{'' if scale in (None, 1) else f' x {scale:g}'}"
            return f"{file['digest']}{copy}"
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
        return block_of(self.environment)

    @cached_property
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
        """`config_items` as a set; runs of one setting have the same one, which is grouped by at once."""
        items = frozenset((key, repr(canonical(value))) for key, value in self.config_items.items())
        return _SETTINGS.setdefault(items, items)

    def records(self, kind: str, metric: str) -> bool:
        """Whether the metric was ever written."""
        return (kind, metric) in self._rows

    def series(self, kind: str, metric: str) -> pd.Series:
        """One metric indexed by step, in order of steps; empty if it was never written. Made once: do not change it."""
        if (kind, metric) not in self._series:
            rows = self._rows.get((kind, metric), [])
            values, steps = (self.metrics[column].to_numpy()[rows] for column in ("value", "step"))
            order = np.argsort(steps, kind="stable")
            self._series[kind, metric] = pd.Series(values[order], index=steps[order], name=metric)
        return self._series[kind, metric]

    @cached_property
    def _series(self) -> dict[tuple[str, str], pd.Series]:
        return {}

    @cached_property
    def _rows(self) -> dict[Any, np.ndarray]:
        """The row numbers of each metric."""
        return self.metrics.groupby(["kind", "metric"], observed=True, sort=False).indices

    def answers(self, mode: str, column: str = "correct") -> pd.DataFrame:
        """Share of correct answers to each held-out question, sorted: index question, a column for each evaluated step.

        `mode` is greedy or sampled. `column` may also be lenient or finished, shares too, or tokens, which are means.
        Raises ConfigError if answers were not kept, or if none are of this mode or have that column.
        """
        where = self.path / "samples.parquet"
        rows = self._shares
        require(
            rows is not None,
            f"the held-out answers of {self.name} were not kept: {where} is missing (or, in a committed study, its "
            "rows of answers.parquet). Run it with eval=task",
        )
        assert rows is not None
        require(mode in rows, f"{where} has no answers with mode={mode}: leave the run out, or run it again")
        require(column in {"correct", *LATER} & {*rows[mode]}, f"{where} does not say of its answers: {column}")
        if (mode, column) not in self._answers:  # reports ask for it in many ways
            self._answers[mode, column] = rows[mode].pivot(index="question", columns="step", values=column)
        return self._answers[mode, column]

    @cached_property
    def _answers(self) -> dict[tuple[str, str], pd.DataFrame]:
        return {}

    @cached_property
    def _shares(self) -> dict[str, pd.DataFrame] | None:
        """By mode the columns question, step, correct and those of LATER that say it of all answers, as shares and
        means."""
        rows = self.answer_counts()
        if rows is None:
            return None
        columns = ["correct", *(name for name in LATER if name in rows and bool(rows[name].notna().all()))]
        shares = rows[["mode", "question", "step"]].assign(**{name: rows[name] / rows["samples"] for name in columns})
        return {str(mode): of_mode for mode, of_mode in shares.groupby("mode", observed=True)}

    def answer_counts(self) -> pd.DataFrame | None:
        """Columns mode, question, step, correct and samples, both counts; None if no answers were kept.

        And, where they were measured, the counts lenient and finished, and the sum of tokens. Raises ConfigError if
        samples.parquet lacks a column.
        """
        path = self.path / "samples.parquet"
        if self.kept_answers is not None or not path.is_file():
            return self.kept_answers
        rows = read_table(path, ["mode", "question", "step", "correct"], optional=LATER)
        more = [name for name in LATER if name in rows and bool(rows[name].notna().all())]
        rows = rows.astype(dict.fromkeys(("correct", *more), "int64"))
        grouped = rows.groupby(["mode", "question", "step"])
        sums = {name: (name, "sum") for name in more}
        return grouped.agg(correct=("correct", "sum"), samples=("correct", "count"), **sums).reset_index()


def noise_of(items: Mapping[str, Any]) -> str:
    """The schedule in the config with these dotted keys, and where its noise is if not in norms: exp on adapters."""
    adapted = items["aqn.name"] != "none" and items.get("noise.where") == "adapters"
    return f"{items['aqn.name']}{' on adapters' if adapted else ''}"


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
    config, environment, done = (
        read_config(path / "config.yaml"),
        *(_object(path, name, finished) for name in ("env.json", DONE)),
    )
    require_config(str(path / "config.yaml"), config, OUT)
    require_environment(str(path / "env.json"), environment, OUT)
    require_kinds(str(path / DONE), done, RESULT, OUT)
    return Run(
        path=path,
        config=config,
        environment=environment,
        finished=finished,
        done=done,
        metrics=parse.read_metrics(path / "metrics.jsonl", finished) if metrics else parse.long_table({}, {}),
    )


def _object(run: Path, name: str, finished: bool) -> dict[str, Any]:
    """The object in a JSON file of a run; empty without the file."""
    return read_object(run / name, damage_remedy(run, name, finished)) if (run / name).is_file() else {}


def tidy_rows(run: Run) -> pa.Table:
    """The rows of one run in the long table; text columns are dictionaries."""
    first = np.zeros(len(run.metrics), np.int32)
    columns: dict[str, Any] = {
        name: pa.DictionaryArray.from_arrays(first, pa.array([value])) for name, value in run.identity().items()
    }
    return pa.table(columns | {name: pa.array(run.metrics[name]) for name in MEASURED}).cast(SCHEMA)
