"""Compares two LaTeX answers with math-verify: `task.equality=math`.

Characters become commands (characters.py), units are taken off (units.py), and words are compared as words. Two plain
numbers are compared in this process; a percent sign is a unit, and the value of an equation is its last side (as in
math-verify). What is unclear (unclear.py) is wrong. All other pairs go to a worker process, because no
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
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from qerl_bench.task.grader.characters import is_balanced, words_of
from qerl_bench.task.grader.numbers import parse_number
from qerl_bench.task.grader.unclear import is_left_open, is_pair_of_list, is_unclear, join_digit_groups, same_text
from qerl_bench.task.grader.units import TEXT, Answer, read

LIMIT_S = 2.0  # CPU seconds for one pair; ordinary pairs take milliseconds
WALL_LIMIT_S = 60.0  # in case the worker hangs
MEMORY_GIB = 4  # address space of the worker
MAX_LENGTH = 1000  # characters; a longer answer is wrong
NEAR = Fraction("1.000001e-6")  # relative difference between a fraction and a decimal for it
_NO_NAME = re.compile(r"\\[dt]?frac|(?<=[0-9.])[eE](?=[-+]?[0-9])")  # letters that are part of a number
_PROSE = re.compile(r"(?=.*[A-Za-z]{4})[A-Za-z][A-Za-z .,'-]*")  # abc is a product
_LETTERS = re.compile(r"[A-Za-z0-9\s().,:'\u2019-]*[A-Za-z][A-Za-z0-9\s().,:'\u2019-]*")
_DIGITS = re.compile(r"[-+/.:*^]?[0-9]+")


def compare(gold: str, answer: str) -> tuple[bool, str]:
    """Whether `answer` equals `gold`, and the canonical form of `answer` (unchanged if it has none)."""
    if len(answer) > MAX_LENGTH:
        return False, answer[:MAX_LENGTH]
    foreign = any(letter.isdecimal() and not letter.isascii() for letter in answer)
    if foreign or not is_balanced(answer):
        return False, answer.strip()
    named = "=" in gold and "=" in answer
    wanted, given = read(gold, named), read(answer, named)
    if not given.text or _other_unit(wanted, given):
        return False, answer.strip()
    if wanted.words or given.words or _PROSE.fullmatch(wanted.text):
        return _same_words(wanted, given), words_of(given.text)
    texts = join_digit_groups(wanted.text), join_digit_groups(given.text)
    left, right = map(_number, texts)
    if left is not None and right is not None:
        return _same_number((left, texts[0]), (right, texts[1])), str(right)
    if is_left_open(given.text) or is_unclear(wanted, given):
        return same_text(gold, answer), answer.strip()
    if is_pair_of_list(*texts):
        texts = f"({texts[0]})", texts[1]
    return _compare_in_worker(*texts)


def _number(text: str) -> Fraction | None:
    """The number that `text` is, which has no units any more: 5c is a product."""
    return None if re.search("[a-zA-Z]", _NO_NAME.sub("", text)) else parse_number(text)


def _other_unit(gold: Answer, answer: Answer) -> bool:
    return bool(gold.units and answer.units) and gold.units.isdisjoint(answer.units)


def _same_words(gold: Answer, answer: Answer) -> bool:
    """Whether an answer in words is that of `gold`; one of them may be plain letters, such as the name of a choice."""
    plain = [TEXT.sub(r" \1 ", one.text) for one in (gold, answer)]
    letters = all(one.words or _LETTERS.fullmatch(text) for one, text in zip((gold, answer), plain, strict=True))
    left, right = ((words_of(text), _DIGITS.findall(text)) for text in plain)
    return (letters and not answer.linked and left == right and left[0] != "") or same_text(gold.text, answer.text)


def _same_number(gold: tuple[Fraction, str], answer: tuple[Fraction, str]) -> bool:
    """Whether two numbers with their texts are equal: to a millionth if one is a fraction and the other a decimal."""
    (left, text), (right, other) = gold, answer
    near = ("." in text) != ("." in other) and left.denominator > 1 < right.denominator
    return abs(left - right) <= (NEAR * max(abs(left), abs(right)) if near else 0)


def is_found_in(gold: str, text: str) -> bool:
    """Whether the answer that math-verify finds in `text` with its default settings equals `gold`."""
    reply = _worker().ask({"gold": gold, "text": text, "limit_s": LIMIT_S})
    return reply is not None and bool(reply["equal"])


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
