"""Compares two LaTeX answers with math-verify: `task.equality=math`.

Two plain numbers are compared exactly, in this process; a percent sign is a unit, and the value of an equation is its
last side (as in math-verify). What is unclear (unclear.py) is wrong. All other pairs go to a worker process, because no
limit inside this process would work: an alarm needs the main thread, and no exception interrupts a power of 10^9
digits. The kernel ends the worker when one pair takes more than LIMIT_S seconds of CPU time, which does not depend on
other load, or more memory than MEMORY_GIB.
The pair then counts as unequal, and the next pair gets a new worker. A process has one worker, shared by its threads,
started when first needed (0.5 s) and ended with the process.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import select
import subprocess
import sys
import threading
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from qerl_bench.task.grader.numbers import parse_number
from qerl_bench.task.grader.unclear import is_left_open, is_unclear, joined, same_text

LIMIT_S = 2.0  # CPU seconds for one pair; ordinary pairs take milliseconds
WALL_LIMIT_S = 60.0  # in case the worker hangs
MEMORY_GIB = 4  # address space of the worker
MAX_LENGTH = 1000  # characters; a longer answer is wrong
_NUMBER = re.compile(r"[-+0-9.,/ ]+")


def compare(gold: str, answer: str) -> tuple[bool, str]:
    """Whether `answer` equals `gold`, and the canonical form of `answer` (unchanged if it has none)."""
    if len(answer) > MAX_LENGTH:
        return False, answer[:MAX_LENGTH]
    gold, answer = _bare(gold), _bare(answer)
    foreign = any(letter.isdecimal() and not letter.isascii() for letter in answer)
    if not answer or foreign or not _balanced(answer):
        return False, answer
    if _NUMBER.fullmatch(gold) and _NUMBER.fullmatch(answer):
        left, right = parse_number(gold), parse_number(answer)
        if left is not None and right is not None:
            return left == right, str(right)
    if is_left_open(answer):
        return same_text(gold, answer), answer
    if is_unclear(gold, answer):
        return False, answer
    return _compare_in_worker(gold, answer)


def _bare(text: str) -> str:
    """`text` without the full stop of a sentence, a percent sign, and spaces within numbers."""
    text = text.strip()
    text = text if text.endswith("..") else text.removesuffix(".")
    return joined(text[:-1].removesuffix("\\").rstrip() if text.endswith("%") else text)


def is_found_in(gold: str, text: str) -> bool:
    """Whether the answer that math-verify finds in `text` with its default settings equals `gold`."""
    reply = _worker().ask({"gold": gold, "text": text, "limit_s": LIMIT_S})
    return reply is not None and bool(reply["equal"])


def _balanced(text: str) -> bool:
    """Whether braces match. If not, an answer could close the box it is put in and open another."""
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", text):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


@lru_cache(maxsize=4096)
def _compare_in_worker(gold: str, answer: str) -> tuple[bool, str]:
    reply = _worker().ask({"gold": gold, "answer": answer, "limit_s": LIMIT_S})
    return (False, answer) if reply is None else (bool(reply["equal"]), str(reply["canonical"]))


class Comparer:
    """The process that compares; it handles one request at a time."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def ask(self, request: dict[str, object]) -> dict[str, object] | None:
        """The reply, or None if the worker ended during the request. Any thread may call."""
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self._end()
                self.process = _start()
            assert self.process.stdin is not None and self.process.stdout is not None
            line = b""
            try:
                with suppress(BrokenPipeError):  # the worker ended before it could read
                    self.process.stdin.write(json.dumps(request).encode() + b"\n")
                    self.process.stdin.flush()
                    readable, _, _ = select.select([self.process.stdout], [], [], WALL_LIMIT_S)
                    line = self.process.stdout.readline() if readable else b""
            finally:  # also on Ctrl-C: a late reply must not be taken for that of the next request
                if not line.endswith(b"\n"):
                    self._end()
            return json.loads(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        """End the process, if it is ours: a forked child must leave it to its parent."""
        if os.getpid() == self.owner:
            with self.lock:
                self._end()

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            with suppress(BrokenPipeError):  # of a request that was never read
                self.process.communicate()
            self.process.wait()
            self.process = None


_current = Comparer()


def _worker() -> Comparer:
    """This process's worker; a forked child gets its own."""
    global _current
    if _current.owner != os.getpid():
        _current = Comparer()
    return _current


def _start() -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("latex_worker.py")
    command = [sys.executable, "-P", "-W", "ignore", str(script), str(MEMORY_GIB)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    greeting = process.stdout.readline()
    if greeting != b"ready\n":
        raise RuntimeError(f"the worker that compares LaTeX answers does not start: {' '.join(command)}")
    return process
