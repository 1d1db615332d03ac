"""References: the numbers of the same runs under the process launcher, which nothing happens to."""

from __future__ import annotations

import os
from functools import cache

import pytest

from tests.cluster.runs import Expected, Sweeps
from tests.faults.run import numbers


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """expected(seed): the numbers of such a run."""

    @cache
    def made() -> Sweeps:
        sweeps = Sweeps(tmp_path_factory.mktemp("expected"), {**os.environ}, ("hydra.launcher.slots=2",))
        sweeps.hurry.touch()
        code, said = sweeps.run("seed=0,1,2")
        assert code == 0, said
        return sweeps

    return lambda seed: numbers(made().folder(seed))
