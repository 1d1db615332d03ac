#!/usr/bin/env bash
# lighteval 0.13.0: a model that is always right has an mG-Pass@k of 1 for even k, but of 0 for k = 1, 0.67 for 3 and 0.8 for 5; its
# G-Pass@k is 1 at every threshold. Guessed before: 1, as the mean of G-Pass@k at thresholds from 0.5 to 1.
# The sum runs over i from ceil(k / 2) + 1 to k, as the formula in pull request 589 of huggingface/lighteval does, and is divided
# by k / 2. For odd k it has (k - 1) / 2 terms, so the most is (k - 1) / k. The request says that it equals the integral.
# So what: 3 of 4 right tries have more at k = 2 than 4 of 4 at k = 1. Keep k even; AIME's tasks have 16. Python 3.11 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet lighteval==0.13.0 torch==2.13.0 numpy==2.4.6
"$folder/env/bin/python" - 2>"$folder/words" <<'END' || { cat "$folder/words"; exit 1; }
from lighteval.metrics.metrics_sample import GPassAtK
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.requests import Doc


def grade(k: int, tries: list[str]) -> dict[str, float]:
    """Gives the metrics of tries at a problem whose answer is 18."""
    doc = Doc(query="9 + 9 =", choices=["18"], gold_index=0)
    return GPassAtK(k=k, n=len(tries)).compute(doc=doc, model_response=ModelResponse(text=tries))


for k in (1, 2, 3, 4, 5, 16):
    found = grade(k, ["18"] * 16)
    most = found.pop(f"mg-pass@{k}")
    print(f"k = {k}: G-Pass@k is {min(found.values())} or more, mG-Pass@k {most:.3g}")
    assert set(found.values()) == {1} and abs(most - (k - k % 2) / k) < 1e-9
assert abs(grade(2, ["18", "18", "18", "17"])["mg-pass@2"] - 0.5) < 1e-9
END
