"""An update that ran out of memory is made again, on all ranks: as it was, if enough was held unused and this is rare,
or in smaller micro-batches."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from qerl_bench.parallel import World
from qerl_bench.train.memory_plan import FILE, stored_plan
from qerl_bench.train.reduced_sizes import Shortages, Size
from qerl_bench.train.spec import Specs, TrainSpec
from qerl_bench.train.trainer_state import TrainerState
from qerl_core.checks import TrainingStopped
from qerl_core.process.device import random_state, set_random_state
from qerl_core.process.gpu_share import release
from qerl_core.process.out_of_memory import NO_MEMORY, held_unused, shortage
from qerl_core.rundir.run_dir import RunDir

log = logging.getLogger(__name__)
Result = TypeVar("Result")


def repeated_smaller(
    work: Callable[[], Result],
    size: Size,
    cut: Callable[[Size], None],
    specs: Specs,
    device: str,
    run: RunDir,
    longest: int,
    state: TrainerState,
    world: World,
) -> tuple[Size, Result]:
    """What `work` gives in micro-batches of `size`, or where memory runs out of one that works, and that size.

    `cut` makes the micro-batches of a smaller size before `work` is repeated with the same random numbers. An error of
    `work` is raised on all ranks; TrainingStopped ends the run.
    """
    random = random_state(device)
    while True:
        try:
            return size, work()
        except (RuntimeError, MemoryError) as error:
            if (said := shortage(error)) is None:  # one that ends the run, or only this rank
                raise
            frees = any(world.gather(any(engine.holds_memory for engine in state.engines)))
            step = state.shortages.step
            if not size.recorded and held_unused(said) and state.shortages.size.may_repeat(step):
                log.warning("%s (%s) in %s; the update is repeated as it was", NO_MEMORY, said, size)
                note(run, {"repeated": [*stored_plan(run).get("repeated", []), step]})
            else:
                may_shrink = not specs.parallel.exact
                size = after_shortage(error, size, specs.train, state.shortages, longest, run, may_shrink, frees)
        if state.passes is not None and not size.recorded:
            state.passes.release()
        for engine in state.engines:
            engine.release()  # sampling reserves again what it needs then
        release()  # only now: until here the traceback holds what was computed
        set_random_state(random)
        cut(size)


def after_shortage(
    error: Exception,
    size: Size,
    train: TrainSpec,
    shortages: Shortages,
    longest: int,
    run: RunDir,
    may_shrink: bool,
    frees: bool,
) -> Size:
    """The size to repeat the update with, and those of some steps, after an `error` about memory in `size`.

    `frees`: whether some rank can free what sampling keeps. Raises TrainingStopped, with numbers, if there is no
    smaller size, or it may not be smaller.
    """
    said = shortage(error)
    assert said is not None
    smaller = size.smaller(longest) if may_shrink else None
    if smaller is None and may_shrink and frees:
        smaller = size
    if smaller is None:
        raise TrainingStopped(no_smaller_size(said, size, train, longest, may_shrink)) from error
    shortages.size.shrink(asdict(smaller), shortages.step)
    until = shortages.size.last
    log.warning("%s (%s) in %s; the update is repeated in %s, until step %d", *(NO_MEMORY, said, size, smaller, until))
    note(run, {"shortage": {"step": shortages.step, "until": until, **asdict(smaller)}})
    return smaller


def note(run: RunDir, plan: dict[str, Any]) -> None:
    run.write(FILE, json.dumps(stored_plan(run) | plan, indent=1))


def no_smaller_size(said: str, size: Size, train: TrainSpec, longest: int, may_shrink: bool) -> str:
    stronger = {"none": "train.recompute=selective or full", "selective": "train.recompute=full"}
    remedies: Sequence[str | None] = (
        None if may_shrink else f"a smaller train.micro_batch_tokens, at least {longest:,}",
        stronger.get(train.recompute),
        "a shorter task.max_completion_tokens",
    )
    return (
        f"train: {NO_MEMORY} ({said}) in {size} with train.recompute={train.recompute}; the longest sequence has "
        f"{longest:,}. If another process has used it, the same command continues from the last checkpoint. "
        f"Otherwise: {', or '.join(filter(None, remedies))}"
    )
