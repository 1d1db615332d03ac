"""W&B's records of runs that are killed, continued, moved, copied or run again, at a service that this file plays.

As W&B does, it takes no step before the last one that it has of a record, and a killed process has not sent its last
lines yet.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.faults import sabotage
from tests.faults.attempt import Ended
from tests.faults.damage import HARMS
from tests.faults.run import MEASURED, SURVIVED, Case, Lost, Outcome, require_killed

WORDS = ("logger=wandb", "logger.mode=offline")
LATE = 2  # lines that wait until others follow or the run ends
BEGUN, SAVED = (2,), (3, 4)  # steps before and behind the first checkpoint


@dataclass
class Service:
    """What is known of each record: a file of lines, by its id."""

    place: Path

    def install(self) -> None:
        """Be the package wandb of this process."""

        class UsageError(Exception):
            pass

        errors = SimpleNamespace(AuthenticationError=UsageError, UsageError=UsageError)
        package = SimpleNamespace(init=self.begin, errors=errors, Settings=dict, __spec__=None)
        sys.modules |= {"wandb": package, "wandb.errors": errors}  # type: ignore[dict-item]
        import qerl_bench.logger.wandb as module

        module.require_package = lambda *arguments: None

    def begin(self, *, id: str, **more: Any) -> Any:
        self.place.mkdir(exist_ok=True)
        file = self.place / f"{id}.jsonl"
        file.touch()
        waiting: list[str] = []
        last = max((step for step, _ in self.lines(id)), default=-1)
        reached = [last]

        def send(kept: int) -> None:
            with open(file, "a") as lines:
                lines.writelines(waiting[: len(waiting) - kept])
            del waiting[: len(waiting) - kept]

        def log(metrics: dict[str, float], step: int) -> None:
            if step >= reached[0]:
                reached[0] = step
                waiting.append(json.dumps([step, metrics]) + "\n")
                send(LATE)

        known = {"starting_step": last + 1, "summary": {}, "settings": SimpleNamespace(mode="offline")}
        return SimpleNamespace(**known, log=log, finish=lambda exit_code: send(0))

    def lines(self, id: str) -> list[tuple[int, dict[str, Any]]]:
        written = (self.place / f"{id}.jsonl").read_text().splitlines()
        return [(step, metrics) for step, metrics in map(json.loads, written)]

    def ids(self) -> set[str]:
        return {file.stem for file in self.place.glob("*.jsonl")}

    def require_whole(self, id: str, folder: Path) -> None:
        """Raise Lost unless the record has each number of training that the run has."""
        known: dict[int, dict[str, Any]] = {}
        for step, metrics in self.lines(id):
            known.setdefault(step, {}).update(metrics)
        for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
            for key, value in line.items():
                if line["kind"] == "train" and key not in ("kind", "step") and not MEASURED.match(key):
                    found = known.get(line["step"], {}).get(key)
                    if found != value:
                        raise Lost(f"record {id} has {key} {found} at step {line['step']}, and the run {value}")


def kept(folder: Path) -> str:
    return json.loads((folder / "mirror.json").read_text())["wandb"]


def killed_before(step: int) -> None:
    import qerl_bench.experiment as loop

    original = loop.train_step

    def train_step(*given: Any) -> Any:
        if given[-1] == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*given)

    loop.train_step = train_step


def mirrors(operations: range, draw: random.Random) -> dict[str, Callable[[Case], Outcome]]:
    places = {f"killed before step {step}": partial(continued_before, step) for step in (*BEGUN, *SAVED)}
    places |= {f"killed at operation {n}": partial(continued_at, n) for n in draw.sample(operations, 30)}
    places |= {f"{name} before step {step}": partial(kind, step) for name, kind in FOLDERS.items() for step in SAVED}
    return places | {f"mirror.json before step 4: {name}": partial(damaged_ids, name) for name in HARMS}


def attempt(case: Case, service: Service, harm: Callable[[], object] | None = None) -> Ended:
    def both() -> None:
        service.install()
        if harm is not None:
            harm()

    return case.attempt(both, *WORDS)


def ends(case: Case, service: Service) -> str:
    """The id of the record of a run that must end now, with its numbers, and with all of them in that record."""
    ended = attempt(case, service)
    if ended.code != 0:
        raise Lost(f"exit code {ended.code}: {ended.words}")
    if "is off" in ended.said:
        raise Lost("the mirror is off")
    case.require_numbers()
    service.require_whole(id := kept(case.folder), case.folder)
    return id


def continued_before(step: int, case: Case) -> Outcome:
    return continued(partial(killed_before, step), case)


def continued_at(number: int, case: Case) -> Outcome:
    return continued(partial(sabotage.killed_at_operation, case.root, number), case)


def continued(harm: Callable[[], object], case: Case) -> Outcome:
    """One record of a run that is killed and continued; one that begins again begins another record."""
    service = Service(case.root / "service")
    require_killed(attempt(case, service, harm))
    before = kept(case.folder) if [*case.folder.glob("checkpoints/step_*/manifest.json")] else None
    after = ends(case, service)
    if before is not None and before != after:
        raise Lost(f"continued in another record: {after} after {before}")
    return SURVIVED


def begun(step: int, case: Case) -> tuple[Service, str]:
    """The service, and the record in it of a run that was killed before `step`."""
    service = Service(case.root / "service")
    require_killed(attempt(case, service, partial(killed_before, step)))
    return service, kept(case.folder)


def moved(step: int, case: Case) -> Outcome:
    """A run whose folder is moved keeps its record."""
    service, before = begun(step, case)
    other = replace(case, root=case.root / "other")
    other.folder.parent.mkdir(parents=True)
    case.folder.rename(other.folder)
    if ends(other, service) != before or service.ids() != {before}:
        raise Lost("a moved run has another record")
    return SURVIVED


def copied(step: int, case: Case) -> Outcome:
    """A copy of a run begins a record of its own, and that of the first keeps its lines."""
    service, first = begun(step, case)
    lines = service.lines(first)
    other = replace(case, root=case.root / "other")
    shutil.copytree(case.folder, other.folder)
    second = ends(other, service)
    if second == first or service.lines(first) != lines:
        raise Lost("a copy writes to the record of the run that it was copied from")
    if ends(case, service) != first or service.ids() != {first, second}:
        raise Lost("the run that was copied has another record")
    return SURVIVED


def run_again(step: int, case: Case) -> Outcome:
    """A run that was deleted and is run again does not go on in the old record."""
    service, first = begun(step, case)
    lines = service.lines(first)
    shutil.rmtree(case.folder)
    if ends(case, service) == first or service.lines(first) != lines:
        raise Lost("a run that was deleted goes on in its old record")
    return SURVIVED


FOLDERS = {"moved": moved, "copied": copied, "deleted and run again": run_again}


def damaged_ids(name: str, case: Case) -> Outcome:
    """Whatever becomes of mirror.json, the run ends, and one record has all of it."""
    service = Service(case.root / "service")
    require_killed(attempt(case, service, partial(killed_before, 4)))
    HARMS[name](case.folder / "mirror.json")
    ends(case, service)
    return SURVIVED
