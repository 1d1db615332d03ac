"""The engine of `rollout.merge=true`: base and adapter are rounded together while it samples."""

from __future__ import annotations

from typing import Any

from qerl_bench.engine.base import RolloutEngine, Sampling, WrappedEngine
from qerl_bench.model.merging import Merging
from qerl_core.records import Prompt, Rollout


class MergingEngine(WrappedEngine):
    """`engine`, whose policy has `merging` on in its calls."""

    def __init__(self, engine: RolloutEngine, merging: Merging) -> None:
        super().__init__(engine)
        self.merging = merging

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Rollout]:
        with self.merging.active():
            return self.engine.generate(prompts, sampling)

    def sleep(self) -> dict[str, float]:
        return self.engine.sleep() | {"merge/update_kept": self.merging.update_kept()}

    def record(self) -> dict[str, Any]:
        return self.engine.record() | {"merge": True}
