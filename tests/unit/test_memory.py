"""Memory that runs out is told with the phase, the numbers and the remedy."""

from __future__ import annotations

import pytest
import torch

from qerl_bench.checks import TrainingStopped
from qerl_bench.device import PhaseTimer
from qerl_bench.exits import exit_in_words
from qerl_bench.memory import memory_for, shortage


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("Tried to allocate 2.00 GiB"), MemoryError(), RuntimeError("std::bad_alloc")]
)
def test_each_kind_of_it_in_each_phase(error: Exception) -> None:
    timer = PhaseTimer("cpu")
    phase = r"^train: .*the same command continues.*train.micro_batch_size"
    with pytest.raises(TrainingStopped, match=phase) as told, timer("step"), timer("train"):
        raise error
    assert (str(error) or "MemoryError") in str(told.value)
    with pytest.raises(TrainingStopped, match=r"^evaluation: .*eval.samples"), memory_for("evaluation"):
        raise error


def test_what_pytorch_says_of_the_machine() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert shortage(caught.value) is not None


def test_other_errors_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert shortage(RuntimeError("shapes differ")) is None and shortage(KeyboardInterrupt()) is None
    with pytest.raises(ValueError, match="x"), memory_for("train"):
        raise ValueError("x")
    with pytest.raises(SystemExit) as ended, exit_in_words("stopped"):
        raise MemoryError("too little " * 100)
    assert ended.value.code == 1 and capsys.readouterr().err.count("too little") < 40
