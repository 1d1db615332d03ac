"""Whether the files of a run are those that were written.

A seal is the length of a file and the SHA-256 of its content. Two kinds of files are sealed in two places:

- A file that is replaced as a whole (eval.json) has a line in seals.jsonl, written just before each replacement.
- A file that grows by lines (GROWING, seals.jsonl among them) is sealed as far as it reaches by every checkpoint, in
  its manifest.json, and by done.json at the end.

So a change to any one file is found. Lines behind the last checkpoint have no seal yet: a continued run makes them
again. Left out: whoever changes a file and its seal alike.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qerl_core.rundir.durable import replace, sync

SEALS = "seals.jsonl"
GROWING = ("metrics.jsonl", "rollouts.jsonl", SEALS)
DONE = "done.json"
QUICK_BYTES = 2**24  # a quick check compares larger files by length only; hashing one of this size takes 10 to 50 ms

Seal = Mapping[str, Any]  # bytes and sha256


def seal(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


def digest(path: Path, length: int | None = None) -> str:
    """SHA-256 of a file, or of its first `length` bytes."""
    with open(path, "rb") as file:
        if length is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        state, left = hashlib.sha256(), length
        while left and (block := file.read(min(left, 2**20))):
            state.update(block)
            left -= len(block)
    return state.hexdigest()


def broken(path: Path, expected: Seal, quick: bool, grows: bool = False) -> str | None:
    """What is wrong with the file `path`, as a sentence; None if it is as sealed. One that `grows` may be longer."""
    if not path.is_file():
        return f"{path.name} is missing"
    size, length = path.stat().st_size, expected["bytes"]
    length = size if length is None else length  # sealed without it, by an earlier version
    if size < length or (size > length and not grows):
        return f"{path.name} has {size:,} bytes, and {length:,} were written"
    if (length <= QUICK_BYTES or not quick) and digest(path, length) != expected["sha256"]:
        return f"{path.name} was changed: its first {length:,} bytes are not those that were written"
    return None


@contextmanager
def replacing(folder: Path, name: str, append: Callable[[str, str], None]) -> Iterator[Path]:
    """A path to write to; afterwards it is sealed, by a line to `append` to SEALS, and takes the place of the file
    `name` in `folder`."""
    writing = folder / f".{name}.writing"
    yield writing
    sync(writing)
    append(SEALS, json.dumps({"file": name, **seal(writing)}) + "\n")
    sync(folder / SEALS)
    replace(writing, folder / name)


def find_damage(
    folder: Path, vouched: Mapping[str, Seal], *, finished: bool, quick: bool, skip: Collection[str] = ()
) -> tuple[str, str] | None:
    """The first damaged file of a run and what is wrong with it, or None. `vouched` are the seals of growing files.

    Files in `skip` are left out, and done.json may be missing: a run without it is continued. A kill between a new seal
    and its file leaves a last line in seals.jsonl that does not count.
    """
    for name, expected in vouched.items():
        if reason := broken(folder / name, expected, quick, grows=not finished or name == SEALS):
            return name, reason
    try:
        lines, ends = read_seals(folder)
    except ValueError as error:
        return SEALS, str(error)
    earlier = {line["file"]: line for line in lines[:-1]}
    for name, expected in {line["file"]: line for line in lines}.items():
        file = folder / name
        if name in skip or (name == DONE and not file.exists()):
            continue
        reason = broken(file, expected, quick)
        if reason and expected is lines[-1] and ends[-1] > vouched_bytes(vouched):
            before = earlier.get(name)
            reason = reason if (file.exists() if before is None else broken(file, before, quick)) else None
        if reason:
            return name, reason
    return None


def changed(folder: Path, name: str) -> str | None:
    """What is wrong with one file that is written as a whole; None if it is as sealed, or has no seal."""
    expected = [line for line in read_seals(folder)[0] if line["file"] == name][-1:]
    return broken(folder / name, expected[0], quick=True) if expected else None


def vouched_bytes(vouched: Mapping[str, Seal]) -> int:
    """How much of seals.jsonl is sealed itself."""
    return vouched[SEALS]["bytes"] if SEALS in vouched else 0


def read_seals(folder: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The whole lines of seals.jsonl, and the byte behind each. Raises ValueError for a line that is no seal."""
    path = folder / SEALS
    lines: list[dict[str, Any]] = []
    ends: list[int] = []
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not (isinstance(entry, dict) and is_seal(entry) and is_name(entry.get("file"))):
            raise ValueError(f"{SEALS}, line {len(lines) + 1}, is no seal")
        lines.append(entry)
        ends.append((ends or [0])[-1] + len(line) + 1)
    return lines, ends


def are_seals(entries: object) -> bool:
    return isinstance(entries, dict) and all(map(is_seal, entries.values()))


def is_seal(entry: object) -> bool:
    return isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)


def is_name(name: object) -> bool:
    """Whether `name` is that of a file in the folder itself."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name


def settle(folder: Path, vouched: Mapping[str, Seal]) -> None:
    """Cut off what a kill left at the end of seals.jsonl, half a line or one whose file never came."""
    lines, ends = read_seals(folder)
    if lines and broken(folder / lines[-1]["file"], lines[-1], quick=False):
        ends.pop()
    if (folder / SEALS).exists():
        os.truncate(folder / SEALS, max([0, *ends][-1], vouched_bytes(vouched)))
