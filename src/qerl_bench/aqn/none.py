"""aqn=none: no noise."""

from __future__ import annotations

from dataclasses import dataclass

from qerl_bench.aqn.base import Schedule


@dataclass(frozen=True, kw_only=True)
class NoNoise(Schedule):
    """Sigma is zero in every step."""

    name: str

    def sigma(self, step: int, total_steps: int) -> float:
        return 0.0
