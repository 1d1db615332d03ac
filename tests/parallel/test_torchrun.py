"""torchrun itself: a signal to it, and several GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.parallel.test_ranks import WORDS, assert_equal, records

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
RUN = str(ROOT / "src" / "run.py")
LIMIT_S = 600.0
GPUS = (  # wide enough for the fused kernels
    *(*WORDS, "device=cuda", "model.hidden_size=128", "model.heads=4", "model.kv_heads=2"),
    "model.intermediate_size=256",
)


def torchrun(size: int, *words: str, python: Path | None = None) -> list[str]:
    """`python` starts each rank, if it is not the interpreter of torchrun."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return [*start, *(("--no-python", str(python)) if python else ()), *words]


def test_sigterm_to_torchrun_ends_the_run_after_its_step_with_a_checkpoint(tmp_path: Path, programs: Path) -> None:
    words = [*WORDS, "steps=1000", "save_every=1000", f"root={tmp_path}"]
    folder, said = tmp_path / "runs" / "run", tmp_path / "said"
    with open(said, "w") as output:
        patience = os.environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(LIMIT_S))}
        started = torchrun(2, RUN, *words, python=programs / "python")
        process = subprocess.Popen(started, cwd=ROOT, env=patience, stdout=output, stderr=output)
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end and process.poll() is None and '"step": 1,' not in _text(folder / "metrics.jsonl"):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)
    last = records(folder)[-1]["step"]
    assert said.read_text().count(f"SIGTERM: stopped; step {last} is saved, and the same") == 1, said.read_text()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step_{last:06d}"]
    assert json.loads((folder / "env.json").read_text())["ranks"] == 2


def test_the_report_of_torchrun_ends_with_the_reason_of_a_refusal(tmp_path: Path) -> None:
    words = torchrun(2, RUN, "optim.lr=2", f"root={tmp_path / 'root'}")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    said, _, cause = done.stderr.partition("Root Cause")
    reason = "error: optim.lr must be at most 1"
    assert done.returncode == 1 and said.partition("Traceback")[0].count(reason) == 1, done.stderr
    assert reason in cause and "\n  exitcode  : 2 " in cause, done.stderr
    assert [*tmp_path.iterdir()] == []


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_with_exact_are_one_to_the_bit_and_near_it_without(tmp_path: Path) -> None:
    folders = {}
    for name, size, exact in (("one", 1, "false"), ("again", 1, "false"), ("exact", 2, "true"), ("sum", 2, "false")):
        words = [*GPUS, f"root={tmp_path / name}", f"parallel.exact={exact}"]
        done = subprocess.run(torchrun(size, RUN, *words), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        folders[name] = tmp_path / name / "runs" / "run"
    one = records(folders["one"])
    if one == records(folders["again"]):  # the kernels repeat themselves
        assert_equal(folders["one"], folders["exact"])
    for name in ("exact", "sum"):
        for expected, found in zip(one, records(folders[name]), strict=True):
            if expected["kind"] == "train":
                assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
                assert found["completions/tokens"] == pytest.approx(expected["completions/tokens"], rel=0.05)
