"""Finished (or still running) runs as tables: the one way that figures, tables and notebooks read a run directory.

Everything comes from the files inside a run: nothing is recovered from a directory's name or from log text, and no
service is asked. Left out on purpose: rollouts.jsonl and samples.parquet, which few readers need.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qerl_bench.config import fingerprint
from qerl_bench.errors import BadInput, require

OPTIONS = ("quant", "aqn", "quantizer", "algo", "lora_rank", "model", "task")
IDENTITY = ("run", *OPTIONS, "seed", "lr", "fingerprint", "finished")
MEASURED = ("kind", "step", "metric", "value")
NUMERIC = {"lora_rank", "seed", "lr", "finished", "step", "value"}  # the other columns are categories
NUMBERS = {int, float, bool, type(None)}
REMEDY = "Repair or remove this line, or leave the run out"


@dataclass(frozen=True)
class Run:
    """One run. `metrics` is long: kind (category), step, metric (category), value; one row per number written.

    A null in metrics.jsonl, which stands for a non-finite number, is a row with value NaN; a number that was never
    written has no row. The time of a line, in unix seconds, is the metric `time`. `done` is empty while unfinished.
    """

    path: Path
    config: dict[str, Any]
    finished: bool
    done: dict[str, Any]
    metrics: pd.DataFrame

    @property
    def name(self) -> str:
        return self.option("name")

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
            "fingerprint": fingerprint(OmegaConf.create(self.config)),
            "finished": self.finished,
        }

    def series(self, kind: str, metric: str) -> pd.Series:
        """One metric indexed by step, in order of steps; empty if it was never written."""
        rows = self.metrics.loc[(self.metrics["kind"] == kind) & (self.metrics["metric"] == metric)]
        return pd.Series(rows["value"].to_numpy(), index=rows["step"].to_numpy(), name=metric).sort_index()


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


def load_run(path: str | os.PathLike[str]) -> Run:
    """Read one run directory. Raises BadInput for a damaged file, naming it and the line.

    A run without done.json may still be written to: its half-written last line is dropped with a warning.
    """
    path = Path(path)
    for name in ("config.yaml", "metrics.jsonl"):
        require((path / name).is_file(), f"{path} is not a run directory: it has no {name}")
    finished = (path / "done.json").is_file()
    return Run(
        path=path,
        config=_read_config(path / "config.yaml"),
        finished=finished,
        done=_read_done(path / "done.json") if finished else {},
        metrics=_read_metrics(path / "metrics.jsonl", finished),
    )


def tidy(runs: Iterable[Run]) -> pd.DataFrame:
    """The long table of several runs: the columns IDENTITY, then MEASURED; text columns are categories.

    Raises BadInput if two folders hold a run of the same name, since their rows could not be told apart.
    """
    runs = list(runs)
    require(bool(runs), "no runs to put in a table: pass at least one")
    folders: dict[str, Path] = {}
    for run in runs:
        require(
            run.name not in folders,
            f"the run {run.name} is there twice, in {folders.get(run.name)} and {run.path}: pass only one of them",
        )
        folders[run.name] = run.path

    owner = np.repeat(np.arange(len(runs)), [len(run.metrics) for run in runs])
    identities = pd.DataFrame([run.identity() for run in runs], columns=list(IDENTITY))
    columns: dict[str, Any] = {}
    for name in IDENTITY:
        values = identities[name]
        columns[name] = values.to_numpy()[owner] if name in NUMERIC else pd.Categorical(values).take(owner)
    for name in MEASURED:
        parts: list[Any] = [run.metrics[name] for run in runs]
        if name in NUMERIC:
            columns[name] = np.concatenate([part.to_numpy() for part in parts])
        else:
            columns[name] = pd.api.types.union_categoricals(parts)
    return pd.DataFrame(columns)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not a resolved config: {error}") from error
    require(isinstance(config, dict) and bool(config), f"{path} is empty or no mapping: it must hold the run's config")
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


def _read_done(path: Path) -> dict[str, Any]:
    try:
        done = json.loads(path.read_bytes())
    except ValueError as error:
        raise BadInput(f"{path} is not JSON ({error}): delete it, and run the same command again to finish") from error
    require(isinstance(done, dict), f"{path} must hold one JSON object: delete it, and run the same command again")
    return done


def _read_metrics(path: Path, finished: bool) -> pd.DataFrame:
    """Lines with the same kind and keys form a matrix, so no number is handled by itself."""
    lines = path.read_bytes().split(b"\n")
    last = max((number for number, line in enumerate(lines, start=1) if line.strip()), default=0)
    steps: dict[tuple[str, ...], list[int]] = {}
    values: dict[tuple[str, ...], list[list[float | None]]] = {}
    written: dict[tuple[str, int], int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
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
    parts: dict[str, list[Any]] = {"kind": [], "step": [], "metric": [], "value": []}
    for (kind, *metrics), rows in values.items():
        matrix = np.array(rows, dtype=np.float64).reshape(len(rows), len(metrics))
        parts["kind"].append(np.full(matrix.size, kind, dtype=object))
        parts["step"].append(np.tile(np.array(steps[(kind, *metrics)], dtype=np.int64), len(metrics)))
        parts["metric"].append(np.repeat(np.array(metrics, dtype=object), len(rows)))
        parts["value"].append(np.where(np.isfinite(matrix), matrix, np.nan).ravel(order="F"))
    columns: dict[str, Any] = {}
    for name, dtype in {"kind": "str", "step": "int64", "metric": "str", "value": "float64"}.items():
        joined = pd.Series(np.concatenate(parts[name]) if parts[name] else [], dtype=dtype)
        columns[name] = joined.astype("category") if dtype == "str" else joined
    return pd.DataFrame(columns)
