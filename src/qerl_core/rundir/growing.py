"""The files of a run that grow by lines, as this process has written them.

Each append goes on with a running SHA-256, so a seal continues the one before it: a file that another program has cut,
emptied, deleted, changed or put back is found at the next line or the next seal, and never sealed as it is.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from qerl_core.checks import TrainingStopped
from qerl_core.rundir.checksums import GROWING, broken
from qerl_core.rundir.durable import sync
from qerl_core.rundir.run_checks import damage_remedy


class GrowingFiles:
    """Those of the run in `folder`; each counts from its first use, with what it has then."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begun: dict[str, _GrowingFile] = {}

    def begin(self, name: str) -> None:
        """From here on the file `name` is as it is now, and grows by `append` alone."""
        self._begun[name] = _GrowingFile(self._folder / name)

    def append(self, name: str, text: str) -> None:
        """Add whole lines and flush them. Raises TrainingStopped if they are not behind what this process knows."""
        if name not in self._begun:
            self.begin(name)
        try:
            reason = self._begun[name].append(text)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            reason = f"it cannot be written any more ({error.strerror})"
        self._require(name, reason)

    def seals(self) -> dict[str, dict[str, Any]]:
        """The seals of all, which the disk holds then. Raises TrainingStopped unless each is as it was written."""
        seals = {}
        for name in GROWING:
            if name not in self._begun:
                self.begin(name)
            expected, path = self._begun[name].seal, self._folder / name
            if expected["bytes"] or path.exists():
                self._require(name, broken(path, expected, quick=False))
                sync(path)
                seals[name] = expected
        sync(self._folder)
        return seals

    def _require(self, name: str, reason: str | None) -> None:
        if reason is not None:
            raise TrainingStopped(
                f"{self._folder}: another program changed {name} while this run was alive: {reason}. Nothing is sealed "
                f"of that. {damage_remedy(self._folder, name, False)}"
            )


class _GrowingFile:
    def __init__(self, path: Path) -> None:
        self._path, self._bytes, self._state = path, 0, hashlib.sha256()
        if path.exists():
            with open(path, "rb") as file:
                self._state = hashlib.file_digest(file, "sha256")
                self._bytes = file.tell()

    def append(self, text: str) -> str | None:
        """Write `text` at the end; what is wrong with the place where it came to lie, or None."""
        data = text.encode()
        with open(self._path, "ab") as file:
            file.write(data)
            file.flush()
            before = file.tell() - len(data)
        known, self._bytes = self._bytes, self._bytes + len(data)
        self._state.update(data)
        return None if before == known else f"it had {before:,} bytes, and {known:,} were written"

    @property
    def seal(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "sha256": self._state.hexdigest()}
