"""What shortages of memory have made smaller in a run, and for how long: later what was planned is tried again.

A shortage may pass, as that of a GPU which another process has filled for a while; so what is smaller stays so for some
steps, after each further shortage for twice as many. Checkpoints keep all of it, so that a continued run repeats an
uninterrupted one. Before that, a step whose memory was held unused is made again as it was. Left out: sizes between
what was planned and what has worked.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from typing import Any

from qerl_bench.parallel import ALONE, World

log = logging.getLogger(__name__)
FIRST_WAIT = 10  # steps


@dataclass(frozen=True)
class Size:
    """How large micro-batches are, and whether their passes may be recorded, in which case with padding."""

    tokens: int
    recorded: bool

    def smaller(self, longest: int) -> Size | None:
        """What to try where memory ran out; None if a micro-batch is no more than the `longest` sequence."""
        if self.recorded:  # pools that nothing else can use go first
            return Size(self.tokens, recorded=False)
        return Size(max(longest, self.tokens // 2), recorded=False) if self.tokens > longest else None

    def __str__(self) -> str:
        return f"micro-batches of up to {self.tokens:,} tokens{'' if self.recorded else ', not recorded'}"


@dataclass
class Reduced:
    """Settings in the place of those planned."""

    value: dict[str, Any] | None = None  # by name, None: those planned
    step: int = 0  # of the latest shortage
    wait: int = 0  # steps behind it that they last
    repeated: int | None = None  # the latest step that was made again as it was

    def may_repeat(self, step: int) -> bool:
        """Whether `step`, in which memory was short, is made again as it was: once, and not behind a step that was too.
        If so, that is noted."""
        if self.repeated in (step, step - 1):
            return False
        self.repeated = step
        return True

    def shrink(self, value: dict[str, Any], step: int) -> None:
        """Go on with `value` after a shortage in `step`. Several in one step are one."""
        if self.wait == 0 or step != self.step:
            self.wait = 2 * self.wait or FIRST_WAIT
        self.value, self.step = value, step

    @property
    def last(self) -> int:
        """The last step with this value."""
        return self.step + self.wait

    def begin(self, step: int, what: str) -> None:
        if self.value is not None and step > self.last:
            self.value = None
            log.info("step %d: %s as planned again, %d steps after memory ran out", step, what, step - self.step)


@dataclass
class Shortages:
    """Of one run: in training, and in sampling."""

    step: int = 0  # that goes on; 0 outside of steps
    size: Reduced = field(default_factory=Reduced)  # of micro-batches
    limits: Reduced = field(default_factory=Reduced)  # of sampling

    def begin(self, step: int) -> None:
        """Go back, where it is time, before `step`."""
        self.step = step
        self.size.begin(step, "micro-batches")
        self.limits.begin(step, "completions at a time")

    def agree(self, world: World = ALONE) -> None:
        """Let all ranks sample within the limits of the one that had the latest shortage, and the longest wait."""
        by_rank = enumerate(world.gather(self.limits))
        self.limits = max((limits.step, limits.wait, -rank, limits) for rank, limits in by_rank)[-1]

    def state(self) -> dict[str, Any]:
        """For a checkpoint: numbers by name."""
        return {"size": asdict(self.size), "limits": asdict(self.limits)}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on with `state`; without one, as before the first shortage."""
        state = state or {}
        self.size, self.limits = (Reduced(**state.get(name, {})) for name in ("size", "limits"))
