#!/usr/bin/env bash
# lm_eval 0.4.13: the flexible extraction of its task gsm8k takes the last run of two or more of "$", ".", "," and digits, with a
# digit in it or not. After 18, an ellipsis ("so she has 18 left ...") or the end of a displayed formula ("$$ x = 18 $$") is taken
# for the answer, which is wrong then. Guessed before: the last number.
# Issue 3214 of EleutherAI/lm-evaluation-harness, of values as $29.00, does not name it.
# So what: accuracy depends on how a model ends its text, and one that ends with a displayed formula has none. Look at
# filtered_resps before two models are compared. Python 3.11 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet lm_eval==0.4.13 numpy==2.4.6
"$folder/env/bin/python" - 2>"$folder/words" <<'END' || { cat "$folder/words"; exit 1; }
from pathlib import Path

import lm_eval
import yaml
from lm_eval.api.metrics import exact_match_hf_evaluate
from lm_eval.filters.extraction import RegexFilter

task = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml").read_text(encoding="utf-8"))
filters = {chain["name"]: chain["filter"][0] for chain in task["filter_list"]}
flexible = {key: value for key, value in filters["flexible-extract"].items() if key != "function"}
ignored = task["metric_list"][0]["regexes_to_ignore"]


def grade(text: str) -> tuple[str, bool]:
    """Gives what is extracted, and whether it counts as 18."""
    ((found,),) = (list(kept) for kept in RegexFilter(**flexible).apply([[text]], [{}]))
    right = bool(exact_match_hf_evaluate([found], ["18"], regexes_to_ignore=ignored, ignore_case=True)["exact_match"])
    print(f"{text!r:38} {found!r:10} {'right' if right else 'wrong'}")
    return found, right


for text in ("She has 18 left.", "She has $18, so.", "$$18$$", "She has 18 left. . ."):
    assert grade(text)[1]
assert grade("She has 18 left ...") == ("...", False)
assert grade("$$\nx = 18\n$$") == grade("$$ x = 18 $$") == ("$$", False)
assert grade("She has 18...") == ("18...", False)
END
