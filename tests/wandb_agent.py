"""What `wandb agent` starts for the points of a sweep, built by the functions that it calls itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest


def agent_commands(sweep: dict[str, Any]) -> Iterator[list[str]]:
    """The whole command of each point of a grid."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    parts = utils.create_sweep_command(sweep["command"])
    grid = {key: entry["values"] for key, entry in sweep["parameters"].items()}
    for point in itertools.product(*grid.values()):
        arguments = {key: {"value": value} for key, value in zip(grid, point, strict=True)}
        built = utils.create_sweep_command_args({"args": arguments})
        built |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [sweep["program"]]}
        yield [word for part in parts for word in (built[part[2:-1]] if part.startswith("${") else [part])]
