"""What a run says on stderr while it goes on: bars on a terminal, a few lines on a pipe. run.log has every step.

What takes a while is a *phase*; phases nest. On a pipe it prints the first step, the last and every 5 % of the steps,
and a heartbeat after `silence_s` seconds without a line, so that a long run fills no log and a slow one is seen to
be alive. A batch of completions counts by its tokens, as if all were as long as the limit.
"""

from __future__ import annotations

import _thread
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import RLock
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

from qerl_core.process.arguments import WIDTH, wrap_lines
from qerl_core.process.termination import raise_again

Item = TypeVar("Item")
tqdm.monitor_interval = 0  # no thread to refresh bars: Python waits for ever for one that gets no memory to start
log = logging.getLogger("qerl_bench.steps")  # conf/run.yaml sends this logger to run.log only

BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} {unit} [{elapsed}<{remaining}{postfix}]"
TICK_S = 1.0  # a phase that is shorter shows no bar
STEP_LINES = 20  # on a pipe
STEPS = "step"  # the label of a run's steps
COMPLETIONS = "completions"  # the unit of phases of which tokens are printed, too
LEVEL = (
    "QERL_LOG_LEVEL"  # environment variable, of the runs of a sweep too: the least of what the terminal shows of logs
)
LONG_S = 60.0  # what takes longer is announced, if a phase of the same name has taken so long before
COLUMNS = (  # metric, label, format
    ("reward/mean", "reward", "{:.3f}"),
    ("accuracy", "accuracy", "{:.3f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("grad_norm", "grad", "{:.2g}"),
    ("aqn/sigma", "sigma", "{:.2g}"),
    ("speed/rollout_tok_s", "tok/s", "{:.0f}"),
)
SUPERVISED_COLUMNS = (("loss", "loss", "{:.4f}"), ("grad_norm", "grad", "{:.2g}"))  # of steps without a reward


def quiet() -> bool:
    """Whether nothing is printed but the steps of a run, warnings and errors (-q)."""
    return os.environ.get(LEVEL) == "WARNING"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: 0:07, 4:05, 2:03:10."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def silence_s(elapsed: float) -> float:
    """How long a pipe may stay silent after `elapsed` seconds: ten seconds, in a long run up to a minute."""
    return min(60.0, max(10.0, elapsed / 50))


class Phase:
    """Something that takes a while: `made` of `total` parts, or no parts (None). Use `phase`."""

    def __init__(self, label: str, total: int | None = None, unit: str = "", first: int = 0) -> None:
        self.label, self.total, self.unit, self.first = label, total, unit, first
        self.made = first
        self.begun = 0.0  # parts, of those that are being made
        self.next = 1  # parts that are made together
        self.started = self.advanced = time.monotonic()  # advanced: when the last part was made
        self.announced = False
        self.note = ""  # behind the bar
        self.bar: tqdm | None = None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def left_s(self) -> float | None:
        """Seconds until its end at the speed of the parts that are made; None if that is unknown."""
        made = self.made + self.begun
        if self.total is None or made == self.first:
            return None
        left = (self.advanced - self.started) / (made - self.first) * (self.total - made)
        left -= time.monotonic() - self.advanced
        if left <= 0 and self.made < self.total:
            return None  # overdue
        return max(0.0, left)

    def advance(self, parts: int = 1) -> None:
        self.made, self.begun = self.made + parts, 0.0
        self.advanced = time.monotonic()

    def within(self, share: float, note: str) -> None:
        """Say that this share of the parts that are being made is done."""
        self.begun, self.note = share * self.next, note
        self.advanced = time.monotonic()

    def __str__(self) -> str:
        if self.total is None:
            return self.label
        counted = f"{self.label} {self.made:,} of {self.total:,} {self.unit}".rstrip()
        return f"{counted}, {self.note}" if self.begun else counted

    def show(self) -> None:
        """Draw the bar, on a terminal."""
        if self.bar is None:
            form: dict[str, Any] = {"bar_format": "{desc}: {elapsed}" if self.total is None else BAR}
            form |= {"total": self.total, "initial": self.first, "desc": self.label, "unit": self.unit}
            self.bar = tqdm(file=watch.screen, leave=False, **form)
            self.bar.start_t -= self.elapsed_s
        self.bar.set_description_str(self.label, refresh=False)
        columns, self.bar.nrows = shutil.get_terminal_size()  # 80, 24 where it is unknown
        self.bar.n, self.bar.ncols = round(self.made + self.begun, 1) if self.begun else self.made, columns - 1
        self.bar.set_postfix_str(self.note)  # draws it

    def hide(self) -> None:
        if self.bar is not None:
            self.bar.close()


class Watch:
    """The phases that are going on, outermost first, and the thread that tells of them."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.lock = RLock()
        self.ticking = False
        self.said = 0.0  # when a line was printed
        self.took: dict[str, float] = {}  # seconds of the last phase of each name
        self.screen: TextIO | None = None  # where bars are drawn; None = stderr

    def begin(self, phase: Phase) -> None:
        with self.lock:
            if not self.phases:
                self.said = time.monotonic()
            if all(outer.label != phase.label for outer in self.phases):
                self.phases.append(phase)
            if not self.ticking:
                with suppress(RuntimeError):  # no room for a thread: no bars
                    _thread.start_new_thread(self.tick, ())  # Thread.start would wait for one that gets no memory
                    self.ticking = True

    def end(self, phase: Phase) -> None:
        with self.lock:
            if phase in self.phases:
                self.phases.remove(phase)
            phase.hide()
        self.took[phase.label] = phase.elapsed_s
        if phase.announced and not self.phases:
            self.say(f"{phase}: took {duration(phase.elapsed_s)}")

    def tick(self) -> None:
        while True:
            time.sleep(TICK_S)
            with self.lock:
                if not self.phases:
                    self.ticking = False
                    return
                if sys.stderr.isatty():
                    for one in self.phases:
                        if one.elapsed_s >= TICK_S and (one.label == STEPS or not quiet()):
                            one.show()
                elif self.is_silent():
                    self.print_heartbeat()

    def is_silent(self, share: float = 1.0) -> bool:
        """Whether this `share` of the silence that is allowed is over."""
        return time.monotonic() - self.said >= share * silence_s(self.phases[0].elapsed_s)

    def print_heartbeat(self) -> None:
        """Print what is going on, and how long it will take as far as that is known."""
        inner = self.phases[-1]
        inner.announced = True
        left = next((one.left_s for one in reversed(self.phases) if one.left_s is not None), None)
        ending = "" if left is None or left < 1 else f", about {duration(left)} left"  # 0:00 would be said for long
        self.say(f"{', '.join(map(str, self.phases))}: {duration(inner.elapsed_s)} so far{ending}")

    @contextmanager
    def room(self) -> Iterator[None]:
        """In this block no bar is on the screen, so that other output can be; bars come back with the next tick."""
        with self.lock:
            for one in self.phases:
                if one.bar is not None:
                    one.bar.clear()
            yield

    def say(self, line: str, of_step: bool = False) -> None:
        self.said = time.monotonic()
        if not sys.stderr.isatty() and (of_step or not quiet()):
            print(wrap_lines(line), file=sys.stderr, flush=True)


watch = Watch()


@contextmanager
def phase(label: str, total: int | None = None, unit: str = "") -> Iterator[Phase]:
    """In this block a bar or, on a pipe, a line after some silence tells of `label`.

    One whose namesake has taken over a minute is announced with that estimate.
    """
    raise_again()
    last = watch.took.get(label, 0.0)
    if last > LONG_S:
        watch.say(f"{label}: about {duration(last)}")
    one = Phase(label, total, unit)
    watch.begin(one)
    try:
        yield one
    finally:
        watch.end(one)


def bar(items: Iterable[Item], label: str, total: int | None = None, unit: str = "") -> Iterator[Item]:
    """`items`, with a phase whose parts they are."""
    with phase(label, total, unit) as one:
        for item in items:
            yield item
            one.advance()


def within(share: float, note: str) -> None:
    """Tell of the innermost phase that counts completions: this share of those that are being made is done."""
    sampling = next((one for one in reversed(watch.phases) if one.unit == COMPLETIONS), None)
    if sampling is not None:
        sampling.within(share, note)


class StepProgress:
    """Reports the optimizer steps of a run from `first` + 1 to `last`. Use as a context manager."""

    def __init__(self, first: int, last: int) -> None:
        self.steps = Phase(STEPS, last, first=first)
        self.every = math.ceil(last / STEP_LINES)
        self.gap = "  "  # of lines on a pipe, until one would be too wide

    def __enter__(self) -> StepProgress:
        self.steps.started = time.monotonic()
        watch.begin(self.steps)
        return self

    def __exit__(self, *error: object) -> None:
        watch.end(self.steps)

    def report(self, step: int, metrics: dict[str, float]) -> None:
        first, last = self.steps.first, self.steps.total or 0
        columns = COLUMNS if "reward/mean" in metrics else SUPERVISED_COLUMNS
        shown = [f"{label} {text.format(metrics[name])}" for name, label, text in columns if name in metrics]
        self.steps.note = "  ".join(shown)
        self.steps.advance()
        parts = [f"step {step:>{len(str(last))}}/{last}", *shown, f"left {duration(self.steps.left_s or 0.0)}"]
        log.info("  ".join(parts))
        if step in (first + 1, last) or step % self.every == 0 or watch.is_silent(0.5):
            self.gap = self.gap if len(self.gap.join(parts)) <= WIDTH else " "
            watch.say(self.gap.join(parts), of_step=True)
