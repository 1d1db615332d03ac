"""References: the numbers of the same runs under the process launcher, which nothing happens to. They are made once,
also if the files of this folder are tested side by side (pytest -n)."""

from __future__ import annotations

import os
from functools import cache

import pytest

from qerl_core.rundir.locks import wait_for_lock
from tests.cluster.runs import Expected, Sweeps
from tests.faults.run import numbers


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """expected(seed): the numbers of such a run."""

    @cache
    def made() -> Sweeps:
        own = tmp_path_factory.getbasetemp()
        place = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "expected"
        place.mkdir(exist_ok=True)
        sweeps = Sweeps(place, {**os.environ}, ("hydra.launcher.slots=2",))
        sweeps.hurry.touch()
        with wait_for_lock(place / "lock", "the sweep of the references"):
            code, said = sweeps.run("seed=0,1,2")  # which does nothing if they are there
        assert code == 0, said
        return sweeps

    return lambda seed: numbers(made().folder(seed))
