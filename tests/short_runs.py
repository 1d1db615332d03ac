"""Short runs that tests make, and what they record of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qerl_bench.config import build
from qerl_bench.experiment import run_experiment

CLOCKS = ("time", "speed/", "memory/")  # beginnings of what differs between equal runs


def steps_of(make_config: Callable[..., Any], root: Path, name: str, *words: str) -> list[dict[str, Any]]:
    """Make root/runs/NAME with these words: the records of its steps, without times and memory."""
    cfg = make_config(*words, f"root={root}", f"name={name}")
    run_experiment(build(cfg), cfg)
    records = [json.loads(line) for line in (root / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in one.items() if not k.startswith(CLOCKS)} for one in records if one["kind"] == "train"]
