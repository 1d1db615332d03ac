"""A lease: the file NAME.lease beside a lock, which one process holds among all machines that share a file system.

The holder renews the file's time every BEAT_S. A lease that was not renewed for STALE_S belongs to a process that is
gone, and is taken over. Nobody's clock counts but the file server's: its time now is that of a file just made. Making
a lease, and setting a stale one aside, are a link and a rename, of which the server grants one among all machines.
A holder that was suspended for longer finds its lease taken, and ends at once, before it writes anything else. One
whose lease was deleted or damaged makes it again, unless its folder was replaced. A lease that cannot be read is
nobody's, and is taken over when it is stale.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import sys
import threading
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile

from qerl_core.process.arguments import printable
from qerl_core.rundir.durable import sync

log = logging.getLogger(__name__)
BEAT_S = 10.0
STALE_S = 120.0  # more than a network file system keeps the attributes of a file in its cache, which is 60 s


@cache
def machine() -> str:
    """What tells this machine, since its last start, from others; containers on one machine share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


class Lease:
    """A lease of this process, renewed by a thread until `end`."""

    def __init__(self, path: Path, text: str) -> None:
        self._path, self._text, self._folder = path, text, path.parent.stat().st_ino
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True, name=f"lease {path.name}")
        self._thread.start()

    @classmethod
    def take(cls, lock: Path, words: str, alone: bool) -> Lease | None:
        """The lease beside the file `lock`, saying `words`; None if another process holds it.

        `alone`: a lock excludes all other processes of this machine, so that a lease of this machine is a dead one's.
        """
        path = lease_of(lock)
        text = f"{words}\n{machine()} {secrets.token_hex(8)}\n"
        writing = path.with_name(f"{path.name}.{machine() if alone else secrets.token_hex(4)}")
        while True:
            if (held := read(path)) is None:
                writing.write_text(text)
                sync(writing)  # a lease that a power loss cut would name no machine, and be held until it is stale
                if link_exclusively(writing, path):
                    return cls(path, text)
            elif is_held(path, held, alone):
                return None
            else:
                set_aside(path, held)

    def _renew(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(BEAT_S):
            reason, since = None, time.monotonic() - last
            try:
                if (found := read(self._path)) == self._text:
                    os.utime(self._path)
                    last = time.monotonic()
                elif self._path.parent.exists():
                    reason = self._lost(found, since)
            except OSError as error:
                reason = f"it could not be renewed for {since:.0f} s ({error})" if since >= STALE_S else None
            if reason is not None and not self._ended.is_set():
                give_way(self._path, reason)

    def _lost(self, found: str | None, since: float) -> str | None:
        """Make the lease again where it was deleted or damaged. Otherwise why this process has lost it."""
        if self._path.parent.stat().st_ino != self._folder:
            return "the folder was replaced by another one"
        if found is not None and is_readable(found):
            late = f", since this process did not renew it for {since:.0f} s" if since >= STALE_S else ""
            return f"it is that of another process now ({first_line(found)}){late}"
        if found is not None:
            set_aside(self._path, found)
        writing = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}")
        writing.write_text(self._text)
        sync(writing)
        if link_exclusively(writing, self._path):
            log.warning("%s was deleted or damaged by another program, and is made again", self._path)
        return None

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        try:
            if read(self._path) == self._text:
                self._path.unlink()
        except OSError as error:
            log.warning("the lease %s could not be removed (%s); other machines wait %g s", self._path, error, STALE_S)


def lease_of(lock: Path) -> Path:
    return lock.with_name(f"{lock.name}.lease")


def holder_elsewhere(lock: Path, alone: bool) -> str | None:
    """Host, process and time of the lease beside the file `lock`; None without one, and for one that is stale."""
    path = lease_of(lock)
    held = read(path)
    return None if held is None or not is_held(path, held, alone) else first_line(held)


def read(path: Path) -> str | None:
    """The lease at `path`, in whatever bytes; None without one. Opening it makes a network file system look at the
    server's file."""
    try:
        return path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return None


def is_readable(held: str) -> bool:
    """Whether a lease has its two lines, the second of them a machine and a number."""
    lines = held.splitlines()
    return len(lines) == 2 and len(lines[1].split()) == 2


def first_line(held: str) -> str:
    """Who has a lease, as far as it can be read."""
    return held.splitlines()[0] if is_readable(held) else "a process that its damaged lease does not name"


def is_held(path: Path, held: str, alone: bool) -> bool:
    """Whether the process that wrote the lease `held` seems to be alive."""
    if alone and held.split()[-2:-1] == [machine()]:
        return False
    try:
        with open(path) as file:
            renewed = os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return False
    return server_time(path.parent) - renewed < STALE_S


def server_time(folder: Path) -> float:
    """The clock of the file server that holds `folder`, in unix seconds; this machine's where nothing can be made."""
    try:
        with TemporaryFile(dir=folder) as file:
            file.write(b"now")
            file.flush()
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def link_exclusively(writing: Path, path: Path) -> bool:
    """Give the file `writing` the name `path`, unless that exists. Where there are no links, the last one wins."""
    try:
        os.link(writing, path)
    except FileExistsError:
        return False
    except OSError:
        os.replace(writing, path)
        return True
    finally:
        writing.unlink(missing_ok=True)
    return True


def set_aside(path: Path, stale: str) -> None:
    """Remove the lease `stale`. One that another machine put in its place meanwhile stays."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    if read(aside) != stale:
        link_exclusively(aside, path)
    aside.unlink(missing_ok=True)


def give_way(path: Path, reason: str) -> None:
    """End this process at once: it no longer has the lease at `path`, and its run may be another one's."""
    print(printable(f"{path}: {reason}. This process ends here and writes nothing more"), file=sys.stderr, flush=True)
    os._exit(os.EX_TEMPFAIL)
