"""Cuts the data of a study in sessions down to what its pages and figures read, for the checkout.

    python studies/keep.py studies/worlds-2026

Of each run it keeps all evaluations, the dose of noise, and the series of training that
`analysis/study_report.py` reads. Of these it rounds all but whole numbers, rates, rewards and accuracies, which
verdicts compare with each other, to 16 bits, which is nearly five digits, and puts rows where they compress best.
Where that changes the last digit of a page, `--bits` keeps more.
Of answers it rounds the lengths, which take the most room, to the nearest 32 tokens; settings and probes become gzip.

    python studies/keep.py studies/tiny/data

Of runs collected in one folder it keeps all series; all else as above.

    python studies/keep.py studies/real-2026/first-look/data/formats-05b

Of a folder that probes packed it keeps all answers, the texts of the first questions, entropies in
half precision, which is three digits, and the probes as gzip. With `--small` it keeps less of many answers: greedy
texts alone, lengths as above, and no entropies of single answers; the probes have their means. If runs are packed
with them, all their series are kept and rounded, and lengths of their answers, as above.
"""

from __future__ import annotations

import argparse
import gzip
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet

from qerl_bench.conduct import archive
from qerl_core.checks import ConfigError
from qerl_core.exits import guarded
from qerl_core.rundir.durable import atomically
from qerl_studies.design.looks import at_last_look
from qerl_studies.design.sessions import PROBES, Sessions, read_study
from qerl_studies.report.sessions import contents
from qerl_studies.runs.collect import TableWriter
from qerl_studies.runs.committed import ANSWERS, SETTINGS, TIDY, schema_of
from qerl_studies.runs.load import Run

TOKENS = 32  # lengths of answers are multiples of it: 0.3 tokens of error in the mean of 1,319
TEXTS = 4  # questions whose answers are kept as texts
WHOLE = ("reward/mean", "accuracy", "lr")  # shares of a few answers, and a schedule: they compress well as they are
DOSE = ("aqn/sigma", "aqn/sigma_realised", "mismatch/kl")  # kept of every run with noise
Series = tuple[str, str, str]  # run, kind, metric


class Watched(Run):
    """A run that remembers in `asked` which of its series were read or asked for."""

    asked: set[Series]

    def records(self, kind: str, metric: str) -> bool:
        self.asked.add((self.name, kind, metric))
        return super().records(kind, metric)

    def series(self, kind: str, metric: str) -> pd.Series:
        self.asked.add((self.name, kind, metric))
        return super().series(kind, metric)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="a folder with study.yaml and data/, or what probes packed")
    parser.add_argument("--bits", type=int, default=16, help="digits of two that noisy values keep (default: 16)")
    parser.add_argument("--small", action="store_true", help="keep less of the answers that probes packed")
    options = parser.parse_args(arguments)
    if (options.study / archive.ANSWERS).is_file():
        cut_probes(options.study, options.small)
    elif not (options.study / TIDY).is_file():
        return cut_runs(options.study, options.bits)
    if (options.study / TIDY).is_file():
        pack_runs(pd.read_parquet(options.study / TIDY), options.study / TIDY, options.bits)
    pack_answers(options.study / ANSWERS)
    zip_json(options.study)


def cut_probes(folder: Path, small: bool = False) -> None:
    """Cut what probes packed; what was cut before stays as it is."""
    file = folder / archive.ANSWERS
    rows: Any = pd.read_parquet(file)
    schema = parquet.read_schema(file)
    if small:
        rows = rows.drop(columns="entropy", errors="ignore").assign(
            completion=rows["completion"].where(rows["temperature"] == 0),
            tokens=(rows["tokens"] / TOKENS).round() * TOKENS,
        )
        schema = pa.schema([field for field in schema if field.name != "entropy"])
    told = rows["question"][rows["completion"].notna()].unique()[:TEXTS]
    for column in ("answer", "completion"):
        rows[column] = rows[column].where(rows["question"].isin(told))
    if "entropy" in rows:
        rows["entropy"] = rows["entropy"].astype("float16").astype("float32")
    write_compact(rows, ["temperature", "question", "quant", "base", "sample"], schema, file)
    print(f"{file}: {len(rows)} answers, texts of {len(told)} questions")


def zip_json(folder: Path) -> None:
    """Write probes.json and settings.json of a session as gzip."""
    for file in (folder / PROBES, folder / SETTINGS):
        if file.is_file():
            packed = json.dumps(json.loads(file.read_text()), separators=(",", ":")).encode()
            file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(packed, mtime=0))
            file.unlink()


def cut_runs(folder: Path, bits: int) -> None:
    """Cut the runs of a study in sessions."""
    study = read_study(folder)
    if study.design.primary and at_last_look(study) is None:
        raise ConfigError(f"{folder}: before its first look no page reads its series; pack each folder of data alone")
    wanted = read_by_pages(study)
    for file in sorted(folder.glob(f"data/*/{TIDY}")):
        rows = pd.read_parquet(file)
        series = pd.MultiIndex.from_frame(pd.DataFrame(rows[["run", "kind", "metric"]]).astype(str))
        dose = rows["metric"].isin(DOSE) & (rows["aqn"] != "none")
        kept = pd.DataFrame(rows[(rows["kind"] == "eval") | dose | series.isin(list(wanted))])
        pack_runs(kept, file, bits)
        pack_answers(file.with_name(ANSWERS))
        zip_json(file.parent)
        print(f"{file.parent}: {len(kept)} of {len(rows)} numbers")


def pack_runs(rows: pd.DataFrame, file: Path, bits: int) -> None:
    """Write `rows` to the long table `file`, rounded."""
    write_compact(rounded(rows, bits), ["kind", "metric", "run", "step"], parquet.read_schema(file), file)


def pack_answers(file: Path) -> None:
    """Sort the answers of runs, if any were kept, and round their lengths."""
    if not file.is_file():
        return
    rows: Any = pd.read_parquet(file)
    if "tokens" in rows:
        rows["tokens"] = (rows["tokens"] / TOKENS).round() * TOKENS
    write_compact(rows, ["mode", "step", "question", "run"], schema_of(file), file)


def read_by_pages(study: Sessions) -> set[Series]:
    """The series of the runs of a study that its pages and figures read."""
    asked: set[Series] = set()
    runs = {
        cell: Watched(**{field.name: getattr(run, field.name) for field in fields(Run)})
        for cell, run in study.runs.items()
    }
    for run in runs.values():
        vars(run)["asked"] = asked
    for made in contents(replace(study, runs=runs)).values():
        if not isinstance(made, str):
            made()
    return asked


def rounded(rows: pd.DataFrame, bits: int) -> pd.DataFrame:
    """Rows of the long table, whose noisy values have `bits` digits of two."""
    whole = (rows["kind"] == "eval") | rows["metric"].isin(WHOLE) | (rows["value"] % 1 == 0)
    share, power = np.frexp(rows["value"].to_numpy())
    return rows.assign(value=rows["value"].where(whole, np.ldexp(np.round(np.ldexp(share, bits)), power - bits)))


def write_compact(rows: pd.DataFrame, order: list[str], schema: pa.Schema, file: Path) -> None:
    """Write `rows` sorted by the columns `order`, packed as small as Parquet can."""
    table = pa.Table.from_pandas(rows.sort_values(order, kind="stable"), preserve_index=False).cast(schema)
    with atomically(file) as writing, TableWriter(writing, schema, smallest=True) as writer:
        writer.append(table)


if __name__ == "__main__":
    guarded(main)
