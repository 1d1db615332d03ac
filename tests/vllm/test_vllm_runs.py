"""Whole runs, and what is left of vLLM after each way in which a run can end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qerl_bench.engine.base import Sampling
from qerl_bench.engine.hf import HFEngine
from qerl_bench.engine.vllm.process import PREFIX, SHARED_MEMORY, is_running

ROOT = Path(__file__).parents[2]
RUN = (sys.executable, str(ROOT / "src/run.py"), "experiment=smoke", "device=cpu", "rollout.temperature=0.9")


def _started(root: Path, *words: str) -> subprocess.Popen[str]:
    """A run in a session of its own that hears Ctrl-C, as from a terminal; a background job inherits deaf ears."""
    command = [*RUN, f"root={root}", *words]
    with open(root / "output.txt", "w") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
        )


def _descendants(pid: int) -> set[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").glob("*") for child in (task / "children").read_text().split()
    ]
    return set(children).union(*(_descendants(child) for child in children))


def _sampling_run(root: Path, overrides: tuple[str, ...]) -> tuple[subprocess.Popen[str], set[int]]:
    """A run that has taken its first step, and the processes under it."""
    run = _started(root, *overrides, "steps=100000")
    end = time.monotonic() + 240
    while time.monotonic() < end and run.poll() is None:
        if '"train"' in "".join(path.read_text() for path in root.glob("runs/*/metrics.jsonl")):
            return run, _descendants(run.pid)
        time.sleep(0.2)
    raise AssertionError((root / "output.txt").read_text())


def _gone(pids: set[int], within: float = 30.0) -> bool:
    end = time.monotonic() + within
    while any(is_running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)
    return not any(is_running(pid) for pid in pids)


def test_a_run_of_4_bit_weights_with_noise_records_what_sampled(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    words = ("engine.isolation=same", "quant=nvfp4", "engine.dequantize=true", "aqn=constant", "train.entropy_coef=0.1")
    assert _started(tmp_path, *overrides, *words).wait(240) == 0, (tmp_path / "output.txt").read_text()
    [run] = (tmp_path / "runs").iterdir()
    record = json.loads((run / "engine.json").read_text())
    assert record["weights"] == "nvfp4 values on float32 kernels (no claim about speed)"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    assert len(trained) == 6 and (run / "done.json").exists()
    for line in trained:
        assert line["sync/norms_changed"] == line["aqn/norms_perturbed"] == 8
        assert max(line["sync/gap"], line["sync/gap_base"]) < 1e-4
        assert line["mismatch/kernel_logp_abs_max"] < 1e-3  # same noise in both: only kernels differ
        assert line["time/sync_s"] > 0
    assert trained[0]["sync/adapter_effect"] == 0 < trained[-1]["sync/adapter_effect_engine"]


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two cores, one for each of two workers: vLLM on a CPU wants to be told."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, cores)))
    return cores


@pytest.mark.parametrize(("end", "workers"), [("killed", 1), ("killed", 2), ("interrupted", 1), ("vllm killed", 1)])
def test_a_run_that_ends_badly_leaves_no_process_and_no_file(
    tmp_path: Path, overrides: tuple[str, ...], request: pytest.FixtureRequest, end: str, workers: int
) -> None:
    if workers > 1 and len(request.getfixturevalue("cores")) < workers:
        pytest.skip("needs a core for each worker")
    run, below = _sampling_run(tmp_path, (*overrides, f"engine.tensor_parallel_size={workers}"))
    try:
        assert len(below) >= 1 + (workers if workers > 1 else 0)
        if end == "killed":  # nothing in the run gets a word in
            os.kill(run.pid, signal.SIGKILL)
            run.wait(30)
        elif end == "vllm killed":
            for pid in below:
                os.kill(pid, signal.SIGKILL)
            assert run.wait(90) == 1
            output = (tmp_path / "output.txt").read_text()
            assert re.search(r"vLLM's process \d+ has died", output) and "continues from the last checkpoint" in output
        else:  # Ctrl-C reaches every process of the terminal
            os.killpg(run.pid, signal.SIGINT)
            assert run.wait(60) == 130
            assert re.search(r"stopped; step \d+ is saved", (tmp_path / "output.txt").read_text())
            assert not list(SHARED_MEMORY.glob(f"{PREFIX}{run.pid}-*"))
        assert _gone(below), f"left of {below}: {[pid for pid in below if is_running(pid)]}"
    finally:
        for pid in {run.pid, *below}:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


def test_tensor_parallel_workers_serve_with_the_same_noise_and_end_with_the_engine(
    make_policy: Any,
    make_experiment: Any,
    make_noise: Any,
    make_prompts: Any,
    overrides: tuple[str, ...],
    cores: list[int],
) -> None:
    """Each worker holds half of every layer: other noise in one of them would be another policy."""
    if len(cores) < 2:
        pytest.skip("needs a core for each worker")
    policy = make_policy("model.kv_heads=2", quant="bf16", width=64, sharp=True, adapted=True)
    engine = make_experiment(*overrides, "engine.tensor_parallel_size=2").engine.build(policy)
    pids = {worker["pid"] for worker in engine.workers}
    try:
        assert len(pids) == 2 and os.getpid() not in pids and all(is_running(pid) for pid in pids)
        with make_noise(policy.norms, 0.1).for_rollout(1, 0):
            assert engine.sync(make_prompts())["sync/norms_changed"] == 4
            sampling = Sampling(samples=1, temperature=0.0, max_tokens=8, seed=1)
            ours, theirs = (e.generate(make_prompts(), sampling) for e in (HFEngine(policy, 8), engine))
        assert [r.token_ids for r in ours] == [r.token_ids for r in theirs]
    finally:
        engine.close()
    assert not any(is_running(pid) for pid in pids) and not engine.folder.exists()
