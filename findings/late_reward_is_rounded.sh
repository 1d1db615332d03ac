#!/usr/bin/env bash
# DuckDB 2.0.1: the type of a column of JSON lines or CSV comes from its first 20,480 rows. A number with a point behind
# these, where all before were whole, is rounded to a whole one: 0.7 is 1, and 0.5 is 0 in JSON and 1 in CSV. Nothing
# is said, while a text there is an error that names its line. sample_size=-1 reads all rows first.
# Guessed before: an error for both, or a wider type.
# So what: rewards that were 0 for long and then 0.3 are all 0, and their mean too (duckdb/duckdb#25786, #25824).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet duckdb==2.0.1
cd "$folder"
"$folder/env/bin/python" - <<'END'
import json
from pathlib import Path

import duckdb

for late, rounded in ((0.3, (0, 0)), (0.5, (0, 1)), (0.7, (1, 1))):
    values = [0] * 20_480 + [late]
    Path("log.jsonl").write_text("".join(json.dumps({"reward": value}) + "\n" for value in values))
    Path("log.csv").write_text("reward\n" + "".join(f"{value}\n" for value in values))
    for file, reader, number in zip(("log.jsonl", "log.csv"), ("read_json", "read_csv"), rounded, strict=True):
        ((short,),), ((whole,),) = (
            duckdb.sql(f"select max(reward) from {reader}('{file}'{words})").fetchall()
            for words in ("", ", sample_size=-1")
        )
        print(f"{file} ends with {late}: largest {short}, with sample_size=-1 {whole}")
        assert (short, whole) == (number, late), (file, short, whole)
END
