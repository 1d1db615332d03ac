"""What runs took: hours, GPU-hours, core-hours, energy. Read from done.json and env.json; needs no pandas.

A run that was killed and continued counts without the steps that were lost. Left out: runs that are not finished, and
what a run waited for before it began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

HOUR = 3600.0
KWH = 3.6e6  # joules


@dataclass(frozen=True)
class Cost:
    """The sum over `runs` runs. `energy_kwh` is that of the `metered` runs, which had a GPU with a counter."""

    runs: int
    wall_h: float  # one run after the other
    gpu_h: float  # wall clock x GPUs, used or idle
    core_h: float  # wall clock x threads of PyTorch, of runs on a CPU
    metered: int
    energy_kwh: float

    def __str__(self) -> str:
        parts = [f"{self.wall_h:.3g} h one after the other"]
        parts += [f"{hours:.3g} {name}-hours" for name, hours in (("GPU", self.gpu_h), ("core", self.core_h)) if hours]
        if self.metered:
            some = "" if self.metered == self.runs else f" in {self.metered} of them"
            parts.append(f"{self.energy_kwh:.3g} kWh of the GPUs{some}")
        return ", ".join(parts)


def total_cost(records: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Cost:
    """The cost of the runs with these contents of done.json and env.json; those without a duration are left out."""
    runs = metered = 0
    wall_h = gpu_h = core_h = energy_kwh = 0.0
    for done, environment in records:
        if done.get("wall_s") is None:
            continue
        hours, on_gpu = done["wall_s"] / HOUR, environment.get("device") == "cuda"
        runs += 1
        wall_h += hours
        gpu_h += hours * environment.get("ranks", 1) if on_gpu else 0.0
        core_h += 0.0 if on_gpu else hours * environment.get("ranks", 1) * environment.get("threads", 1)
        if done.get("energy_j") is not None:
            metered += 1
            energy_kwh += done["energy_j"] / KWH
    return Cost(runs, wall_h, gpu_h, core_h, metered, energy_kwh)
