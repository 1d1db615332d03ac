"""Memory that runs out is told with the phase, the numbers and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qerl_bench.checks import ConfigError, TrainingStopped
from qerl_bench.device import PhaseTimer
from qerl_bench.exits import exit_in_words
from qerl_bench.memory import memory_for, shortage
from qerl_bench.train import memory_plan
from qerl_bench.train.batch import make_batch
from qerl_bench.train.memory_plan import MemoryPlan, micro_batch_tokens
from qerl_bench.train.update import make_optimizer, update

GIB = 2**30


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_each_kind_of_it_in_each_phase(error: Exception) -> None:
    timer = PhaseTimer("cpu")
    phase = r"^train: .*the same command continues.*train.micro_batch_tokens"
    with pytest.raises(TrainingStopped, match=phase) as told, timer("step"), timer("train"):
        raise error
    assert (str(error) or "MemoryError") in str(told.value)
    with pytest.raises(TrainingStopped, match=r"^evaluation: .*eval.samples"), memory_for("evaluation"):
        raise error


def test_what_pytorch_says_of_the_machine() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert shortage(caught.value) is not None


def test_what_a_gpu_says_of_this_process_is_kept() -> None:
    said = (
        "CUDA out of memory. Tried to allocate 924.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 56.09 GiB "
        "is free. Including non-PyTorch memory, this process has 79.92 GiB memory in use. Process 501 has 774.00 MiB "
        "memory in use. Process 507 has 1.40 GiB memory in use. Of the allocated memory 66.90 GiB is allocated by "
        "PyTorch, and 11.90 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
        "try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for "
        "Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )
    found = shortage(torch.OutOfMemoryError(said))
    assert found is not None and "Process" not in found and "See documentation" not in found
    assert "66.90 GiB is allocated by PyTorch" in found and found.endswith("to avoid fragmentation.")


def test_other_errors_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert shortage(RuntimeError("shapes differ")) is None and shortage(KeyboardInterrupt()) is None
    with pytest.raises(ValueError, match="x"), memory_for("train"):
        raise ValueError("x")
    with pytest.raises(SystemExit) as ended, exit_in_words("stopped"):
        raise MemoryError("too little " * 100)
    assert ended.value.code == 1 and capsys.readouterr().err.count("too little") < 50


# --- micro-batches ---------------------------------------------------------------------------------------------------


class Run:
    """A run directory as far as `memory_plan` uses it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)


def test_a_plan_by_hand() -> None:
    """Passes of 1,000 and 2,000 tokens took 3 and 5 MiB: 2 KiB and a bit a token, and 1 MiB whatever the tokens."""
    plan = MemoryPlan.of({1000: 3 * 2**20, 2000: 5 * 2**20}, free=20 * 2**20, states=2**20)
    assert plan.per_token == 2 * 2**20 // 1000 and plan.fixed == pytest.approx(2 * 2**20, abs=2000)
    assert plan.micro_batch_tokens == 7 * 1024  # of 15 MiB that are left of 85 % of 20
    assert "7,168" in str(plan)
    assert MemoryPlan.of({1000: 3 * 2**20, 2000: 5 * 2**20}, free=GIB, states=0).micro_batch_tokens == 32_768
    assert MemoryPlan.of({1000: GIB, 2000: 2 * GIB}, free=2**20, states=0).micro_batch_tokens == 1


def test_a_pass_to_measure_leaves_nothing_behind(make_policy: Callable[..., Any]) -> None:
    policy = make_policy("lora.dropout=0.5", adapted=True)
    state = torch.get_rng_state()
    memory_plan.training_pass(policy, 2, 9)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in policy.trainable) and not policy.model.training


def test_micro_batches_are_measured_once_kept_and_halved_after_a_shortage(
    make_experiment: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="qerl_bench")
    plan = MemoryPlan(free=8 * GIB, fixed=GIB, per_token=2**20, micro_batch_tokens=4096)
    monkeypatch.setattr(memory_plan, "measured_plan", lambda *_: plan)
    train, run = make_experiment().train, Run(tmp_path)
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    policies: list[Any] = [on_gpu, SimpleNamespace(device=torch.device("cpu"))]
    ask = lambda policy, longest: micro_batch_tokens(train, policy, None, longest, run)  # noqa: E731
    assert ask(policies[1], 100) == 8192 and ask(policies[1], 9000) == 9000 and not [*tmp_path.iterdir()]
    assert ask(on_gpu, 1000) == 4096 and "1.00 MiB a token" in caplog.text and "8.00 GiB free" in caplog.text
    monkeypatch.setattr(memory_plan, "measured_plan", lambda *_: pytest.fail("measured twice"))
    with (
        pytest.raises(TrainingStopped, match=r"4,096 tokens.*recompute=none.*1,000.*same command.*2,048") as told,
        memory_plan.shortage_in_words(train, 4096, 1000, run),
    ):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
    assert "2.00 GiB" in str(told.value) and "micro_batch_tokens=" not in str(told.value)
    assert ask(on_gpu, 1000) == 2048 and json.loads((tmp_path / "memory.json").read_text())["longest_sequence"] == 1000


def test_a_given_size_that_runs_out_of_memory_is_not_changed(
    make_experiment: Callable[..., Any], make_policy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a step: one message, with the sizes and what to set."""
    policy, experiment = make_policy(), make_experiment("train.micro_batch_tokens=40", "train.recompute=selective")
    batch = make_batch([[1, 2], [3]], [[7] * 10, [8]], 0, policy.device, [[-1.0] * 10, [-1.0]], torch.tensor([1.0, -1]))

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    monkeypatch.setattr(policy, "token_stats", full)
    with pytest.raises(TrainingStopped, match=r"2.00 GiB.* 40 tokens.* 12\. .*micro_batch_tokens.*recompute=full"):
        update(experiment, policy, make_optimizer(policy, experiment.optim), batch, Run(Path("/none")), 1)  # type: ignore[arg-type]


def test_a_micro_batch_below_the_longest_sequence_is_refused(
    make_experiment: Callable[..., Any], make_policy: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match=r"micro_batch_tokens=12 .*max_completion_tokens=12"):
        make_experiment("train.micro_batch_tokens=12")
    policy, experiment = make_policy(), make_experiment("train.micro_batch_tokens=13")
    batch = make_batch([[1, 2]], [[7] * 12], 0, policy.device, [[-1.0] * 12])
    no_run: Any = None
    with pytest.raises(TrainingStopped, match=r"micro_batch_tokens=13 .*14 tokens"):
        update(experiment, policy, make_optimizer(policy, experiment.optim), batch, no_run, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_the_measured_plan_holds_on_a_gpu(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], mode: str
) -> None:
    """The peak of a pass of 16,384 tokens is what two small ones foretell, to 15 %."""
    words = ("model.hidden_size=512", "model.heads=8", "model.kv_heads=8", "model.intermediate_size=1024")
    policy = make_policy(*words, "model.dtype=bfloat16", f"train.recompute={mode}", device="cuda")
    plan = memory_plan.measured_plan(policy, make_optimizer(policy, make_experiment().optim), 512)
    peak = memory_plan.peak_bytes(policy, lambda: memory_plan.training_pass(policy, 32, 512))
    states = memory_plan.ADAM_BYTES * sum(parameter.numel() for parameter in policy.trainable)
    assert plan.fixed - states + 16_384 * plan.per_token == pytest.approx(peak, rel=0.15)
