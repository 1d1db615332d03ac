#!/usr/bin/env bash
# statsmodels 0.15.0: McNemar's test with exact=False has p = 0 for two models that agree on every problem, and p = 1 once they differ
# on one. Its correction, on by default, takes 1 from |b - c| and squares what is left, -1 where b = c: the statistic is 1 / (b + c),
# so b = c = 1 has p = 0.48 and b = c = 5 has 0.75. Only for b = c = 0 numpy warns, of a division by zero.
# Guessed before: 1 wherever b = c, or NaN where both are 0, as without the correction.
# So what: a checkpoint compared with itself differs at every level. With exact=True, the default, all of these are 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet statsmodels==0.15.0 scipy==1.17.1 numpy==2.4.6 pandas==3.1.1
"$folder/env/bin/python" -W ignore - <<'END'
import numpy as np
from statsmodels.stats.contingency_tables import mcnemar

found = {}
for b, c in ((0, 0), (1, 0), (1, 1), (5, 5)):
    table = np.array([[80, b], [c, 20]])
    exact = mcnemar(table, exact=True).pvalue
    bare = mcnemar(table, exact=False, correction=False).pvalue
    found[b, c] = result = mcnemar(table, exact=False)
    print(f"b = {b}, c = {c}: p = {result.pvalue:.4g} (statistic {result.statistic:.4g}); exact {exact:.4g}, uncorrected {bare:.4g}")
    assert exact == 1
    assert np.isnan(bare) if b == c == 0 else b != c or bare == 1
assert found[0, 0].pvalue == 0 and np.isinf(found[0, 0].statistic)
assert found[1, 0].pvalue == 1
assert found[1, 1].statistic == 0.5 and round(found[1, 1].pvalue, 2) == 0.48
assert found[5, 5].statistic == 0.1 and round(found[5, 5].pvalue, 2) == 0.75
END
