"""What the notebooks share: where runs are, and a word where there is nothing to draw yet."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from qerl_core.checks import ConfigError, require
from qerl_studies.runs.load import Run

T = TypeVar("T")
COMPARISON = "python src/run.py -m quant=bf16,nvfp4 aqn=none,exp seed=0,1"


def runs_folder() -> Path:
    """Where runs are written, as notebooks/ sees it: $QERL_ROOT/runs, by default the checkout's."""
    return Path(os.environ.get("QERL_ROOT", ".."), "runs")


def first_with_rollouts(runs: Sequence[Run]) -> Run:
    """The first run whose algorithm samples. Raises ConfigError without one."""
    chosen = [run for run in runs if run.option("algo.name") != "sft"]
    require(bool(chosen), "no finished run with rollouts")
    return chosen[0]


def shown(draw: Callable[[], T], command: str = COMPARISON) -> T | None:
    """What `draw` returns; None if these runs do not suffice: then the reason, and a command that makes such runs."""
    try:
        return draw()
    except ConfigError as error:
        print(f"Not drawn: {error}\nThis makes such runs, in the folder of the repository, and skips finished ones:")
        print(f"\n    {command}")
        return None
