"""The tidy table of more runs than fit in memory: written run by run, one row per number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as parquet

from qerl_bench.errors import require
from qerl_bench.results.load import SCHEMA, Run, load_run, tidy_rows
from qerl_bench.results.versions import refuse_mixed

ROWS = 300_000  # gathered before they are written; with one run more, what is held in memory


def write_tidy(paths: Sequence[Path], out: Path, mixed_code: bool, metrics: Sequence[str] = ()) -> tuple[int, int, int]:
    """Write `out`/tidy.parquet and tidy.csv of the run directories `paths`; return runs, unfinished runs, and rows.

    With `metrics`, only these are written. Everything that can be refused without reading the numbers is refused first;
    a damaged line stops the writing, and then no file is left. Raises BadInput as `load_run` and `refuse_mixed` do.
    """
    heads = [load_run(path, metrics=False) for path in paths]
    require(bool(heads), "no runs to put in a table: pass at least one")
    refuse_mixed(heads, mixed_code)
    out.mkdir(parents=True, exist_ok=True)
    finals = [out / "tidy.parquet", out / "tidy.csv"]
    beside = [file.with_name(f".{file.name}.writing") for file in finals]
    plain = pa.schema([(field.name, _plain(field.type)) for field in SCHEMA])
    rows = 0
    try:
        with (
            parquet.ParquetWriter(beside[0], SCHEMA, compression="zstd", write_statistics=False) as columns,
            csv.CSVWriter(beside[1], plain) as lines,
        ):
            gathered: list[pa.Table] = []
            for number, path in enumerate(paths, start=1):
                gathered.append(tidy_rows(_chosen(load_run(path), metrics)))
                if sum(len(part) for part in gathered) >= ROWS or number == len(paths):
                    table = pa.concat_tables(gathered).unify_dictionaries()
                    columns.write_table(table)
                    lines.write_table(table.cast(plain))
                    rows += len(table)
                    gathered = []
        for file, final in zip(beside, finals, strict=True):
            file.replace(final)
    finally:
        for file in beside:
            file.unlink(missing_ok=True)
    return len(heads), sum(not run.finished for run in heads), rows


def _chosen(run: Run, metrics: Sequence[str]) -> Run:
    return replace(run, metrics=run.metrics[run.metrics["metric"].isin(metrics)]) if metrics else run


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if isinstance(kind, pa.DictionaryType) else kind
