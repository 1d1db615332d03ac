"""Reads JSON Lines, CSV and Parquet files with exact error messages, and fixes the order in which training visits rows.

The ending of a name tells which: .csv, .parquet, and JSON Lines otherwise. Left out: streaming; the data sets in
question easily fit in memory.
"""

from __future__ import annotations

import csv
import io
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from qerl_core.checks import ConfigError, require
from qerl_core.seeding import derive


def read_rows(path: str | Path) -> dict[str, dict[str, Any]]:
    """The rows of a file by the line where each begins, `line 2`; of Parquet, which has none, by `row 1` and so on.
    Values of CSV are text, and its first row names columns.

    Raises ConfigError, with the line number, if the file is missing, unreadable, empty or not UTF-8, if a line is blank
    or not a JSON object, or a row of CSV has other columns than the first; and for what is no Parquet.
    """
    require(
        not Path(path).exists() or Path(path).is_file(),
        f"cannot read the data file {path}: it is a directory or a device; give a file of JSONL, CSV or Parquet",
    )
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the data file {path}: {error.strerror}; give the path of a file of JSONL, CSV or Parquet"
        ) from error
    if (kind := Path(path).suffix.lower()) in READERS:
        rows = READERS[kind](data, str(path))
        require(bool(rows), f"the data file {path} has no row; it needs one for each question")
        return rows
    lines = data.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n")
    require(lines != [b""], f"the data file {path} is empty; it needs one JSON object per line")
    return {f"line {n}": _row(line, f"{path}, line {n}") for n, line in enumerate(lines, start=1)}


def _csv_rows(data: bytes, where: str) -> dict[str, dict[str, Any]]:
    try:
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        columns, rows = next(reader, []), {}
        line = reader.line_num + 1
        for values in reader:
            require(
                len(values) == len(columns),
                f"{where}, line {line}: {len(values)} values, and the first line names {len(columns)} "
                "columns; a value with commas or line breaks stands in quotes",
            )
            rows[f"line {line}"] = dict(zip(columns, values, strict=True))
            line = reader.line_num + 1
    except (ValueError, csv.Error) as error:  # not UTF-8, or quotes that do not end
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: not a file of CSV in UTF-8 ({error})") from error
    require(len({*columns}) == len(columns), f"{where}: two columns have one name; rename one")
    return rows


def _parquet_rows(data: bytes, where: str) -> dict[str, dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        rows = parquet.read_table(pa.BufferReader(data)).to_pylist()
        return {f"row {n}": row for n, row in enumerate(rows, start=1)}
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{where}: not a Parquet file ({str(error).partition(chr(10))[0]})") from error


READERS = {".csv": _csv_rows, ".parquet": _parquet_rows}


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
        if rb"\ud" in line.lower():  # half of a surrogate pair is JSON, but no text
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # not UTF-8, no text, not JSON, or nested too deeply
        raise ConfigError(f"{where}: not a line of JSON ({error}); each line must be one object") from error
    require(isinstance(row, dict), f"{where}: a JSON object is needed, got {type(row).__name__}")
    return row


def training_indices(step: int, count: int, seed: int, size: int) -> list[int]:
    """The `count` indices, out of `size` rows, that training step `step` (from 1) uses: a pure function.

    Each epoch visits every row once, in a random order. A batch that crosses the end of an epoch continues in the next
    one, so only such a batch can hold a row twice.
    """
    assert step >= 1 and count >= 1 and size >= 1, (step, count, size)
    positions = (divmod(position, size) for position in range((step - 1) * count, step * count))
    return [epoch_order(seed, epoch, size)[index] for epoch, index in positions]


@lru_cache(maxsize=8)
def epoch_order(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    """The permutation of range(size) for `epoch` (from 0), sorted by hashes: the same with every Python version."""
    return tuple(sorted(range(size), key=lambda row: (derive(seed, "epoch", epoch, row), row)))
