"""The specs of a run that its training reads."""

from __future__ import annotations

from typing import Protocol

from qerl_bench.algo.base import Algorithm
from qerl_bench.algo.importance_sampling import ImportanceSampling
from qerl_bench.algo.kl import KLPenalty
from qerl_bench.aqn.spec import NoiseSpec
from qerl_bench.lora.base import Adapter
from qerl_bench.parallel import ParallelSpec
from qerl_bench.train.spec import OptimSpec, RolloutSpec, TrainSpec


class Specs(Protocol):
    """What updates and their passes read; an `Experiment` has it, and more."""

    @property
    def seed(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def algo(self) -> Algorithm: ...
    @property
    def kl(self) -> KLPenalty: ...
    @property
    def importance_sampling(self) -> ImportanceSampling: ...
    @property
    def noise(self) -> NoiseSpec: ...
    @property
    def lora(self) -> Adapter: ...
    @property
    def rollout(self) -> RolloutSpec: ...
    @property
    def optim(self) -> OptimSpec: ...
    @property
    def train(self) -> TrainSpec: ...
    @property
    def parallel(self) -> ParallelSpec: ...
