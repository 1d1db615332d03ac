#!/usr/bin/env bash
# verl 0.9.1: its grader prime_math, which by reading default_compute_score takes for data sources numina_*, counts 65535 as 65536, 10001 as 10000,
# and 1800 and 0.18 as 18. Its grade_answer says that an integer has to match, and says no; what it refuses is then compared as a
# float, by reading within 0.01 % of the answer, of 100 times it, or of a hundredth. Guessed before: integers match or are wrong.
# So what: off by one is right from 10000 on, and so are slips by 100. Answers below 1000, as AIME's, are safe from the first only.
# Its packages' __init__ need ray, so they are left out here; sources are as installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 sympy==1.14.0 pylatexenc==2.10
"$folder/env/bin/pip" install --quiet --no-deps verl==0.9.1
"$folder/env/bin/python" - <<'END'
import sys
from importlib.metadata import files
from types import ModuleType

root = next(file for file in files("verl") if str(file) == "verl/__init__.py").locate().parent
for name, path in (("verl", root), ("verl.utils", root / "utils")):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [str(path)]
from verl.utils.reward_score.prime_math import compute_score, grade_answer

for given, answer in ((65535, 65536), (10001, 10000), (1800, 18), (0.18, 18), (17, 18), (9998, 9999)):
    right = compute_score(f"It is \\boxed{{{given}}}.", str(answer))[0]
    print(f"{given} for {answer}: {'right' if right else 'wrong'}")
    assert not grade_answer(str(given), str(answer))
    assert right == (given not in (17, 9998))
END
