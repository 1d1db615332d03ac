"""The parts of a probe that are known, a JSON file each, so that one that was stopped or killed goes on behind them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qerl_bench.engine.base import RolloutEngine
from qerl_bench.probe.answers import AnswerSet, sample_answers
from qerl_bench.task.base import Task
from qerl_core.process.device import peak_gib
from qerl_core.records import Prompt, Rollout
from qerl_core.rundir.durable import remove, write_atomically

log = logging.getLogger(__name__)
PAGE = "probe.md"
Keep = Callable[[str, Callable[[], Any]], Any]  # a part by its name: the known one, or what the function gives


def anew(name: str, make: Callable[[], Any]) -> Any:
    """Keeps nothing."""
    return make()


class Parts:
    """The parts in `folder`/parts-KEY, where KEY stands for all that decides their numbers, `asked`."""

    def __init__(self, folder: Path, asked: str) -> None:
        self.folder = folder / f"parts-{hashlib.sha256(asked.encode()).hexdigest()[:8]}"
        if known := len([*self.folder.glob("*.json")]):
            log.info("going on: %d parts are in %s", known, self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, name: str, make: Callable[[], Any]) -> Any:
        """The part `name`, which is JSON, as its file has it: floats are those that were measured, to the bit."""
        file = self._file(name)
        if not file.is_file():
            write_atomically(file, json.dumps(make()))
        return json.loads(file.read_text())

    def has(self, name: str) -> bool:
        return self._file(name).is_file()

    def of(self, whose: str) -> Keep:
        """Keeps parts under names that begin with `whose`."""
        return lambda name, make: self(f"{whose} {name}", make)

    def page(self, text: str) -> None:
        """Write what is known so far, to be read."""
        write_atomically(self.folder / PAGE, text)

    def stop_line(self) -> str:
        """What a stop leaves of this probe, and what goes on with it."""
        known = len([*self.folder.glob("*.json")])
        page = f", tables so far in {self.folder / PAGE}" if (self.folder / PAGE).is_file() else ""
        return f"stopped; {known} parts are saved{page}, and the same command goes on behind them"

    def drop(self) -> None:
        """Delete all parts, so that the next probe measures anew."""
        remove(self.folder)  # unless a process that measured the same has done so

    def _file(self, name: str) -> Path:
        return self.folder / f"{name.replace('/', '_')}.json"


def kept_answers(
    keep: Keep,
    name: str,
    task: Task,
    engine: RolloutEngine | None,
    prompts: Sequence[Prompt],
    temperature: float,
    samples: int,
    draw: str,
    device: str,
) -> AnswerSet:
    """`answers.sample_answers` with peak of memory and without the seconds of recording, or what is known of it.

    Without an engine it must be known.
    """

    def ask() -> dict[str, Any]:
        assert engine is not None, f"{name} is not known"
        asked = sample_answers(task, engine, prompts, temperature, samples, draw)
        seconds = asked.seconds - engine.sleep().get("time/recording_s", 0.0)
        rollouts = [{key: value for key, value in vars(one).items() if key != "prompt"} for one in asked.rollouts]
        return {**vars(asked), "rollouts": rollouts, "seconds": seconds, "peak_gib": peak_gib(device)}

    found = keep(name, ask)
    prompt_of = [prompt for prompt in prompts for _ in range(found["samples"])]
    pairs = zip(prompt_of, found["rollouts"], strict=True)
    return AnswerSet(**{**found, "rollouts": [Rollout(prompt=prompt, **one) for prompt, one in pairs]})
