"""What a noise schedule is: a standard deviation for every step of a run. Injection is shared, in `inject.py`."""

from __future__ import annotations

from typing import Protocol


class NoiseSchedule(Protocol):
    """sigma(step) of adaptive quantization noise (AQN)."""

    @property
    def name(self) -> str: ...

    def sigma(self, step: int, total_steps: int) -> float:
        """Noise standard deviation for step `step`, counted 1..total_steps; 0.0 means no noise."""
        ...


def stage_of(step: int, total_steps: int, stages: int) -> int:
    """Index 0..stages-1 of the equal part of the run that `step` (1..total_steps) falls into."""
    return (step - 1) * stages // total_steps
