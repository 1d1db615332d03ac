"""Progress of a run: a bar on a terminal, one printed line per step elsewhere; run.log always gets the lines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
tqdm.monitor_interval = 0  # no thread to refresh bars: Python waits for ever for one that gets no memory to start
log = logging.getLogger("qerl_bench.steps")  # conf/run.yaml sends this logger to run.log only

COLUMNS = (  # metric, label, format
    ("loss", "loss", "{:8.4f}"),
    ("reward/mean", "reward", "{:.3f}"),
    ("accuracy", "accuracy", "{:.3f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("aqn/sigma", "sigma", "{:.1e}"),
    ("speed/rollout_tok_s", "tok/s", "{:6.0f}"),
)


class StepProgress:
    """Reports the optimizer steps of a run from `first` + 1 to `last`. Use as a context manager."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.started = time.monotonic()
        self.bar = tqdm(total=last, initial=first, unit="step") if sys.stderr.isatty() else None

    def __enter__(self) -> StepProgress:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def report(self, step: int, metrics: dict[str, float]) -> None:
        left = (time.monotonic() - self.started) / (step - self.first) * (self.last - step)
        shown = "  ".join(f"{label} {text.format(metrics[name])}" for name, label, text in COLUMNS if name in metrics)
        line = f"step {step:>{len(str(self.last))}}/{self.last}  {shown}  left {int(left) // 60}:{int(left) % 60:02d}"
        log.info(line)
        if self.bar is None:
            print(line, flush=True)
        else:
            self.bar.set_postfix_str(shown, refresh=False)
            self.bar.update()


def bar(items: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
    """`items` with a progress bar on a terminal; prints nothing elsewhere."""
    return iter(tqdm(items, desc=label, total=total, leave=False, disable=not sys.stderr.isatty()))
