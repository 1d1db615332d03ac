"""References: the numbers of the same runs under the process launcher, which nothing happens to."""

from __future__ import annotations

import os
from functools import cache

import pytest

from tests.cluster.runs import Expected, Sweeps
from tests.faults.run import numbers


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """expected(steps, seed): the numbers of such a run."""

    @cache
    def of_steps(steps: int) -> Sweeps:
        sweeps = Sweeps(tmp_path_factory.mktemp("expected"), {**os.environ}, ("hydra.launcher.slots=2",))
        sweeps.hurry.touch()
        code, said = sweeps.run("seed=0,1,2", f"steps={steps}")
        assert code == 0, said
        return sweeps

    return lambda steps, seed: numbers(of_steps(steps).folder(seed))
