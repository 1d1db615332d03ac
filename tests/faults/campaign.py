"""`python -m tests.faults.campaign [--faults N] [--kinds WORDS]`: the fault campaign. Exits with 1 if a run is lost.

Every fault happens to a run of its own. N faults are drawn from those of kinds.py, equally many of each kind as far as
it has them. Prints what was lost and a table. `--out docs/reliability.md` also puts the table into that page, and a
line for each fault into faults.csv beside it, as soon as it has happened: with `--resume` the same command goes on
behind those lines. Runs are on the CPU, and see no GPU.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from qerl_bench.sweep.check import check_point
from qerl_core.options.composer import Composer
from tests.faults import beside, foreign
from tests.faults.attempt import attempt, preload, write_modules
from tests.faults.kinds import IN_WORDS, Fault, all_faults, harmless
from tests.faults.run import WORDS, Case, Lost, Outcome, Stock, checked, drawing_nothing, numbers
from tests.faults.sabotage import count_operations, killed

RESULTS = ("survived", "refused", "lost", "skipped")
BEGIN, END = "<!-- faults -->", "<!-- end of faults -->"
COLUMNS = ("fault", "place", "result", "said", "seconds")
Record = Callable[[Fault, Outcome, float], None]
SAID = 100  # characters of a message that faults.csv keeps
HEADS = ("fault", "tried", "survived", "refused in words", "lost", "skipped")


def prepare(place: Path) -> Stock:
    """Import what a run imports, and make the run that nothing happens to, and the same run unfinished."""
    modules, count = place / "modules", place / "count"
    os.environ["XDG_CACHE_HOME"] = str(place / "home")

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
    preload([f"qerl_studies.commands.{name}" for name in beside.READERS])
    foreign.write_models(place / "stock")
    others = {name: undisturbed(place / name, place / "stock") for name, undisturbed in (foreign.UNDISTURBED).items()}
    others["beside"] = beside.prepare(place / "stock", place / "beside")
    return Stock(place / "stock", operations, numbers(finished), others)


def choose(faults: dict[str, list[Fault]], count: int, seed: int) -> list[Fault]:
    """`count` faults, from each kind in turn, in an order that `seed` gives."""
    draw = random.Random(seed)
    left = {kind: draw.sample(of_kind, len(of_kind)) for kind, of_kind in faults.items()}
    chosen: list[Fault] = []
    while len(chosen) < count and any(left.values()):
        chosen += [of_kind.pop() for of_kind in left.values() if of_kind]
    return chosen[:count]


def happen(fault: Fault, stock: Stock, place: Path) -> Outcome:
    case = Case(place, stock.expected, stock.path, stock.others)
    try:
        return fault.happen(case)
    except Lost as loss:
        return Outcome("lost", str(loss))
    except Exception as error:  # a fault of the campaign itself must not pass for a survivor
        return Outcome("lost", f"the campaign failed: {type(error).__name__}: {error}")


def run_all(faults: Sequence[Fault], stock: Stock, place: Path, jobs: int, until: float, record: Record) -> None:
    """Let all faults happen, `jobs` at a time in processes of their own, in the order given; none begins after the
    monotonic time `until`. Calls `record` after each."""
    running: dict[int, tuple[int, float]] = {}
    for number in range(len(faults) + jobs):
        while len(running) >= jobs or (number >= len(faults) and running):
            pid, status = os.waitpid(-1, 0)
            index, began = running.pop(pid)
            result = (place / f"{index}.result").read_text() if status == 0 else "lost\nthe campaign's process died"
            record(faults[index], Outcome(*result.split("\n", 1)), time.monotonic() - began)
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
            running[pid] = number, time.monotonic()


class Records:
    """The file of all that has happened, a row for each fault."""

    def __init__(self, path: Path | None, resume: bool) -> None:
        self._path, self.rows = path, list[dict[str, str]]()
        if path and path.exists() and resume:
            with open(path, newline="") as file:
                self.rows = [row for row in csv.DictReader(file) if row.get("seconds")]  # a kill may have cut the last
        self.write(self.rows)

    def add(self, fault: Fault, outcome: Outcome, seconds: float) -> None:
        said = " ".join(outcome.said.split())[:SAID]
        values = (fault.kind, fault.place, outcome.result, said, f"{seconds:.1f}")
        self.rows.append(dict(zip(COLUMNS, values, strict=True)))
        if outcome.result == "lost":
            print(f"lost: {fault.kind}: {fault.place}: {said}", flush=True)
        if self._path:
            with open(self._path, "a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(values)

    def write(self, rows: list[dict[str, str]]) -> None:
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(whole := self._path.with_suffix(".part"), "w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerows([COLUMNS, *(tuple(row[name] for name in COLUMNS) for row in rows)])
            os.replace(whole, self._path)

    def happened(self) -> set[tuple[str, str]]:
        return {(row["fault"], row["place"]) for row in self.rows}


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
    parser.add_argument("--harmless", action="store_true", help="one fault of each kind that does no harm")
    parser.add_argument("--out", type=Path, help=f"page whose part behind {BEGIN} becomes the table, or a new file")
    parser.add_argument("--resume", action="store_true", help="let happen only what faults.csv beside --out lacks")
    chosen = parser.parse_args()
    records_file = chosen.out and chosen.out.with_name("faults.csv")
    if chosen.out and chosen.out.name == records_file.name:
        parser.error(
            f"--out {chosen.out} is the name of the record beside it: give the page another one, such as page.md"
        )
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)  # of Python 3.12
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup and shells in the background have ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    records = Records(records_file, chosen.resume)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        place = Path(folder).resolve()
        stock = prepare(place)
        kinds = all_faults(stock, random.Random(chosen.seed))
        if chosen.harmless:
            untried = kinds.keys() - harmless().keys() - IN_WORDS
            assert not untried, f"harmless() has none of {untried}"
            kinds = harmless()
        if chosen.kinds:
            kinds = {kind: kinds[kind] for kind in kinds if any(word in kind for word in chosen.kinds)}
        happened = records.happened()
        faults = [
            fault for fault in choose(kinds, chosen.faults, chosen.seed) if (fault.kind, fault.place) not in happened
        ]
        run_all(faults, stock, place, chosen.jobs, started + 60 * chosen.minutes, records.add)
    rows = sorted(records.rows, key=lambda row: list(kinds).index(row["fault"]) if row["fault"] in kinds else -1)
    records.write(rows)
    text = table((row["fault"], row["result"]) for row in rows)
    spent = f"{sum(float(row['seconds']) for row in rows):.0f} s of faults, {chosen.jobs} at a time"
    print(text, f"{spent}; {time.monotonic() - started:.0f} s by the clock", sep="\n\n")
    for reason in sorted({row["said"] for row in rows if row["result"] == "skipped"}):
        print(f"skipped: {reason}")
    if chosen.out:
        page = chosen.out.read_text() if chosen.out.exists() else ""
        head, _, rest = page.partition(BEGIN)
        made = f"{time.strftime('%Y-%m-%d')}, `python -m tests.faults.campaign {' '.join(sys.argv[1:])}`, {spent}:"
        chosen.out.write_text(f"{head}{BEGIN}\n{made}\n\n{text}\n{END}{rest.partition(END)[2]}")
    return int(any(row["result"] == "lost" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
