#!/usr/bin/env bash
# datasets 5.2.0 with numpy 2.4.6: a mask is read as row numbers, 0 for False and 1 for True. ds[mask], ds["column"][mask] and
# ds.select(mask) give as many rows as there are, all of them copies of the first two, and nothing is said. Lists and pandas' masks
# are read so as well, but refused by select().
# Guessed before: the rows where the mask is True, as in numpy, torch and pandas, or an error.
# So what: the problems that a model solved become two problems, in a table of the right length. Select np.flatnonzero(mask).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet datasets==5.2.0 numpy==2.4.6 pandas==3.1.1 pyarrow==26.0.1
export HF_HOME="$folder/home" HF_HUB_OFFLINE=1
"$folder/env/bin/python" - <<'END'
import warnings

import numpy as np
import pandas as pd
from datasets import Dataset

warnings.simplefilter("error")
rows = {"problem": ["a", "b", "c", "d", "e"], "reward": [0.0, 0.0, 1.0, 1.0, 0.0]}
ds = Dataset.from_dict(rows)
mask = ds.with_format("numpy")["reward"][:] > 0
assert mask.dtype == bool and mask.tolist() == [False, False, True, True, False]
for name, form in {"numpy": mask, "list": mask.tolist(), "pandas": pd.Series(mask)}.items():
    found = {"ds[mask]": ds[form]["problem"], "column[mask]": ds["problem"][form]}
    try:
        found["select(mask)"] = list(ds.select(form)["problem"])
    except TypeError as error:
        print(f"{name}: select(mask) raises {type(error).__name__}: {error}")
    print(f"{name}: {found}")
    assert all(part == ["a", "a", "b", "b", "a"] for part in found.values())
    assert ("select(mask)" in found) == (name == "numpy")
assert ds.select(np.flatnonzero(mask))["problem"][:] == ["c", "d"]
END
