#!/usr/bin/env bash
# datasets 5.2.0: a key that the function of map() or the generator of from_generator() gives for later rows but not for row 0 is left
# out, with its values, and nothing is said. In map() that holds with `features` that declare it as well: the column is there, and
# None in every row. The same rows have it if read from JSON lines, or from a generator with `features`. Rows are written by the
# thousand: a key that the first row of a later thousand has, and row 0 has not, is an error.
# Guessed before: None where it was not given, as from JSON lines; and with `features` the values that were given.
# So what: an "error" given for the rows that failed is gone where row 0 was fine. Give every key in every row, if need be with None.
# That the first row decides is documented for from_list() only. An IterableDataset of the generator has the key, until a Dataset of
# that generator is in the cache (guessed: whatever is in it).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet datasets==5.2.0 numpy==2.4.6 pandas==3.1.1 pyarrow==26.0.1
export HF_HOME="$folder/home" HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1
cd "$folder"
"$folder/env/bin/python" -W error - <<'END'
import json
from pathlib import Path

from datasets import Dataset, Features, IterableDataset, Value


def graded(row: dict) -> dict:
    """As a grader would say it: every third row has failed, but not row 0."""
    return {"reward": 0, "error": "no number"} if row["n"] % 3 == 1 else {"reward": 1}


def rows(count: int):
    for n in range(count):
        yield {"n": n, **graded({"n": n})}


Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(3)))
features = Features({"n": Value("int64"), "reward": Value("int64"), "error": Value("string")})
numbers = Dataset.from_dict({"n": [0, 1, 2]})
before = list(IterableDataset.from_generator(rows, gen_kwargs={"count": 3}))
found = {
    "map": numbers.map(graded)[:],
    "map with features": numbers.map(graded, features=features)[:],
    "from_generator": Dataset.from_generator(rows, gen_kwargs={"count": 3})[:],
    "from_generator with features": Dataset.from_generator(rows, gen_kwargs={"count": 3}, features=features)[:],
    "from_json": Dataset.from_json("rows.jsonl")[:],
}
for name, columns in found.items():
    print(f"{name}: {columns}")
after = list(IterableDataset.from_generator(rows, gen_kwargs={"count": 3}))
print(f"IterableDataset before from_generator: {before[1]}, after: {after[1]}")
kept = [None, "no number", None]
assert {name: columns.get("error") for name, columns in found.items()} == {
    "map": None,
    "map with features": [None] * 3,
    "from_generator": None,
    "from_generator with features": kept,
    "from_json": kept,
}
assert before[1]["error"] == "no number" and "error" not in after[1]
large = Dataset.from_dict({"n": [*range(1500)]})  # of 0 and 1000, which begin a thousand, only the second fails
try:
    large.map(graded)
    raise SystemExit("no error for a key in row 1000")
except KeyError as error:
    print(f"map of 1500 rows: KeyError {error}")
assert large.select(range(1000)).map(graded).column_names == ["n", "reward"]
swapped = Dataset.from_dict({"n": [1, 0]}).map(lambda row: {"reward": 1, "error": None, **graded(row)})
assert swapped["error"][:] == ["no number", None]
END
