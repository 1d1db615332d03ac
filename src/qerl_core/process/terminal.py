"""Output that may end before the program does: a closed pipe (`| head`), a full disk, no terminal at all.

Results go to stdout, all else to stderr. Where both are one file, their lines keep their order.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TextIO, cast

from qerl_core.process.arguments import printable, wrap_lines
from qerl_core.process.progress import watch


class WrappingFormatter(logging.Formatter):
    """Log lines for a terminal. run.log keeps each whole, as one line."""

    def __init__(self, fmt: str | None = None, datefmt: str | None = None, *more: Any, **named: Any) -> None:
        super().__init__(fmt or "%(asctime)s %(message)s", datefmt or "%H:%M:%S", *more, **named)

    def format(self, record: logging.LogRecord) -> str:
        return wrap_lines(super().format(record))


OURS = ("qerl_core", "qerl_studies", "qerl_bench")


def log_to_stderr(*packages: str) -> None:
    """Show what our packages and `packages` log, and problems of others, as a run does (conf/run.yaml)."""
    handler = logging.StreamHandler()
    handler.setFormatter(WrappingFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    for package in (*OURS, *packages):
        logging.getLogger(package).setLevel(logging.INFO)


class TolerantStream:
    """A text stream. What it cannot write any more is dropped, because a run must not end with its reader."""

    def __init__(
        self,
        stream: TextIO,
        room: Callable[[], AbstractContextManager[None]] = nullcontext,
        shown: Callable[[str], str] = str,
    ) -> None:
        self._stream = stream
        self._room = room  # in which something may be written
        self._shown = shown  # what is written of a text

    def write(self, text: str) -> int:
        with self._room():
            try:
                return self._stream.write(self._shown(text))
            except UnicodeEncodeError:
                encoding = self._stream.encoding
                return self._stream.write(self._shown(text).encode(encoding, "backslashreplace").decode(encoding))
            except OSError:
                return self._drop(len(text))

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def _drop(self, written: int = 0) -> int:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # for what is still in buffers, and for children
        os.close(nowhere)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_output() -> Iterator[None]:
    """In this block output that cannot be written is dropped. A closed stream is an empty one, for children too."""
    for descriptor in range(3):  # else the next file that is opened would get the number, and what is printed there
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    before = sys.stdout, sys.stderr
    out, error = (
        open(descriptor, "w", closefd=False) if stream is None else stream  # noqa: SIM115 - until the end
        for descriptor, stream in enumerate(before, start=1)
    )
    results = TolerantStream(out, watch.room, printable)  # names of others are among them

    @contextmanager
    def behind_results() -> Iterator[None]:
        results.flush()
        with watch.room():
            yield

    sys.stdout, sys.stderr = results, TolerantStream(error, behind_results)
    watch.screen = cast(TextIO, TolerantStream(error))
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
        watch.screen = None
