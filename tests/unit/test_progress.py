"""What a run says while it goes on: few lines on a pipe and none missing after a silence; bars on a terminal."""

from __future__ import annotations

import logging
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from qerl_bench.sweep.table import sweep_table
from qerl_core.process import progress
from qerl_core.process.arguments import WIDTH, wrap_lines
from qerl_core.process.progress import StepProgress, duration, phase, silence_s
from qerl_core.process.terminal import WrappingFormatter
from tests.failing import failing

SOURCES = Path(__file__).parents[2] / "src"
FINISHED = Path(__file__).parents[1] / "assets" / "runs"


class Clock:
    """Time that passes when it is told to."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(stand_in: Any) -> Clock:
    clock = Clock()
    watch = progress.Watch()
    watch.ticking = True  # no thread: the tests look themselves
    stand_in(progress, time=clock, watch=watch)
    return clock


@pytest.mark.parametrize(("steps", "seconds"), [(600, 0.4), (20, 30.0), (3000, 20.0)])
def test_a_pipe_is_neither_flooded_nor_silent(
    clock: Clock, capsys: pytest.CaptureFixture[str], steps: int, seconds: float
) -> None:
    silences = []
    with StepProgress(0, steps) as told:
        for step in range(1, steps + 1):
            for _ in range(max(1, round(seconds))):  # the thread looks every second
                clock.now += seconds / max(1, round(seconds))
                if progress.watch.is_silent():
                    silences.append(clock.now - progress.watch.said)
                    progress.watch.print_heartbeat()
            told.report(step, {"reward/mean": 0.5, "loss": 0.0, "grad_norm": 0.25})
    lines = capsys.readouterr().err.splitlines()
    of_steps = [line for line in lines if line.startswith("step ") and "/" in line]
    assert of_steps[0].split()[1].startswith("1/") and f"{steps}/{steps}" in of_steps[-1]
    assert "reward 0.500  grad 0.25" in of_steps[0] and "loss" not in of_steps[0]
    elapsed = steps * seconds
    assert all(silence <= silence_s(elapsed) + 1 for silence in silences)
    assert len(lines) <= progress.STEP_LINES + 2 + 2 * min(elapsed / 10, 150 + elapsed / 60)
    assert len(of_steps) >= min(steps, progress.STEP_LINES)


def test_the_time_left_counts_from_where_a_run_continues(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with StepProgress(90, 100) as told:
        clock.now += 60
        told.report(91, {"loss": 0.125})
    assert "step  91/100  loss 0.1250  left 9:00" in capsys.readouterr().err
    assert [duration(seconds) for seconds in (7.9, 245, 7390)] == ["0:07", "4:05", "2:03:10"]


def test_lines_fit_a_terminal_and_lose_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("reward/mean", "accuracy", "entropy", "grad_norm", "aqn/sigma", "speed/rollout_tok_s")
    metrics = dict(zip(names, (1.048, 0.852, 5.071, 0.28, 0.0, 945.6), strict=True))
    with StepProgress(0, 999) as told:
        for step, sigma in ((1, 0.0), (50, 0.00073), (100, 0.0)):
            clock.now += 3
            told.report(step, metrics | {"aqn/sigma": sigma})
    first, second, third = capsys.readouterr().err.splitlines()
    assert "step   1/999  reward 1.048  accuracy 0.852  entropy 5.071  grad 0.28  sigma 0  tok/s 946" in first
    assert "step  50/999 reward 1.048 accuracy 0.852 entropy 5.071 grad 0.28 sigma 0.00073 tok/s 946 left" in second
    assert "  reward" not in third  # as the line before
    with phase(" and ".join(["a long name"] * 8)), phase("another", 100, "completions"):
        progress.watch.print_heartbeat()
    said = capsys.readouterr().err
    scores = [f"accuracy_{name} 0.125 +- 0.082" for name in ("greedy", "sampled", "of_majority", "at_k")]
    record = logging.LogRecord("x", logging.INFO, "x", 1, "step 6: %s", (", ".join(scores),), None)
    logged = WrappingFormatter().format(record)
    assert all(len(line) <= WIDTH for line in (first, second, third, *said.splitlines(), *logged.splitlines()))
    assert " ".join(logged.split()).endswith(f" step 6: {', '.join(scores)}") and logged.count("\n") == 1
    assert all(score in logged for score in scores) and said.endswith("0:00 so far\n")
    assert wrap_lines("x" * 300) == "x" * 300


def test_what_took_long_is_announced_with_an_estimate(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for seconds in (30, 245, 10):
        with phase("evaluation"):
            clock.now += seconds
    assert capsys.readouterr().err == "evaluation: about 4:05\n"


def test_a_line_after_a_silence_names_all_that_goes_on(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with phase("evaluation"), phase("sampling", 100, "completions") as sampling, phase("evaluation"):
        clock.now += 8
        sampling.advance(25)
        clock.now += 11
        assert progress.watch.is_silent()
        progress.watch.print_heartbeat()
        assert not progress.watch.is_silent()
    said = capsys.readouterr().err
    assert said == "evaluation, sampling 25 of 100 completions: 0:19 so far, about 0:13 left\n"


def test_tokens_of_a_batch_move_the_count_and_the_time_left(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with phase("evaluation"), phase("sampling", 8, "completions") as sampling:
        sampling.next = 4
        clock.now += 20
        progress.within(0.5, "token 40 of 80")  # 2 of 8 in 20 s
        progress.watch.print_heartbeat()
        sampling.advance(4)
        assert sampling.begun == 0 and "token" not in str(sampling)
    assert "sampling 0 of 8 completions, token 40 of 80: 0:20 so far, about 1:00 left" in capsys.readouterr().err
    progress.within(0.5, "nothing goes on")


def test_what_is_overdue_promises_no_end(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with phase("sampling", 2) as sampling:
        clock.now += 10
        sampling.advance()
        assert sampling.left_s == 10
        clock.now += 60
        progress.watch.print_heartbeat()
        sampling.advance()
        assert sampling.left_s == 0
    assert "left" not in capsys.readouterr().err


def test_a_thread_of_its_own_breaks_the_silence(stand_in: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(progress, TICK_S=0.01, silence_s=lambda elapsed: 0.02)
    watch = progress.watch
    with phase("waiting") as waiting:
        end = time.monotonic() + 30
        while not waiting.announced:
            assert time.monotonic() < end
            time.sleep(0.01)
    while watch.ticking:  # it ends with the last phase
        assert time.monotonic() < end
        time.sleep(0.01)
    assert "waiting: 0:00 so far" in capsys.readouterr().err


def test_a_machine_without_room_for_a_thread_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = progress.Watch()
    monkeypatch.setattr(progress, "watch", watch)
    no_room = failing(progress._thread, "start_new_thread", RuntimeError("can't start new thread"))
    with no_room, phase("loading"):
        assert not watch.ticking


PROGRAM = """
import sys, time
from qerl_core.process import progress
from qerl_core.process.terminal import lasting_output
progress.TICK_S = 0.05
with lasting_output(), progress.phase("sampling", 4, "completions") as sampling:
    sampling.advance(3)
    while sampling.bar is None:
        time.sleep(0.05)
    time.sleep(0.5)
    print("a line of the log", file=getattr(sys, sys.argv[1]))
"""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_terminal_shows_bars_and_lines_do_not_mix(stream: str) -> None:
    mine, its = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run([sys.executable, "-c", PROGRAM, stream], stdout=its, stderr=its, env=environment)
    os.close(its)
    shown = b""
    while chunk := read(mine):
        shown += chunk
    assert done.returncode == 0, shown
    text = shown.decode()
    assert re.search(r"sampling:  75%.* 3/4 ", text)
    assert re.search(r"\r *\r+a line of the log", text)  # the bar was wiped away first


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux says so at the end of a terminal
        return b""


def test_the_table_of_a_sweep_has_every_run_that_can_be_read(tmp_path: Path) -> None:
    finished = sorted(path.parent for path in FINISHED.glob("*/done.json"))[:2]
    (tmp_path / "failed").mkdir()
    text = sweep_table([*finished, tmp_path / "failed"])
    assert all(text.count(folder.name) == 1 for folder in finished)
    assert text.count("accuracy:") == 1 and f"no numbers: {tmp_path / 'failed'}" in text
    assert text.splitlines()[-1].startswith("3 runs in ")
    assert sweep_table([tmp_path / "failed"]).splitlines()[0].startswith("no numbers: ")
