"""The engine of `rollout.merge=true`: base and adapter are rounded together while it samples."""

from __future__ import annotations

from typing import Any

from qerl_bench.engine.base import RolloutEngine, Sampling
from qerl_bench.model.merging import Merging
from qerl_bench.records import Prompt, Rollout


class MergingEngine:
    """`engine`, whose policy has `merging` on in its calls."""

    def __init__(self, engine: RolloutEngine, merging: Merging) -> None:
        self.engine, self.merging = engine, merging

    def sync(self, prompts: list[Prompt]) -> dict[str, float]:
        return self.engine.sync(prompts)

    def require_room(self, prompts: list[Prompt], sampling: Sampling) -> None:
        self.engine.require_room(prompts, sampling)

    def prompts_at_once(self, samples: int) -> int:
        return self.engine.prompts_at_once(samples)

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Rollout]:
        with self.merging.active():
            return self.engine.generate(prompts, sampling)

    def sleep(self) -> dict[str, float]:
        return self.engine.sleep() | {"merge/update_kept": self.merging.update_kept()}

    def record(self) -> dict[str, Any]:
        return self.engine.record() | {"merge": True}

    def close(self) -> None:
        self.engine.close()
