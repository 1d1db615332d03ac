"""Memory that runs out is told with the phase, the numbers and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from qerl_bench.__main__ import main
from qerl_bench.commands import run
from qerl_bench.train import memory_plan
from qerl_bench.train.batch import make_batch
from qerl_bench.train.memory_plan import MemoryPlan, Size, micro_batch_size
from qerl_bench.train.retry_smaller import after_shortage
from qerl_bench.train.trainer_state import TrainerState
from qerl_bench.train.update import make_optimizer, update
from qerl_core.checks import ConfigError, TrainingStopped
from qerl_core.exits import exit_in_words
from qerl_core.process.device import PhaseTimer, peak_bytes
from qerl_core.process.failure import reason_of
from qerl_core.process.gpu_share import RUNS_ON_GPU, free_bytes, keep_to_share, keepable_bytes, spare_bytes
from qerl_core.process.out_of_memory import memory_for, shortage, whole_or_halves

GIB = 2**30


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("std::bad_alloc"),
        RuntimeError("can't start new thread"),
        type("ArrowMemoryError", (MemoryError,), {})("realloc of size 256 failed"),
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


def test_a_card_that_is_full_before_the_first_phase_is_told_as_a_shortage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep repeats alone what says so, and nothing else."""

    def full(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in")

    monkeypatch.setattr(run, "build", full)
    with pytest.raises(SystemExit, match=r"^1$"):
        main(["run", "device=cpu", f"root={tmp_path}", "name=one"])
    assert "run: no memory is left (CUDA error: out of memory" in " ".join(capsys.readouterr().err.split())
    assert "run: no memory is left" in reason_of(tmp_path / "runs" / "one", 1)


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
    told = TrainingStopped("train: no memory is left (CUDA error: out of memory)")
    assert shortage(told) is None  # which is to end the run
    assert shortage(RuntimeError("shapes differ")) is None and shortage(KeyboardInterrupt()) is None
    with pytest.raises(ValueError, match="x"), memory_for("train"):
        raise ValueError("x")
    with pytest.raises(SystemExit) as ended, exit_in_words("stopped"):
        raise MemoryError("too little " * 100)
    assert ended.value.code == 1 and capsys.readouterr().err.count("too little") < 50


def test_threads_that_get_no_stack_are_a_shortage(capsys: pytest.CaptureFixture[str]) -> None:
    """As on a machine of 64 cores with a limit on addresses; a panic of tokenizers is no Exception."""

    class PanicException(BaseException):
        pass

    error = PanicException("The global thread pool has not been initialized.: ThreadPoolBuildError { kind: ... }")
    assert shortage(RuntimeError("can't start new thread")) is not None
    assert shortage(SystemError("error return without exception set\n    full_key: model")) is not None
    assert shortage(SystemError("bad argument to internal function")) is None
    with pytest.raises(SystemExit) as ended, exit_in_words("stopped"):
        raise error
    assert ended.value.code == 1 and "ThreadPoolBuildError" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended, exit_in_words("stopped"):
        raise SystemExit(7) from MemoryError()
    assert ended.value.code == 7


def test_a_phase_keeps_its_peak_through_a_measurement_within_it(gpu: Callable[..., Any]) -> None:
    """Of 5 GiB in use and 7 held before it, and 1 and 2 GiB in it; the next phase begins anew."""
    now, peak = [GIB, 2 * GIB], [0, 0]

    def work(used: int, held: int) -> None:
        peak[:] = max(peak[0], used * GIB), max(peak[1], held * GIB)

    gpu(reset_peak_memory_stats=lambda: peak.__setitem__(slice(None), now), memory_allocated=lambda: now[0])
    gpu(max_memory_allocated=lambda: peak[0], max_memory_reserved=lambda: peak[1], synchronize=lambda: None)
    timer = PhaseTimer("cuda")
    with timer("train"):
        work(5, 7)
        assert peak_bytes("cuda", lambda: work(3, 4)) == 2 * GIB
        assert peak_bytes("cuda", lambda: work(2, 4)) == GIB
    with timer("next"):
        work(3, 3)
    assert timer.peak_gib == {"train": 5, "next": 3} and timer.reserved_gib == {"train": 7, "next": 3}


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


def test_a_plan_of_recorded_passes_has_room_for_a_pool_and_a_pass_beside_it() -> None:
    """1 MiB a token: of 17 GiB that may be used, 2.125 times as much as a micro-batch takes, at most 12 GiB."""
    peaks = {1000: 1000 * 2**20, 2000: 2000 * 2**20}
    plan = MemoryPlan.of(peaks, free=20 * GIB, states=0, least=5120)
    assert plan.recorded and plan.micro_batch_tokens == 8 * 1024 and "2.125 times" in str(plan)
    large = MemoryPlan.of(peaks, free=75 * GIB, states=0, least=5120)
    assert large.recorded and large.micro_batch_tokens == 12 * 1024
    none = MemoryPlan.of(peaks, free=20 * GIB, states=0, least=9000)  # four padded sequences do not fit
    assert not none.recorded and none.micro_batch_tokens == 17 * 1024
    assert MemoryPlan.of(peaks, free=8 * GIB, states=0, least=3200).micro_batch_tokens == 3200


def _on(device: str) -> Any:
    return SimpleNamespace(device=torch.device(device))


def test_micro_batches_are_measured_once_and_kept(
    make_experiment: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="qerl_bench")
    plan = MemoryPlan(free=8 * GIB, fixed=GIB, per_token=2**20, micro_batch_tokens=4096, recorded=False)
    plans = iter([plan])  # measured twice there would be none
    monkeypatch.setattr(memory_plan, "measured_plan", lambda *_: next(plans))
    train, run, no_optimizer = make_experiment().train, Run(tmp_path), cast("Any", None)

    def ask(device: str, longest: int, state: TrainerState) -> Size:
        return micro_batch_size(train, _on(device), no_optimizer, longest, run, True, state)  # type: ignore[arg-type]

    assert ask("cpu", 100, TrainerState()) == Size(2048, recorded=True)
    assert ask("cpu", 9000, TrainerState()).tokens == 9000
    assert not [*tmp_path.iterdir()]
    state = TrainerState()
    assert ask("cuda", 1000, state) == Size(4096, recorded=False) and "1.00 MiB a token" in caplog.text
    again = TrainerState(size=memory_plan.planned_before(run))  # type: ignore[arg-type]
    assert ask("cuda", 5000, state).tokens == 5000 and ask("cuda", 1000, again) == Size(4096, recorded=False)
    assert json.loads((tmp_path / "memory.json").read_text())["longest_sequence"] == 1000


@pytest.mark.parametrize(
    ("tokens", "longest", "recorded"), [(4096, 1000, True), (4096, 3000, False), (16384, 3000, True)]
)
def test_recorded_passes_are_no_larger_than_micro_batches(
    make_experiment: Callable[..., Any], tokens: int, longest: int, recorded: bool
) -> None:
    """The smallest has four rows: 12,288 tokens where the longest sequence has 3,000."""
    train, nothing = make_experiment(f"train.micro_batch_tokens={tokens}").train, cast("Any", None)
    state = TrainerState()
    assert micro_batch_size(train, _on("cuda"), nothing, longest, nothing, True, state) == Size(tokens, recorded)


def test_a_run_that_begins_again_knows_nothing_of_a_shortage_before(
    make_experiment: Callable[..., Any], tmp_path: Path
) -> None:
    train, policy, run, nothing = make_experiment().train, _on("cpu"), cast("Any", Run(tmp_path)), cast("Any", None)
    state = TrainerState()
    state.shortages.begin(4)
    error, size = torch.OutOfMemoryError("Tried to allocate"), Size(2048, recorded=False)
    smaller = after_shortage(error, size, train, state.shortages, 100, run, may_shrink=True, frees=False)
    assert smaller == micro_batch_size(train, policy, nothing, 100, run, False, state) == Size(1024, recorded=False)
    again = TrainerState(size=memory_plan.planned_before(run))
    assert micro_batch_size(train, policy, nothing, 100, run, False, again) == size


def test_a_share_of_a_gpu_is_what_is_planned_for(
    make_policy: Callable[..., Any],
    make_experiment: Callable[..., Any],
    gpu: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """40 GiB free of 80: all of them alone, 39 - 10 beside another run, for which 10 are held already."""
    policy = make_policy(adapted=True)
    optimizer = make_optimizer(policy, make_experiment().optim)
    gpu(mem_get_info=lambda *_: (40 * GIB, 80 * GIB), memory_reserved=lambda *_: 10 * GIB)
    for runs, free in ((1, 40), (2, 29), (4, 9), (8, 0)):
        monkeypatch.setenv(RUNS_ON_GPU, str(runs))
        assert memory_plan.measured_plan(policy, optimizer, 30, records=False).free == free * GIB
    for said in ("0", "-1", "two", ""):
        monkeypatch.setenv(RUNS_ON_GPU, said)
        with pytest.raises(ConfigError, match=rf"{RUNS_ON_GPU}={said} must be .* at least 1.*unset"):
            free_bytes()


def test_pytorch_is_told_the_share(gpu: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    gpu(mem_get_info=lambda *_: (40 * GIB, 80 * GIB), set_per_process_memory_fraction=told.append)
    keep_to_share()
    assert told == [] and keepable_bytes(50 * GIB, "cuda") == 50 * GIB  # alone
    monkeypatch.setenv(RUNS_ON_GPU, "2")
    keep_to_share()
    assert told == [39 / 80] and keepable_bytes(8 * GIB, "cuda") == 8 * GIB
    assert keepable_bytes(10 * GIB, "cuda") == 39 / 4 * GIB and keepable_bytes(10 * GIB, "cpu") == 10 * GIB
    monkeypatch.setenv(RUNS_ON_GPU, "80")  # a share that CUDA's own memory would fill
    keep_to_share()
    assert told[1] == 0.75 / 80


def test_memory_of_recordings_is_not_spare(gpu: Callable[..., Any]) -> None:
    pieces = [
        {"segment_pool_id": pool, "total_size": 100, "allocated_size": used}
        for pool, used in (((0, 0), 30), ((0, 0), 100), ((0, 1), 0), ((2, 0), 50))
    ]
    gpu(memory_snapshot=lambda: pieces)
    assert spare_bytes() == 70


def test_what_does_not_fit_is_done_in_halves() -> None:
    sizes: list[int] = []

    def work(items: Sequence[int]) -> list[int]:
        sizes.append(len(items))
        if len(items) > 3 or 7 in items:
            raise MemoryError
        return [2 * item for item in items]

    assert whole_or_halves(work, range(3)) == [0, 2, 4] and sizes == [3]
    assert whole_or_halves(work, [*range(7), 8]) == [0, 2, 4, 6, 8, 10, 12, 16] and sizes == [3, 8, 4, 2, 2, 4, 2, 2]
    with pytest.raises(MemoryError):
        whole_or_halves(work, range(9))
    with pytest.raises(TypeError):
        whole_or_halves(work, [1, "2"[0], None])  # type: ignore[list-item]


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
    plan = memory_plan.measured_plan(policy, make_optimizer(policy, make_experiment().optim), 512, records=False)
    peak = peak_bytes("cuda", lambda: memory_plan.training_pass(policy, 32, 512))
    states = memory_plan.ADAM_BYTES * sum(parameter.numel() for parameter in policy.trainable)
    assert plan.fixed - states + 16_384 * plan.per_token == pytest.approx(peak, rel=0.15)
