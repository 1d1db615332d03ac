"""aqn=none: the sampler uses the clean policy."""

from __future__ import annotations

from dataclasses import dataclass

from qerl_bench.aqn.base import Schedule


@dataclass(frozen=True, kw_only=True)
class NoNoise(Schedule):
    """A schedule that is zero everywhere."""

    name: str

    def sigma(self, step: int, total_steps: int) -> float:
        return 0.0
