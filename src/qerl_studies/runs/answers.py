"""Answers to held-out questions, counted. What was asked is the same in many runs and is held once, by its content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from qerl_core.rundir.read_files import read_columns
from qerl_studies.runs.committed import LATER

KEYS = ["mode", "question", "step"]


@dataclass(frozen=True, eq=False)
class AskedRows:
    """`keys` has a row, KEYS, for each question that was answered in one mode at one step."""

    keys: pd.DataFrame

    @cached_property
    def places(self) -> dict[str, pd.DataFrame]:
        """By mode the row of each question (index) at each step (column), sorted; NaN where there is none."""
        rows = self.keys.assign(row=np.arange(len(self.keys)))
        modes = rows.groupby("mode", observed=True)
        return {str(mode): of_mode.pivot(index="question", columns="step", values="row") for mode, of_mode in modes}


@dataclass(frozen=True, eq=False)
class CountedAnswers:
    """By name, as in `Run.answer_counts`, a count for each row of what was `asked`."""

    asked: AskedRows
    counts: Mapping[str, np.ndarray]

    def table(self) -> pd.DataFrame:
        return self.asked.keys.assign(**{name: counts.astype(np.int64) for name, counts in self.counts.items()})

    def shares(self, mode: str, column: str) -> pd.DataFrame:
        """`column` over the samples: index question, a column for each step."""
        rows = self.asked.places[mode]
        shares = np.append(self.counts[column].astype(float) / self.counts["samples"].astype(float), np.nan)
        found = shares[rows.fillna(len(shares) - 1).to_numpy(np.intp)]
        return pd.DataFrame(found, index=rows.index, columns=rows.columns)


def read_answers(path: Path) -> CountedAnswers:
    """The answers in samples.parquet. Raises ConfigError for a damaged file, and for one that lacks a column."""
    rows = read_columns(path, [*KEYS, "correct"], optional=LATER)
    asked, group = _grouped(_content(rows.select(KEYS)))
    columns = {name: rows[name].to_numpy() for name in ("correct", *LATER) if name in rows.column_names}
    kept = {name: values for name, values in columns.items() if name == "correct" or bool(pd.notna(values).all())}
    size, known = len(asked.keys), group >= 0
    sums = {
        name: np.bincount(group[known], values.astype(np.int64)[known], size).astype(np.int64)
        for name, values in kept.items()
    }
    samples = np.bincount(group[known], minlength=size)
    return CountedAnswers(asked, _small({"correct": sums["correct"], "samples": samples} | sums))


def counted(table: pd.DataFrame) -> CountedAnswers:
    """The same of a table that `Run.answer_counts` returns."""
    asked = _listed(_content(pa.Table.from_pandas(table[KEYS], preserve_index=False)))
    names = ["correct", "samples", *(name for name in LATER if name in table and bool(table[name].notna().all()))]
    return CountedAnswers(asked, _small({name: table[name].to_numpy(np.int64) for name in names}))


def _small(counts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`counts` in the fewest bytes."""
    return {
        name: column.astype(np.result_type(*(np.min_scalar_type(end(initial=0)) for end in (column.min, column.max))))
        for name, column in counts.items()
    }


def _content(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema.remove_metadata()) as stream:
        stream.write_table(table.replace_schema_metadata())
    return sink.getvalue().to_pybytes()


def _table(content: bytes) -> pd.DataFrame:
    return pa.ipc.open_stream(content).read_all().to_pandas()


@lru_cache(maxsize=64)
def _listed(content: bytes) -> AskedRows:
    return AskedRows(_table(content))


@lru_cache(maxsize=64)
def _grouped(content: bytes) -> tuple[AskedRows, np.ndarray]:
    """What was asked, sorted, and its row for each row of the table; -1 for one with a null."""
    groups = _table(content).groupby(KEYS)
    keys = groups.size().index.to_frame(index=False)
    return AskedRows(keys), groups.ngroup().to_numpy()
