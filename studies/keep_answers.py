"""Cuts what probes packed down for the checkout: texts and parsed answers of the first questions, probes as gzip.

    python studies/keep_answers.py FOLDER [questions=4]

FOLDER is what `qerl-bench gates` or `study` packed. Entropies are rounded to half precision, which is three digits.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet

from qerl_bench.commands.exits import guarded
from qerl_bench.process.arguments import KeyValueParser
from qerl_bench.rundir.durable import replace
from qerl_bench.studies.conduct.packing import ANSWERS
from qerl_bench.studies.design.sessions import PROBES

ORDER = ["temperature", "question", "quant", "base", "sample"]


def main(arguments: list[str] | None = None) -> None:
    parser = KeyValueParser(__doc__)
    parser.add_argument("folder", type=Path, help="with probe_answers.parquet")
    parser.add_argument("--questions", type=int, default=4, help="whose texts are kept (default: 4)")
    options = parser.parse_args(arguments)
    file = options.folder / ANSWERS
    schema = parquet.read_schema(file)
    rows: Any = pd.read_parquet(file)
    told = rows["question"][rows["completion"].notna()].unique()[: options.questions]
    for column in ("answer", "completion"):
        rows[column] = rows[column].where(rows["question"].isin(told))
    rows["entropy"] = rows["entropy"].astype("float16").astype("float32")
    table = pa.Table.from_pandas(rows.sort_values(ORDER, kind="stable"), schema=schema, preserve_index=False)
    writing = file.with_name(f".{file.name}.writing")
    parquet.write_table(table, writing, compression="zstd", compression_level=19)
    replace(writing, file)
    probes = options.folder / PROBES
    if probes.is_file():
        packed = json.dumps(json.loads(probes.read_text()), separators=(",", ":")).encode()
        probes.with_name(f"{PROBES}.gz").write_bytes(gzip.compress(packed, mtime=0))
        probes.unlink()
    print(f"{file}: {file.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    guarded(main)
