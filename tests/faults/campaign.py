"""`python -m tests.faults.campaign [--faults N] [--kinds WORDS]`: the fault campaign. Exits with 1 if a run is lost.

Every fault happens to a run of its own. N faults are drawn from those of kinds.py, equally many of each kind as far as
it has them. Prints what was lost and a table; `--out docs/reliability.md` also puts the table into that page, and a
line for each fault into faults.csv beside it.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from qerl_bench.options.composer import Composer
from qerl_bench.sweep.check import check_point
from tests.faults.attempt import attempt, preload, write_modules
from tests.faults.kinds import Fault, Stock, all_faults
from tests.faults.run import WORDS, Case, Lost, Outcome, checked, drawing_nothing, numbers
from tests.faults.sabotage import count_operations, killed

RESULTS = ("survived", "refused", "lost", "skipped")
BEGIN, END = "<!-- faults -->", "<!-- end of faults -->"
HEADS = ("fault", "tried", "survived", "refused in words", "lost", "skipped")


def prepare(place: Path) -> Stock:
    """Import what a run imports, and make the run that nothing happens to, and the same run unfinished."""
    modules, count = place / "modules", place / "count"

    def made(state: str, *sabotages) -> Path:
        def sabotage() -> None:
            for each in sabotages:
                each()

        root = place / state
        (root / "runs").mkdir(parents=True)
        ended = checked(attempt([*WORDS, f"root={root}"], drawing_nothing(sabotage)))
        if (ended.code == 0) != (state == "finished"):
            raise SystemExit(f"the run without faults ended with {ended.code}:\n{ended.said}")
        return (root / "runs" / "run").rename(place / "stock" / state)

    (place / "stock").mkdir()
    preload(["qerl_bench.experiment", "qerl_bench.engine.hf", "transformers.models.qwen2.modeling_qwen2"])
    root = place / "finished"
    finished = made("finished", lambda: write_modules(modules), lambda: count_operations(root, count))
    operations = int(count.read_text())
    preload(modules.read_text().split())
    check_point(Composer(), [*WORDS[1:], f"root={place}"])  # fills caches of options, as each attempt would

    def in_step_3() -> None:
        import qerl_bench.experiment as loop

        step = loop.train_step

        def train_step(*arguments):
            if arguments[-1] == 3:
                killed()
            return step(*arguments)

        loop.train_step = train_step

    made("unfinished", in_step_3)
    return Stock(place / "stock", operations, numbers(finished))


def choose(faults: dict[str, list[Fault]], count: int, seed: int) -> list[Fault]:
    """`count` faults, from each kind in turn, in an order that `seed` gives."""
    draw = random.Random(seed)
    left = {kind: draw.sample(of_kind, len(of_kind)) for kind, of_kind in faults.items()}
    chosen: list[Fault] = []
    while len(chosen) < count and any(left.values()):
        chosen += [of_kind.pop() for of_kind in left.values() if of_kind]
    return chosen[:count]


def happen(fault: Fault, stock: Stock, place: Path) -> Outcome:
    case = Case(place, stock.expected, stock.path)
    try:
        return fault.happen(case)
    except Lost as loss:
        return Outcome("lost", str(loss))
    except Exception as error:  # a fault of the campaign itself must not pass for a survivor
        return Outcome("lost", f"the campaign failed: {type(error).__name__}: {error}")


def run_all(faults: Sequence[Fault], stock: Stock, place: Path, jobs: int, until: float) -> list[tuple[Fault, Outcome]]:
    """Let all faults happen, `jobs` at a time in processes of their own, in the order given; none begins after the
    monotonic time `until`."""
    done: dict[int, tuple[Fault, Outcome]] = {}
    running: dict[int, int] = {}
    for number in range(len(faults) + jobs):
        while len(running) >= jobs or (number >= len(faults) and running):
            pid, status = os.waitpid(-1, 0)
            index = running.pop(pid)
            result = (place / f"{index}.result").read_text() if status == 0 else "lost\nthe campaign's process died"
            outcome = Outcome(*result.split("\n", 1))
            done[index] = faults[index], outcome
            if outcome.result == "lost":
                print(f"lost: {faults[index].kind}: {faults[index].place}: {outcome.said}", flush=True)
        if number < len(faults) and time.monotonic() < until:
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                root = place / f"{number}"
                root.mkdir()
                outcome = happen(faults[number], stock, root)
                (place / f"{number}.result").write_text(f"{outcome.result}\n{outcome.said}")
                shutil.rmtree(root, ignore_errors=True)
                os._exit(0)
            running[pid] = number
    return [done[index] for index in sorted(done)]


def table(results: Iterable[tuple[str, str]]) -> str:
    """Kinds and results of faults, counted."""
    counts: dict[str, Counter[str]] = {}
    for kind, result in results:
        counts.setdefault(kind, Counter())[result] += 1
    counts["all"] = sum(counts.values(), Counter())
    rows = [
        f"| {kind} | {of_kind.total() - of_kind['skipped']} | {' | '.join(str(of_kind[each]) for each in RESULTS)} |"
        for kind, of_kind in counts.items()
    ]
    return "\n".join([f"| {' | '.join(HEADS)} |", "|---|" + "---:|" * (len(HEADS) - 1), *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no fault after this time")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0, help="chooses the faults")
    parser.add_argument("--kinds", nargs="*", default=[], help="only kinds whose name contains one of these words")
    parser.add_argument("--out", type=Path, help=f"page whose part behind {BEGIN} is replaced by the table")
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup and shells in the background have ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        place = Path(folder).resolve()
        started = time.monotonic()
        stock = prepare(place)
        kinds = all_faults(stock, random.Random(chosen.seed))
        if chosen.kinds:
            kinds = {kind: kinds[kind] for kind in kinds if any(word in kind for word in chosen.kinds)}
        faults = choose(kinds, chosen.faults, chosen.seed)
        records = run_all(faults, stock, place, chosen.jobs, started + 60 * chosen.minutes)
        records.sort(key=lambda record: list(kinds).index(record[0].kind))
    text = table((fault.kind, outcome.result) for fault, outcome in records)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    busy = sum(usage.ru_utime + usage.ru_stime for usage in used)
    spent = f"{time.monotonic() - started:.0f} s with {chosen.jobs} processes, {busy:.0f} s of CPU"
    print(text, spent, sep="\n\n")
    for reason in sorted({outcome.said for _, outcome in records if outcome.result == "skipped"}):
        print(f"skipped: {reason}")
    if chosen.out:
        head, _, rest = chosen.out.read_text().partition(BEGIN)
        made = f"{time.strftime('%Y-%m-%d')}, `python -m tests.faults.campaign {' '.join(sys.argv[1:])}`, {spent}:"
        chosen.out.write_text(f"{head}{BEGIN}\n{made}\n\n{text}\n{END}{rest.partition(END)[2]}")
        with open(chosen.out.with_name("faults.csv"), "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("fault", "place", "result", "said"))
            writer.writerows((fault.kind, fault.place, outcome.result, outcome.said) for fault, outcome in records)
    return int(any(outcome.result == "lost" for _, outcome in records))


if __name__ == "__main__":
    sys.exit(main())
