"""Where the time of a run goes until its first step is made, twice: with nothing kept from earlier, and once more.

`python benchmarks/first_step.py model=FILE.gguf task=gsm8k task.train_file=A task.eval_file=B` takes words of a run.
Caches lie in a folder of their own, so that the first start finds none. A stage is a phase that the run tells of; its
seconds are without those of stages within. What is in no phase that has ended, as options and files, stands below
them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from qerl_core.process.installation import PACKAGE

OTHER, ALL, CPU = "between phases", "until the first step is made", "CPU seconds until then"
LAST = "train"  # the phase with which a step ends
# A run that writes how long its phases took to the file of the first word, and ends when the first step is made.
TIMED = f"""
import sys, time
begun = time.perf_counter()
import json, os
from qerl_core.process import progress
file, sys.argv = sys.argv[1], ["run.py", *sys.argv[2:]]
seconds, inner = {{}}, [0.0]
def own(end):
    def ends(watch, phase):
        end(watch, phase)
        within = inner.pop() if len(inner) > 1 else 0.0
        inner[-1] += phase.elapsed_s
        seconds[phase.label] = seconds.get(phase.label, 0.0) + phase.elapsed_s - within
        if phase.label == {LAST!r}:
            all_s = time.perf_counter() - begun
            seconds[{OTHER!r}] = all_s - sum(seconds.values())
            told = {{**seconds, {ALL!r}: all_s, {CPU!r}: sum(os.times()[:4])}}
            open(file, "w").write(json.dumps(told))
            os._exit(0)
    return ends
def opens(begin):
    def begins(watch, phase):
        inner.append(0.0)
        begin(watch, phase)
    return begins
progress.Watch.begin, progress.Watch.end = opens(progress.Watch.begin), own(progress.Watch.end)
from qerl_bench.__main__ import main
main(["run", *sys.argv[1:]])
"""


def start(words: list[str], folder: Path) -> dict[str, float]:
    """Seconds of each stage of a run that begins in `folder`, whose caches later starts find."""
    file, environment = folder / "seconds.json", {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    file.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", TIMED, str(file), *words], env=environment, capture_output=True, text=True
    )
    if done.returncode or not file.exists():
        sys.exit(f"the run failed:\n{done.stderr}")
    return json.loads(file.read_text())


def main() -> None:
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & {*words}:
        sys.exit(__doc__)
    sys.path.insert(0, str(PACKAGE.parent))
    with TemporaryDirectory() as name:
        folder = Path(name)
        first, second = (start([*words, f"root={folder}", f"seed={seed}"], folder) for seed in (0, 1))
    print("| stage | first start, s | second start, s |\n|---|---|---|")
    ends = (OTHER, ALL, CPU)
    for stage in [*(one for one in {**first, **second} if one not in ends), *ends]:
        print(f"| {stage} | {first.get(stage, 0.0):.1f} | {second.get(stage, 0.0):.1f} |")
    print(f"\nthe second start is {first[ALL] / second[ALL]:.2f} times as fast")


if __name__ == "__main__":
    main()
