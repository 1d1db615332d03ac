"""Files of others, read as data: not too large, of the folder that was named, and never executed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qerl_core.checks import ConfigError, require
from qerl_studies.runs.reported import check_size


def inside(root: Path, path: Path, refuse: bool = False) -> bool:
    """Whether `path` lies in the folder `root` when links are followed. With `refuse` ConfigError if it does not."""
    found = path.resolve().is_relative_to(root.resolve())
    require(found or not refuse, f"{path} is a link to a place outside of {root}: give the folder itself")
    return found


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises ConfigError for a file that is too large or none."""
    check_size(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}): leave the run out") from error


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Number and object of each line of a JSONL file. Raises ConfigError that names the line."""
    check_size(path)
    with path.open(encoding="utf-8", errors="strict") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} has a line that is not JSON ({error}): leave the run out") from error
