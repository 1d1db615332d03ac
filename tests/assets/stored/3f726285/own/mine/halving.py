"""aqn=halving: sigma falls by half from stage to stage."""

from dataclasses import dataclass

from qerl_bench.aqn.base import Schedule, stage_of


@dataclass(frozen=True, kw_only=True)
class Halving(Schedule):
    name: str
    sigma_start: float
    stages: int

    def sigma(self, step: int, total_steps: int) -> float:
        return self.sigma_start * 0.5 ** stage_of(step, total_steps, self.stages)
