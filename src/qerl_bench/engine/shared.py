"""The engines of all ranks of a run as one: each samples a part of the prompts, and all get all completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qerl_bench.engine.base import RolloutEngine, Sampling, WrappedEngine
from qerl_bench.parallel import World, largest
from qerl_core.records import Prompt, Rollout, numbered


class SharedEngine(WrappedEngine):
    """`engine`, which every rank of `world` has, used by all of them together.

    Prompts are cut into portions that depend neither on who samples them nor on a shortage of memory there; a rank
    takes the next one when it is done.
    With `exact` they are what the engine of a single rank samples together, so that not even rounding differs.
    """

    def __init__(self, engine: RolloutEngine, world: World, exact: bool) -> None:
        super().__init__(engine)
        self.world, self.exact = world, exact

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Rollout]:
        prompts = numbered(prompts)  # before they are cut apart
        self.require_room(prompts, sampling)
        size = self.prompts_at_once(sampling.samples)
        if self.exact:
            sampling = replace(sampling, fixed_rows=True)
        else:
            size = min(size, max(1, -(-len(prompts) // self.world.size)))
        portions = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        mine = {number: self.engine.generate(portions[number], sampling) for number in self.world.take(len(portions))}
        by_number = {number: rollouts for of_rank in self.world.gather(mine) for number, rollouts in of_rank.items()}
        return [rollout for number in range(len(portions)) for rollout in by_number[number]]

    def sleep(self) -> dict[str, float]:
        return largest(self.world, self.engine.sleep())

    def record(self) -> dict[str, Any]:
        return self.engine.record() | {"engines": self.world.size}
