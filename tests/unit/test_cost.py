"""What runs took, and the energy counter behind it."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qerl_core.process import energy
from qerl_core.rundir.run_dir import RunDir
from qerl_studies.runs.cost import total_cost

NVML = """
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { *device = (void *)uuid; return uuid[4] == 'a'; }
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *mj) { *mj = 5000000123ULL; return 0; }
"""


def test_hours_and_energy_are_summed() -> None:
    gpu = {"device": "cuda", "ranks": 2, "threads": 8}
    records: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"wall_s": 7200.0, "energy_j": 1.8e6}, gpu),
        ({"wall_s": 3600.0, "energy_j": None}, gpu | {"ranks": 1}),
        ({"wall_s": 1800.0}, {"device": "cpu", "threads": 4}),
        ({}, gpu),  # a run from before durations were kept
    ]
    cost = total_cost(records)
    assert (cost.runs, cost.wall_h, cost.gpu_h, cost.core_h) == (3, 3.5, 5.0, 2.0)
    assert (cost.metered, cost.energy_kwh) == (1, 0.5)
    assert all(part in str(cost) for part in ("3.5 h", "5 GPU-hours", "2 core-hours", "0.5 kWh", "1 of"))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_counter_is_read_from_nvml(tmp_path: Path, gpu: Any) -> None:
    (tmp_path / "nvml.c").write_text(NVML)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "nvml.so", "nvml.c"], cwd=tmp_path, check=True)
    nvml = ctypes.CDLL(str(tmp_path / "nvml.so"))
    assert energy._energy(nvml, "GPU-b") == pytest.approx(5_000_000.123)
    assert energy._energy(nvml, "GPU-a") is None  # no such GPU
    gpu(get_device_properties=lambda device: SimpleNamespace(uuid="b"))
    assert energy.counter("cuda:1", str(tmp_path / "nvml.so")) == pytest.approx(5_000_000.123)
    assert energy.counter("cuda", "libno-such-thing.so") is None and energy.counter("cpu") is None


def test_a_run_keeps_its_energy_over_attempts(make_config: Any, tmp_path: Path) -> None:
    counts = iter([100.0, 130.0, 160.0, 200.0])
    with RunDir(tmp_path / "run", make_config()) as run:
        assert run.energy_j is None  # nothing counts
        run.meter(lambda: next(counts))
        assert run.energy_j == 30.0
        run.spent_j = 7.0  # as a checkpoint says
        assert run.energy_j == 67.0
        run.last_step = 0
        run.finish()
    assert json.loads((tmp_path / "run" / "done.json").read_text())["energy_j"] == 107.0


def test_an_attempt_that_did_not_count_leaves_the_sum_unknown(make_config: Any, tmp_path: Path) -> None:
    with RunDir(tmp_path / "run", make_config()) as run:
        run.meter(lambda: 1.0)
        run.spent_j = None
        assert run.energy_j is None
