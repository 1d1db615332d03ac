"""Reads finished and running runs: the one way that figures, tables and notebooks read them.

A run is read from its own folder, or from a committed study (committed.py), which holds many. Nothing is parsed from
folder names or log text, and no service is asked. Left out: rollouts.jsonl, which few readers need.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from qerl_core.checks import ConfigError, require
from qerl_core.options.fingerprint import canonical, fingerprint, flat, scientific
from qerl_studies.runs import parse
from qerl_studies.runs.answers import CountedAnswers, counted, read_answers
from qerl_studies.runs.committed import LATER, TEXT, find_study
from qerl_studies.runs.environments import block_of, codes_of, device_of
from qerl_studies.runs.folder import held, read_folder

Cell = tuple[str, int]  # base model and seed: runs of different settings are compared within a cell

OPTIONS = ("quant", "aqn", "quantizer", "algo", "lora_rank", "model", "task")
IDENTITY = ("run", *OPTIONS, "base", "seed", "lr", "fingerprint", "finished")
BASE_KEYS = frozenset(
    {"model.seed", "model.dither", "aqn.sigma_of_base"}
)  # config keys that select the base model, or belong to it
PLACE_KEYS = frozenset({"model.id", "model.revision"})  # where it came from, which its digest makes irrelevant
NOWHERE = (np.zeros(0, np.intp), pd.Index(np.zeros(0, np.int64)))
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
    and has neither seals nor the last numbers again; `environment`, the content of env.json, is empty without that
    file. Runs share the parts of both and of `config` that are equal: do not change them.

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

    @cached_property
    def block(self) -> str:
        """Machine and library versions, which can change numbers, as far as they were recorded."""
        return sys.intern(block_of(self.environment))

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
            if not isinstance(value, dict) or part not in value:
                where = self.path / "config.yaml"
                raise ConfigError(f"{where} has no key {key}: it must be the resolved config of a run, complete")
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
        return held({key: value for key, value in items.items() if key not in base_keys} | {"device": self.device})

    @cached_property
    def setting_items(self) -> frozenset[tuple[str, str]]:
        """`config_items` as a set; runs of one setting have the same one, which is grouped by at once."""
        items = frozenset((key, repr(canonical(value))) for key, value in self.config_items.items())
        return _SETTINGS.setdefault(items, items)

    def records(self, kind: str, metric: str) -> bool:
        """Whether the metric was ever written."""
        return (kind, metric) in self._places

    def series(self, kind: str, metric: str) -> pd.Series:
        """One metric indexed by step, in order of steps; empty if it was never written."""
        rows, steps = self._places.get((kind, metric), NOWHERE)
        return pd.Series(self._values[rows], index=steps, name=metric)

    def numbers(self, kind: str, metric: str) -> np.ndarray:
        """The values of `series`."""
        return self._values[self._places.get((kind, metric), NOWHERE)[0]]

    @property
    def written(self) -> Iterable[tuple[str, str]]:
        """Kind and name of each metric."""
        return self._places.keys()

    @cached_property
    def _values(self) -> np.ndarray:
        return self.metrics["value"].to_numpy()

    @cached_property
    def _places(self) -> parse.Places:
        return parse.places_of(self.metrics)

    def answers(self, mode: str, column: str = "correct") -> pd.DataFrame:
        """Share of correct answers to each held-out question, sorted: index question, a column for each evaluated step.

        `mode` is greedy or sampled. `column` may also be lenient or finished, shares too, or tokens, which are means.
        Raises ConfigError if answers were not kept, or if none are of this mode or have that column.
        """
        where = self.path / "samples.parquet"
        counted = self.counted
        require(
            counted is not None,
            f"the held-out answers of {self.name} were not kept: {where} is missing (or, in a committed study, its "
            "rows of answers.parquet). Run it with eval=task",
        )
        assert counted is not None
        modes = counted.asked.places
        require(mode in modes, f"{where} has no answers with mode={mode}: leave the run out, or run it again")
        known = {"correct", *LATER} & {*counted.counts}
        require(column in known, f"{where} does not say of its answers: {column}")
        return counted.shares(mode, column)

    @cached_property
    def counted(self) -> CountedAnswers | None:
        """What `answer_counts` returns, in few bytes."""
        if self.kept_answers is not None:
            return counted(self.kept_answers)
        path = self.path / "samples.parquet"
        return read_answers(path) if path.is_file() else None

    def has_answers(self) -> bool:
        """Whether answers were kept. Raises ConfigError if samples.parquet lacks a column."""
        return self.counted is not None

    def answer_counts(self) -> pd.DataFrame | None:
        """Columns mode, question, step, correct and samples, both counts; None if no answers were kept.

        And, where they were measured, the counts lenient and finished, and the sum of tokens. Raises ConfigError if
        samples.parquet lacks a column.
        """
        if self.kept_answers is not None or self.counted is None:
            return self.kept_answers
        return self.counted.table()


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
    return Run(path, *read_folder(path, metrics))


def tidy_rows(run: Run) -> pa.Table:
    """The rows of one run in the long table; text columns are dictionaries."""
    first = np.zeros(len(run.metrics), np.int32)
    columns: dict[str, Any] = {
        name: pa.DictionaryArray.from_arrays(first, pa.array([value])) for name, value in run.identity().items()
    }
    return pa.table(columns | {name: pa.array(run.metrics[name]) for name in MEASURED}).cast(SCHEMA)
