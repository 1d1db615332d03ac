"""Finished (or still running) runs as tables: the one way that figures, tables and notebooks read a run directory.

Everything comes from the files inside a run: nothing is recovered from a directory's name or from log text, and no
service is asked. Left out on purpose: rollouts.jsonl, which few readers need.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import yaml

from qerl_bench.config import fingerprint
from qerl_bench.errors import BadInput, require
from qerl_bench.results.versions import refuse_mixed

OPTIONS = ("quant", "aqn", "quantizer", "algo", "lora_rank", "model", "task")
IDENTITY = ("run", *OPTIONS, "seed", "lr", "fingerprint", "finished")
MEASURED = ("kind", "step", "metric", "value")
TEXT = pa.dictionary(pa.int32(), pa.string())
NUMERIC = {
    "lora_rank": "int64",
    "seed": "int64",
    "lr": "float64",
    "finished": "bool",
    "step": "int64",
    "value": "float64",
}
SCHEMA = pa.schema([(name, NUMERIC.get(name, TEXT)) for name in (*IDENTITY, *MEASURED)])  # the others are categories
NUMBERS = {int, float, bool, type(None)}
REMEDY = "Repair or remove this line, or leave the run out"


@dataclass(frozen=True)
class Run:
    """One run. `metrics` is long: kind (category), step, metric (category), value; one row per number written.

    A null in metrics.jsonl, which stands for a non-finite number, is a row with value NaN; a number that was never
    written has no row. The time of a line, in unix seconds, is the metric `time`. `done` is empty while unfinished, and
    `environment`, the content of env.json, if there is no such file.
    """

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    finished: bool
    done: dict[str, Any]
    metrics: pd.DataFrame

    @property
    def name(self) -> str:
        return self.option("name")

    @property
    def code(self) -> str:
        """What tells the version of the code that made this run: see `rundir.environment`."""
        env = self.environment
        return str(env.get("code") or f"of commit {env.get('commit')}{' with changes' if env.get('dirty') else ''}")

    @property
    def device(self) -> str:
        """Where it ran: the name of the GPU, cpu, or unknown."""
        return str(self.environment.get("gpu") or self.environment.get("device", "unknown"))

    @property
    def last_step(self) -> int:
        """The largest step of any line; 0 if there is none."""
        return max(self.metrics["step"].tolist(), default=0)

    def option(self, key: str) -> Any:
        """The value of a dotted config key; BadInput if config.yaml has no such key."""
        value: Any = self.config
        for part in key.split("."):
            require(
                isinstance(value, dict) and part in value,
                f"{self.path / 'config.yaml'} has no key {key}: it must be the resolved config of a run, complete",
            )
            value = value[part]
        return value

    def identity(self) -> dict[str, Any]:
        """The columns IDENTITY of this run; full-parameter training counts as rank 0.

        The fingerprint covers every option but the seed, also those that have no column.
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
            "seed": self.option("seed"),
            "lr": float(self.option("optim.lr")),
            "fingerprint": fingerprint(self.config),
            "finished": self.finished,
        }

    def series(self, kind: str, metric: str) -> pd.Series:
        """One metric indexed by step, in order of steps; empty if it was never written."""
        rows = self.metrics.loc[(self.metrics["kind"] == kind) & (self.metrics["metric"] == metric)]
        return pd.Series(rows["value"].to_numpy(), index=rows["step"].to_numpy(), name=metric).sort_index()

    def answers(self, mode: str) -> pd.DataFrame:
        """Share of right answers to each held-out question, sorted: index question, a column for each evaluated step.

        `mode` is greedy or sampled. Raises BadInput if samples.parquet lacks a column, or has no row of this mode.
        """
        path = self.path / "samples.parquet"
        require(path.is_file(), f"{path} is missing: its held-out answers were not kept. Run it with eval=task")
        rows = pd.read_parquet(path)
        lacking = sorted({"mode", "question", "step", "correct"} - set(rows.columns))
        require(not lacking, f"{path} has no column {', '.join(lacking)}: leave the run out, or run it again")
        chosen = rows[rows["mode"] == mode]
        require(not chosen.empty, f"{path} has no answers with mode={mode}: leave the run out, or run it again")
        return chosen.pivot_table(index="question", columns="step", values="correct", aggfunc="mean").astype(float)


def find_runs(root: str | os.PathLike[str]) -> list[Path]:
    """The run directories at or below `root`, sorted: each folder that holds config.yaml and metrics.jsonl.

    Folders inside a run are not searched. Raises BadInput if there is no such folder.
    """
    root = Path(root)
    require(root.is_dir(), f"{root} is not a folder: pass a run directory, or a folder that holds runs")
    found = []
    for folder, subfolders, files in os.walk(root):
        if "config.yaml" in files and "metrics.jsonl" in files:
            found.append(Path(folder))
            subfolders.clear()
    require(
        bool(found),
        f"no run in {root}: a run is a folder with config.yaml and metrics.jsonl. "
        "Pass the folder that holds them (runs/ by default), or start one with python src/run.py",
    )
    return sorted(found)


def load_runs(folders: Iterable[str | os.PathLike[str]], mixed_code: bool = False) -> list[Run]:
    """Every run at or below `folders`, for a comparison: the one way for figures and tables to read several runs.

    Raises BadInput as `load_run` and `refuse_mixed` do.
    """
    runs = [load_run(path) for folder in folders for path in find_runs(folder)]
    refuse_mixed(runs, mixed_code)
    return runs


def load_run(path: str | os.PathLike[str], metrics: bool = True) -> Run:
    """Read one run directory. Raises BadInput for a damaged file, naming it and the line.

    A run without done.json may still be written to: its half-written last line is dropped with a warning. Without
    `metrics` that table stays empty, and the rest is read in a millisecond.
    """
    path = Path(path)
    for name in ("config.yaml", "metrics.jsonl"):
        require((path / name).is_file(), f"{path} is not a run directory: it has no {name}")
    finished = (path / "done.json").is_file()
    return Run(
        path=path,
        config=_read_config(path / "config.yaml"),
        environment=_read_object(path / "env.json") if (path / "env.json").is_file() else {},
        finished=finished,
        done=_read_object(path / "done.json") if finished else {},
        metrics=_read_metrics(path / "metrics.jsonl", finished) if metrics else _long({}, {}),
    )


def tidy(runs: Iterable[Run]) -> pd.DataFrame:
    """The long table of several runs: the columns IDENTITY, then MEASURED; text columns are categories.

    Raises BadInput if two folders hold a run of the same name, or if a metric has several definitions.
    """
    runs = list(runs)
    require(bool(runs), "no runs to put in a table: pass at least one")
    refuse_mixed(runs, mixed_code=True)
    return pa.concat_tables([tidy_rows(run) for run in runs]).unify_dictionaries().to_pandas()


def tidy_rows(run: Run) -> pa.Table:
    """The rows of one run in the long table; text columns are dictionaries."""
    same = np.zeros(len(run.metrics), np.int32)
    columns: dict[str, Any] = {
        name: pa.DictionaryArray.from_arrays(same, pa.array([value])) for name, value in run.identity().items()
    }
    return pa.table(columns | {name: pa.array(run.metrics[name]) for name in MEASURED}).cast(SCHEMA)


class _Loader(yaml.CSafeLoader):
    """YAML as OmegaConf reads it, 1e-5 being a number, by the parser that is written in C."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d[\d_]*([eE][-+]?\d+)?)$"),
    list("-+0123456789."),
)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        config = yaml.load(text, _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not a resolved config: {error}") from error
    require("${" not in text, f"{path} is not a resolved config: it refers to other keys with ${{...}}")
    require(isinstance(config, dict) and bool(config), f"{path} is empty or no mapping: it must hold the run's config")
    return {str(key): value for key, value in config.items()}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_bytes())
    except ValueError as error:
        raise BadInput(f"{path} is not JSON ({error}): delete it, and run the same command again to finish") from error
    require(isinstance(read, dict), f"{path} must hold one JSON object: delete it, and run the same command again")
    return read


def _read_metrics(path: Path, finished: bool) -> pd.DataFrame:
    """Lines with the same kind and keys form a matrix, so no number is handled by itself."""
    lines = path.read_bytes().split(b"\n")
    decode = json.JSONDecoder().decode
    last = max((number for number, line in enumerate(lines, start=1) if line.strip()), default=0)
    steps: dict[tuple[str, ...], list[int]] = {}
    values: dict[tuple[str, ...], list[list[float | None]]] = {}
    written: dict[tuple[str, int], int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = decode(line.decode())
        except ValueError as error:
            if number == last and not finished:
                warnings.warn(f"{path.parent}: line {number}, the last, is half-written and was dropped", stacklevel=3)
                break
            raise BadInput(f"{path}, line {number}: not JSON ({error}). {REMEDY}") from error
        kind, step = _checked(record, f"{path}, line {number}")
        earlier = written.setdefault((kind, step), number)
        require(
            earlier == number, f"{path}, line {number}: step {step} ({kind}) is already on line {earlier}. {REMEDY}"
        )
        keys = (kind, *record)
        steps.setdefault(keys, []).append(step)
        values.setdefault(keys, []).append(list(record.values()))
    return _long(steps, values)


def _checked(record: Any, where: str) -> tuple[str, int]:
    """Take `kind` and `step` out of `record` and check that the rest are numbers."""
    require(isinstance(record, dict), f"{where}: not a JSON object. {REMEDY}")
    kind, step = record.pop("kind", None), record.pop("step", None)
    require(isinstance(kind, str), f"{where}: `kind` must be a text such as train or eval, not {kind!r}. {REMEDY}")
    require(type(step) is int and step >= 0, f"{where}: `step` must be a whole number >= 0, not {step!r}. {REMEDY}")
    if not NUMBERS.issuperset(map(type, record.values())):
        key, value = next((key, value) for key, value in record.items() if type(value) not in NUMBERS)
        raise BadInput(f"{where}: {key} must be a number or null, not {value!r}. {REMEDY}")
    return kind, step


def _long(steps: dict[tuple[str, ...], list[int]], values: dict[tuple[str, ...], list[list[Any]]]) -> pd.DataFrame:
    """The matrices (lines, metrics) laid end to end, metric by metric, in the order in which they first appear."""
    kinds = list(dict.fromkeys(kind for kind, *_ in values))
    names = list(dict.fromkeys(name for _, *metrics in values for name in metrics))
    place = {name: code for code, name in enumerate(names)}
    parts: list[tuple[np.ndarray, ...]] = [
        (np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0))
    ]
    for (kind, *metrics), rows in values.items():
        matrix = np.array(rows, dtype=np.float64).reshape(len(rows), len(metrics))
        codes = np.array([place[name] for name in metrics], np.int32)
        parts.append(
            (
                np.full(matrix.size, kinds.index(kind), np.int32),
                np.tile(np.array(steps[(kind, *metrics)], dtype=np.int64), len(metrics)),
                np.repeat(codes, len(rows)),
                np.where(np.isfinite(matrix), matrix, np.nan).ravel(order="F"),
            )
        )
    kind, step, metric, value = (np.concatenate(column) for column in zip(*parts, strict=True))
    return pd.DataFrame(
        {
            "kind": pd.Categorical.from_codes(kind, pd.Index(kinds, dtype="str")),
            "step": step,
            "metric": pd.Categorical.from_codes(metric, pd.Index(names, dtype="str")),
            "value": value,
        }
    )
