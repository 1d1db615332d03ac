"""Questions kept in a file: reading them with every fault named, and the order in which training goes through them.

Left out: streaming and formats other than JSON Lines; the data sets in question fit in memory many times over.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from qerl_bench.errors import BadInput, require
from qerl_bench.seeding import derive


def read_rows(path: str | Path, keys: tuple[str, ...]) -> list[dict[str, str]]:
    """The rows of a JSON Lines file, cut down to `keys`, all of them text; row i stands on line i + 1.

    Raises BadInput, naming the line, for a file that is missing, unreadable, empty or not UTF-8, a line that is blank
    or not a JSON object, a missing key, and a value that is not a string.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read the data file {path}: {error.strerror}; give the path of a JSONL file") from error
    lines = data.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n")
    require(lines != [b""], f"the data file {path} is empty; it needs one JSON object per line with {_names(keys)}")
    return [_row(line, keys, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def _row(line: bytes, keys: tuple[str, ...], where: str) -> dict[str, str]:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested beyond all reason
        raise BadInput(f"{where}: not a line of JSON ({error}); each line must be one object") from error
    require(isinstance(row, dict), f"{where}: a JSON object with {_names(keys)} is needed, got {type(row).__name__}")
    for key in keys:
        require(key in row, f"{where}: the key {key!r} is missing; the line has {_names(tuple(row))}")
        require(
            isinstance(row[key], str),
            f"{where}: the value of {key!r} must be a string, got {type(row[key]).__name__}; put it in quotes",
        )
    return {key: row[key] for key in keys}


def _names(keys: tuple[str, ...]) -> str:
    return ", ".join(repr(key) for key in keys) or "no keys"


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
