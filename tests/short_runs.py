"""Short runs that tests make, how they end early, and what they record of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qerl_bench import experiment as loop
from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build

CLOCKS = ("time", "speed/", "memory/")  # beginnings of what differs between equal runs


@contextmanager
def without_figures() -> Iterator[None]:
    """Runs in this block draw nothing, which takes longer than the steps of a tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qerl_studies.figures.run.run_figures", lambda folder: None)
        yield


@contextmanager
def killed_in_step(number: int) -> Iterator[None]:
    """The run in this block is killed in this step, whose rollouts it has written."""
    step = loop.train_step

    def killed(*given: Any) -> dict[str, float]:
        if given[-1] == number:
            given[0].run.append("rollouts.jsonl", [])
            raise KeyboardInterrupt
        return step(*given)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "train_step", killed)
        yield


def steps_of(make_config: Callable[..., Any], root: Path, name: str, *words: str) -> list[dict[str, Any]]:
    """Make root/runs/NAME with these words: the records of its steps, without times and memory."""
    cfg = make_config(*words, f"root={root}", f"name={name}")
    run_experiment(build(cfg), cfg)
    records = [json.loads(line) for line in (root / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in one.items() if not k.startswith(CLOCKS)} for one in records if one["kind"] == "train"]
