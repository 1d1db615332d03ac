"""Writing a study (study.py) of more runs than fit in memory: run by run, one row per number."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as parquet

from qerl_bench.checks import require
from qerl_bench.study.committed import ANSWERS, ANSWERS_SCHEMA, SETTINGS, TIDY, describe
from qerl_bench.study.load import SCHEMA, Run, load_run, tidy_rows
from qerl_bench.study.versions import named, refuse_mixed

ROWS = 300_000  # gathered before they are written; with one run more, what is held in memory
CSV = "tidy.csv"
# What claims, figures and the terminal table read, and what tells whether an arm did what it was meant to.
STUDY_METRICS = (
    "reward/mean",
    "reward/frac_zero_std",
    "accuracy",
    "entropy",
    "entropy_clean",
    "loss",
    "lr",
    "completions/tokens",
    "completions/mean_length",
    "completions/truncated_frac",
    "dynamic/refills",
    "mismatch/kl",
    "mismatch/ess",
    "aqn/sigma",
    "aqn/sigma_realised",
    "aqn/entropy_target",
    "aqn/saturated",
    "train/taught_frac",
    "updates_skipped",
    "time/rollout_s",
    "time/train_s",
    "time/step_s",
    "speed/rollout_tok_s",
    "memory/peak_gib",
)
STUDY_PREFIX = "eval/"  # every number of an evaluation too


def write_study(
    paths: Sequence[Path],
    out: Path,
    mixed_code: bool,
    metrics: Sequence[str] = (),
    with_csv: bool = False,
) -> tuple[int, int, int]:
    """Write settings.json, tidy.parquet and, if answers were kept, answers.parquet of the runs `paths` to `out`.

    Returns the number of runs, of unfinished ones, and of rows. `metrics` are the names to write; none for all, and
    "study" among them stands for STUDY_METRICS and the evaluations. Everything that can be refused without reading the
    numbers is refused first; a damaged line stops the writing, and then no file is left. Raises ConfigError as `load_run`
    and `refuse_mixed` do.
    """
    heads = [load_run(path, metrics=False) for path in paths]
    require(bool(heads), "no runs to put in a table: pass at least one")
    refuse_mixed(heads, mixed_code)
    inside = [path for path in paths if path.is_dir() and out.resolve() in path.resolve().parents]
    require(
        not inside,
        f"{out} holds the runs themselves ({named(path.name for path in inside)}): a study there would be read in "
        "their place, and runs that are added later not at all. Choose another folder: --out DIR",
    )
    settings = describe(heads)
    out.mkdir(parents=True, exist_ok=True)
    names = (TIDY, ANSWERS, CSV, SETTINGS)
    beside = {name: out / f".{name}.writing" for name in names}
    rows = 0
    try:
        with ExitStack() as stack:
            tidy_table = stack.enter_context(_Table(beside[TIDY], SCHEMA, beside[CSV] if with_csv else None))
            answers = stack.enter_context(_Table(beside[ANSWERS], ANSWERS_SCHEMA))
            for path in paths:
                run = load_run(path)
                rows += tidy_table.add(tidy_rows(_chosen(run, metrics)))
                answers.add(_answer_rows(run))
        if answers.rows == 0:
            beside[ANSWERS].unlink()
        beside[SETTINGS].write_text(settings)
        for name in names:
            if beside[name].exists():
                beside[name].replace(out / name)
            else:  # of an earlier study in this folder
                (out / name).unlink(missing_ok=True)
    finally:
        for file in beside.values():
            file.unlink(missing_ok=True)
    return len(heads), sum(not run.finished for run in heads), rows


class _Table:
    """A parquet file, and with `text` a CSV file beside it, to which tables are appended in groups of about ROWS."""

    def __init__(self, path: Path, schema: pa.Schema, text: Path | None = None) -> None:
        self.rows = 0
        self._waiting: list[pa.Table] = []
        self._plain = pa.schema([(field.name, _plain(field.type)) for field in schema])
        numbers = [field.name for field in schema if field.type == pa.float64()]
        encoding: dict[str, Any] = {  # the first bytes of all numbers, then the second ones: a fifth smaller
            "column_encoding": dict.fromkeys(numbers, "BYTE_STREAM_SPLIT"),
            "use_dictionary": [name for name in schema.names if name not in numbers],
        }
        self._columns = parquet.ParquetWriter(path, schema, compression="zstd", write_statistics=False, **encoding)
        self._lines = csv.CSVWriter(text, self._plain) if text else None

    def __enter__(self) -> _Table:
        return self

    def __exit__(self, *error: object) -> None:
        self._write()
        self._columns.close()
        if self._lines:
            self._lines.close()

    def add(self, table: pa.Table) -> int:
        """Append `table`; returns its length."""
        self.rows += len(table)
        self._waiting.append(table)
        if sum(len(part) for part in self._waiting) >= ROWS:
            self._write()
        return len(table)

    def _write(self) -> None:
        if self._waiting:
            table = pa.concat_tables(self._waiting).unify_dictionaries()
            self._columns.write_table(table)
            if self._lines:
                self._lines.write_table(table.cast(self._plain))
        self._waiting = []


def _chosen(run: Run, metrics: Sequence[str]) -> Run:
    if not metrics:
        return run
    written = run.metrics["metric"]
    wanted = written.isin([*metrics, *(STUDY_METRICS if "study" in metrics else ())])
    if "study" in metrics:
        wanted |= written.astype("str").str.startswith(STUDY_PREFIX)
    return replace(run, metrics=run.metrics[wanted])


def _answer_rows(run: Run) -> pa.Table:
    counts = run.answer_counts()
    if counts is None:
        return ANSWERS_SCHEMA.empty_table()
    columns: dict[str, Any] = {name: pa.array(counts[name]) for name in ANSWERS_SCHEMA.names if name != "run"}
    columns["run"] = pa.array([run.name] * len(counts))
    return pa.table(columns).select(ANSWERS_SCHEMA.names).cast(ANSWERS_SCHEMA)


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if isinstance(kind, pa.DictionaryType) else kind
