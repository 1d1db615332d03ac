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
from pathlib import Path

import duckdb

for late, *rounded in ((0.3, 0, 0), (0.5, 0, 1), (0.7, 1, 1)):
    values = [0] * 20_480 + [late]
    Path("log.json").write_text("".join(f'{{"reward": {value}}}\n' for value in values))
    Path("log.csv").write_text("".join(f"{value}\n" for value in ["reward", *values]))
    for kind, number in zip(("json", "csv"), rounded, strict=True):
        ask = "select max(reward) from read_{0}('log.{0}'{1})".format
        found = [duckdb.sql(ask(kind, more)).fetchall()[0][0] for more in ("", ", sample_size=-1")]
        print(f"log.{kind} ends with {late}: the largest is {found[0]}, with sample_size=-1 {found[1]}")
        assert found == [number, late], (kind, found)
END
