"""Which device, how long, how much memory; on machines that hide what is asked for, too."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_core.checks import ConfigError
from qerl_core.process import device
from qerl_core.process.cards import DeviceCheck, require_gpu, visible_gpus
from qerl_core.process.device import PhaseTimer, peak_gib, reset_peak, resolve_device


@pytest.mark.parametrize(
    ("wanted", "there", "expected"),
    [
        ("auto", True, "cuda"),
        ("auto", False, "cpu"),
        ("cpu", True, "cpu"),
        ("cpu", False, "cpu"),
        ("cuda", True, "cuda"),
    ],
)
def test_resolve_device(wanted: str, there: bool, expected: str, gpu: Callable[..., Any]) -> None:
    gpu(is_available=lambda: there)
    assert resolve_device(wanted) == expected


def test_a_gpu_that_is_missing_is_an_error_and_no_silent_fallback(gpu: Callable[..., Any]) -> None:
    gpu(is_available=lambda: False)
    with pytest.raises(ConfigError, match="device=cpu"):
        resolve_device("cuda")


def two_cards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program nvidia-smi that lists two."""
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, NVIDIA H100 80GB HBM3'\necho '1, NVIDIA A40'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize("wanted", ["cuda:7", "gpu", "mps", "", None])
def test_another_device_is_refused_with_the_cards_that_there_are(
    wanted: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    named = rf"device must be one of auto, cpu, cuda, got {wanted!r}\. "
    with pytest.raises(ConfigError, match=f"{named}nvidia-smi lists no GPU.*device=cpu"):
        DeviceCheck()("device", wanted)
    two_cards(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=rf"{named}.* 0 \(NVIDIA H100 80GB HBM3\), 1 \(NVIDIA A40\).*device=cuda"):
        DeviceCheck()("device", wanted)


@pytest.mark.parametrize("hiding", ["", "-1", "-1,0"])
def test_hidden_cards_are_named_with_what_hides_them(
    hiding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_cards(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hiding)
    with pytest.raises(ConfigError, match=rf"device=cuda.*0 \(.*1 \(.*CUDA_VISIBLE_DEVICES='{hiding}'.*device=cpu"):
        require_gpu("cuda")
    require_gpu("cpu")
    require_gpu("auto")


def test_gpus_to_use_are_those_chosen_or_else_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_cards(tmp_path, monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible_gpus() == ["1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_phases_measure_each_and_add_up_repeats() -> None:
    timer = PhaseTimer("cpu")
    with timer("step"):
        with timer("rollout"):
            time.sleep(0.02)
        for _ in range(2):
            with timer("train"):
                time.sleep(0.01)
    assert set(timer.seconds) == set(timer.peak_gib) == {"step", "rollout", "train"}
    assert 0.02 <= timer.seconds["rollout"] < 0.5
    assert 0.02 <= timer.seconds["train"] < 0.5
    assert timer.seconds["step"] >= timer.seconds["rollout"] + timer.seconds["train"]


def test_a_phase_lets_exceptions_through() -> None:
    timer = PhaseTimer("cpu")
    with pytest.raises(KeyError), timer("rollout"):
        raise KeyError
    assert "rollout" not in timer.seconds


def _clearing_works() -> bool:
    """Whether this system lets a process start its peak again."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return "VmHWM:" in Path("/proc/self/status").read_text()


def test_peak_memory_belongs_to_its_phase() -> None:
    if not _clearing_works():
        pytest.skip("this system does not let a process reset its peak memory")
    timer = PhaseTimer("cpu")
    with timer("before"):
        pass
    with timer("big"):
        block = torch.ones(2**27)  # 512 MiB, touched
        del block
    with timer("after"):
        pass
    big, rest = timer.peak_gib["big"], max(timer.peak_gib["before"], timer.peak_gib["after"])
    assert big > rest + 0.4


def test_peak_memory_is_of_the_right_size() -> None:
    reset_peak("cpu")
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**30
    assert resident * 0.9 < peak_gib("cpu") < resident + 4


@pytest.mark.parametrize("status", [None, "Name:\tpython\nVmRSS:\t 1000 kB\n"])
def test_where_the_system_does_not_tell_the_peak_is_that_of_the_process(
    status: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other systems have no /proc, and sandboxes leave lines out of it."""

    class NoProc:
        def __init__(self, path: str) -> None: ...

        def read_text(self) -> str:
            if status is None:
                raise FileNotFoundError
            return status

        def write_text(self, text: str) -> None:
            raise PermissionError

    monkeypatch.setattr(device, "Path", NoProc)
    reset_peak("cpu")
    assert peak_gib("cpu") == pytest.approx(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, rel=0.01)


def test_the_gpu_is_synchronised_at_every_border(gpu: Callable[..., Any]) -> None:
    calls: list[str] = []

    def record(name: str, result: Any = None) -> Callable[[], Any]:
        return lambda: (calls.append(name), result)[1]

    gpu(synchronize=record("wait"), reset_peak_memory_stats=record("reset"))
    gpu(max_memory_allocated=record("read", 3 * 2**30))
    timer = PhaseTimer("cuda")
    with timer("train"):
        calls.append("work")
    assert calls == ["reset", "wait", "work", "wait", "read"]
    assert timer.peak_gib == {"train": 3.0}


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("model name\t: x\nflags\t\t: fpu avx2 avx512f avx512_bf16 sse\n", True),
        ("flags\t\t: fpu amx_tile amx_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags\t\t: fpu avx2 avx512f\n", False),
        ("model name: bf16\n", None),
        (None, None),
    ],
)
def test_whether_a_processor_multiplies_bf16(content: str | None, found: bool | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "cpuinfo").write_text(content)
    assert device.multiplies_bf16(tmp_path / "cpuinfo") is found
