"""The run that every fault happens to, what counts as its numbers, and how an attempt at it is judged."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.attempt import Ended, Sabotage, attempt

WORDS = (
    "run",
    "device=cpu",
    "steps=4",
    "save_every=2",
    "model.layers=1",
    "model.hidden_size=32",
    "model.heads=2",
    "model.kv_heads=1",
    "model.intermediate_size=64",
    "model.warm_start_steps=0",
    "quant=nvfp4",
    "aqn=exp",
    "lora.rank=4",
    "task.max_completion_tokens=6",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "train.entropy_coef=0.01",
    "optim.warmup_steps=0",
    "eval=quick",
    "eval.questions=2",
    "name=run",
)
EPSILON = 2.0**-23  # of FP32
ROUNDINGS = 16  # what other shapes of the same matrix products may change in a number, in EPSILON of it or of 1
MEASURED = re.compile(r"^(time|time/.*|speed/.*|memory/.*)$")  # what a clock or the memory meter says


READ: dict[str, Callable[[Any], Any]] = {"metrics": list, "evaluation": json.loads}  # what may be rounded otherwise


class Lost(Exception):
    """A fault that the run neither survived nor refused in words."""


@dataclass(frozen=True)
class Outcome:
    """`result` is survived, refused or skipped; `said` the message of a refusal, or the reason to skip."""

    result: str
    said: str = ""


SURVIVED = Outcome("survived")


@dataclass(frozen=True)
class Stock:
    """What the campaign prepared: a folder with the runs unfinished/ and finished/, which are of WORDS, the number of
    file operations of such a run, its numbers, and those of other runs."""

    path: Path
    operations: int
    expected: dict[str, Any]
    others: dict[str, dict[str, Any]]


def numbers(folder: Path) -> dict[str, Any]:
    """Everything that a run has computed, without what a clock says."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "metrics": [{key: record[key] for key in record if not MEASURED.match(key)} for record in records],
        "rollouts": (folder / "rollouts.jsonl").read_text(),
        "evaluation": (folder / "eval.json").read_text(),
        "adapters": {
            file.parents[1].name: file.read_bytes()
            for file in sorted(folder.glob("checkpoints/step_*/adapter/adapter_model.safetensors"))
        },
    }


def roundings(found: Any, expected: Any) -> float:
    """The largest gap between two numbers at the same place, in EPSILON of the larger or of 1; inf if anything else
    differs. Log-probabilities are sums of a few nats, and what is computed of their small differences keeps that error.
    """
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        return max((roundings(found[key], expected[key]) for key in found), default=0.0)
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        return max((roundings(*pair) for pair in zip(found, expected, strict=True)), default=0.0)
    if isinstance(found, float) and isinstance(expected, float):
        return abs(found - expected) / max(abs(found), abs(expected), 1.0) / EPSILON
    return 0.0 if found == expected else math.inf


@dataclass(frozen=True)
class Case:
    """A folder for one fault, and the numbers of the run that nothing happened to."""

    root: Path
    expected: dict[str, Any]
    stock: Path  # holds unfinished/ and finished/, run folders to copy, and models
    others: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # numbers of other runs, by name
    base: tuple[str, ...] = WORDS

    @property
    def folder(self) -> Path:
        return self.root / "runs" / "run"

    def copy(self, state: str) -> Path:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        return shutil.copytree(self.stock / state, self.folder)

    def attempt(self, sabotage: Sabotage | None = None, *words: str) -> Ended:
        """One attempt, which must neither hang nor show a traceback."""
        return checked(attempt(self.words(*words), drawing_nothing(sabotage)))

    def words(self, *words: str) -> list[str]:
        return [*self.base, f"root='{self.root}'", *words]

    def ends(self, *words: str, said: str = "", rounded: bool = False) -> Outcome:
        """The same command without a fault: it must end with the expected numbers (`require_numbers`). The outcome is
        a refusal if something was `said` before, else survival."""
        ended = self.attempt(None, *words)
        if ended.code != 0:
            raise Lost(f"does not continue: exit code {ended.code}: {ended.words}")
        self.require_numbers(rounded=rounded)
        return Outcome("refused", said) if said else SURVIVED

    def require_numbers(self, folder: Path | None = None, rounded: bool = False) -> None:
        """Raise Lost unless the run is complete with the expected numbers.

        Half the rows have other matrix products, which every CPU rounds in its own way: if so `rounded`, metrics and
        evaluation may differ by ROUNDINGS. Texts and adapters may not: training computes log-probabilities itself.
        """
        folder = folder or self.folder
        if not (folder / "done.json").exists():
            raise Lost("exit code 0 without done.json")
        found = numbers(folder)
        saved = found["adapters"]  # a signal may have left a checkpoint more
        found["adapters"] = {step: saved[step] for step in saved if step in self.expected["adapters"]}
        different = [name for name, value in self.expected.items() if found[name] != value]
        if rounded:
            gaps = {name: roundings(*map(READ[name], (found[name], self.expected[name]))) for name in READ}
            different = [name for name in different if gaps.get(name, math.inf) > ROUNDINGS]
        if different:
            raise Lost(f"other numbers: {', '.join(different)}")

    def in_words(self, ended: Ended, *codes: int) -> str:
        """The message of an attempt that must have ended with one of `codes`."""
        if ended.code not in codes:
            raise Lost(f"exit code {ended.code}: {ended.words}")
        if not ended.words:
            raise Lost(f"exit code {ended.code} without a word")
        return " ".join(ended.words.replace(str(self.root), "ROOT").split())


def require_killed(ended: Ended, signum: int = signal.SIGKILL) -> None:
    if ended.code not in (-signum, 0):
        raise Lost(f"exit code {ended.code} instead of a kill: {ended.words}")


def checked(ended: Ended) -> Ended:
    if ended.hung:
        raise Lost(ended.words)
    if "Traceback (most recent call last)" in ended.said:
        raise Lost(f"traceback: {ended.words}")
    return ended


def drawing_nothing(sabotage: Sabotage | None) -> Callable[[], None]:
    """`sabotage`, and no figures, which take longer than the steps of this run."""

    def both() -> None:
        import qerl_studies.figures.run as figures

        figures.run_figures = lambda run_dir: []
        if sabotage is not None:
            sabotage()

    return both


def remedy(case: Case, said: str, file: str) -> None:
    """Do what the message of a refusal says."""
    folder = case.folder
    if found := re.search(r"step_\d+", said) if "Delete this folder" in said else None:
        shutil.rmtree(folder / "checkpoints" / found[0])
        if "done.json" in said.partition("Delete")[2]:
            (folder / "done.json").unlink()
    elif found := re.search(r"[Dd]elete ([\w./, ]+?),? and the same command", said):
        for name in re.split(r",| and ", found[1]):
            path = folder / (file if name.strip() == "it" else name.strip())
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    elif "delete the folder to run it again" in said:
        shutil.rmtree(folder)
    else:
        raise Lost(f"no remedy: {said}")


def require_whole(folder: Path) -> None:
    """Raise Lost if a run that was taken for whole is not. Of its checkpoints only the last one is read by anybody."""
    from qerl_core.checks import ConfigError
    from qerl_core.rundir.checkpoints import check_checkpoint, last_checkpoint
    from qerl_core.rundir.run_checks import check_records

    try:
        check_records(folder, "")
        check_checkpoint(last_checkpoint(folder) or folder)
    except ConfigError as error:
        raise Lost(f"undetected: {error}") from error
