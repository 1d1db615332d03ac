"""The files that a run has written as a whole, as this process knows them: one that another program deletes or damages
while the run is alive is written again from here, where its work would be lost otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

log = logging.getLogger(__name__)
NEEDED = (
    "config.yaml",
    "eval.json",
    "samples.parquet",
    "samples_in_formats.parquet",
)  # to finish a run, and to read it
MAX_BYTES = 2**27  # of a file that is kept in memory


class KeptFiles:
    """Those of NEEDED in the run in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._content: dict[str, bytes] = {}

    def begin(self) -> None:
        """Keep those that are there."""
        for name in NEEDED:
            self.keep(name, self._folder / name)

    def keep(self, name: str, file: Path) -> None:
        """Keep what is in `file` as the file `name`, if it is needed."""
        if name in NEEDED and file.is_file() and file.stat().st_size <= MAX_BYTES:
            self._content[name] = file.read_bytes()

    def mend(self, replacing: Callable[[str], AbstractContextManager[Path]]) -> None:
        """Write by `replacing` those again that are not as they were kept, with a warning."""
        for name, content in [*self._content.items()]:
            file = self._folder / name
            if not file.is_file() or file.read_bytes() != content:
                log.warning("%s was deleted or changed by another program, and is written again", file)
                with replacing(name) as writing:
                    writing.write_bytes(content)
