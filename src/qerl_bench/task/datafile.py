"""Questions kept in a file: reading them with every fault named, and the order in which training goes through them.

Left out: streaming and formats other than JSON Lines; the data sets in question fit in memory many times over.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from qerl_bench.checks import ConfigError, require
from qerl_bench.seeding import derive


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file; row i stands on line i + 1.

    Raises ConfigError, naming the line, for a file that is missing, unreadable, empty or not UTF-8, and for a line that
    is blank or not a JSON object.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the data file {path}: {error.strerror}; give the path of a JSONL file"
        ) from error
    lines = data.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n")
    require(lines != [b""], f"the data file {path} is empty; it needs one JSON object per line")
    return [_row(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested beyond all reason
        raise ConfigError(f"{where}: not a line of JSON ({error}); each line must be one object") from error
    require(isinstance(row, dict), f"{where}: a JSON object is needed, got {type(row).__name__}")
    return row


def training_rows(step: int, count: int, seed: int, size: int) -> list[int]:
    """Which of `size` rows optimiser step `step` (from 1) trains on: `count` indices, a pure function of the arguments.

    Training reads row after row of one permutation per epoch, without replacement. A batch that crosses the end of an
    epoch goes on in the next one, so there, and only there, it may hold a row twice.
    """
    assert step >= 1 and count >= 1 and size >= 1, (step, count, size)
    places = (divmod(position, size) for position in range((step - 1) * count, step * count))
    return [epoch_order(seed, epoch, size)[place] for epoch, place in places]


@lru_cache(maxsize=8)
def epoch_order(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    """The permutation of range(size) that `epoch` (from 0) follows: sorted by hashes, so the same on every Python."""
    return tuple(sorted(range(size), key=lambda row: (derive(seed, "epoch", epoch, row), row)))
