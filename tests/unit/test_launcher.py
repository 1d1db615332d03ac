"""The sweep's processes, with stubs in place of runs: they end with the launcher, locks are respected, reasons told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hydra_plugins.process_launcher.launcher import ProcessLauncher
from qerl_bench.__main__ import main
from qerl_bench.sweep import processes
from qerl_bench.train import trainer_state
from qerl_core.checks import ConfigError
from qerl_core.process import termination
from qerl_core.process.arguments import whole
from qerl_core.process.gpu_share import ALLOCATOR, RUNS_ON_GPU, neighbours, of_allocator
from qerl_core.process.progress import phase, watch
from qerl_core.process.termination import Terminated, terminations_held, terminations_noted, terminations_raise
from qerl_core.rundir import locks
from qerl_core.sweeps.pace import AROUND, Pace, share_to_make, time_left
from qerl_core.sweeps.points import Point, SweepFailed
from tests.short_runs import steps_of

# A run whose overrides are Python: it gets the folder of the run as `folder`.
STUB = """
import sys, time
from pathlib import Path
from qerl_core.process.children import end_with_parent
end_with_parent()
folder = Path(sys.argv[1])
exec(sys.argv[2])
"""
DONE = "(folder / 'done.json').write_text('{}')"
WAITS = "(folder / 'started').touch(); time.sleep(60)"


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch, run_by: Callable[[str], None]) -> None:
    paths = [str(Path(__file__).parents[2] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    run_by(STUB)


def point(folder: Path, code: str) -> Point:
    folder.mkdir(exist_ok=True)
    return Point([str(folder), code], folder.name, folder, finished=False)


def sweep(*points: Point, slots: int = 2) -> dict[str, str]:
    return {failed.name: reason for failed, reason in processes.Sweep(points, slots, []).run()}


def wait_until(happened, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_reason_of_a_failure_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "run.log").write_text("09:00:00 failed: an earlier attempt\n")
    logged = "(folder / 'run.log').write_text('1 step\\n2 failed: too hot\\nTraceback\\n'); sys.exit(1)"
    points = [
        point(tmp_path / "good", DONE),
        point(tmp_path / "logged", logged),
        point(tmp_path / "early", "sys.exit('error: no such option:\\n    take another')"),
        point(tmp_path / "silent", "sys.exit(7)"),
        point(tmp_path / "killed", "import os; os.kill(os.getpid(), 9)"),
    ]
    failed = sweep(*points)
    expected = {
        "logged": "too hot",
        "early": "error: no such option: take another",
        "silent": "exit code 7",
        "killed": "killed by SIGKILL",
    }
    assert failed == expected
    told = str(SweepFailed(5, [(points[1], failed["logged"])]))
    assert told.startswith("1 of 5 runs failed") and f"{tmp_path / 'logged'}: too hot" in told


OUT_OF_MEMORY = """
with open(folder / 'run.log', 'a') as log:
    log.write('failed: train: no memory is left (CUDA out of memory).')
sys.exit(1)"""


NOTES = "with open(folder.parent / 'notes', 'a') as notes:\n    notes.write(f'{folder.name} {word}\\n')\n"


def noted(folder: Path, code: str = "") -> Point:
    """A point that notes when it begins and ends; `code` comes between."""
    begins, ends = (NOTES.replace("{word}", word) for word in ("begins", "ends"))
    return point(folder, f"{begins}time.sleep(0.3)\n{code}{ends}{DONE}")


def test_points_without_memory_beside_others_are_run_once_more_at_the_end_and_alone(tmp_path: Path) -> None:
    first_time = "if not (folder / 'run.log').exists():\n    " + OUT_OF_MEMORY.strip().replace("\n", "\n    ") + "\n"
    large = [noted(tmp_path / name, first_time) for name in ("large", "second")]
    run = processes.Sweep([*large, noted(tmp_path / "small"), noted(tmp_path / "last")], 2, [])
    assert run.run() == [] and run.done == 4
    notes = (tmp_path / "notes").read_text().split("\n")
    alone = [["large begins", "large ends"], ["second begins", "second ends"]]
    assert sorted([notes[-5:-3], notes[-3:-1]]) == alone and len(notes) == 11  # in the order in which they failed


def test_points_that_need_more_memory_than_there_is_fail(tmp_path: Path) -> None:
    """The second time, or at once where each has a GPU of its own."""
    for slots, gpus, times in ((2, [], 2), (3, ["0", "1"], 2), (2, ["0", "1"], 1), (1, [], 1)):
        folder = tmp_path / f"{slots}{len(gpus)}"
        folder.mkdir()
        large = noted(folder / "large", OUT_OF_MEMORY + "\n")
        ((failed, reason),) = processes.Sweep([large, noted(folder / "other")], slots, gpus).run()
        assert failed.name == "large" and "no memory is left" in reason
        assert (folder / "notes").read_text().count("large begins") == times


def test_a_run_knows_with_how_many_it_shares_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three slots on two GPUs: the first and the third share one. A number set by hand wins; a CPU has no share."""
    code = f"import os; (folder / 'said').write_text(os.environ.get({RUNS_ON_GPU!r}, 'none')); time.sleep(1); {DONE}"

    def said(slots: int, gpus: list[str], *names: str) -> list[str]:
        points = [point(tmp_path / name, code) for name in names]
        assert processes.Sweep(points, slots, gpus).run() == []
        return [(tmp_path / name / "said").read_text() for name in names]

    assert said(3, ["4", "7"], "a", "b", "c") == ["2", "1", "2"]
    assert said(8, ["4"], "i", "j") == ["2", "2"] and said(8, ["4"], "k") == ["1"]  # not of places for more
    assert said(8, ["0", "1", "2", "3"], "l", "m", "n", "o", "p") == ["2"] * 5
    assert said(1, ["4", "7"], "d") == ["1"] and said(2, [], "e", "f") == ["none", "none"]
    monkeypatch.setenv(RUNS_ON_GPU, "5")
    assert said(2, ["0"], "g", "h") == ["5", "5"]
    assert [neighbours(slot, 24, 8) for slot in range(24)] == [3] * 24


def test_memory_grows_in_place_where_runs_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user said something of PyTorch's allocator, by either name."""
    for name in (*ALLOCATOR, RUNS_ON_GPU):
        monkeypatch.delenv(name, raising=False)

    def said(slots: int, gpus: list[str], alone: bool = False) -> str | None:
        return of_allocator(processes.environment_of(0, slots, gpus, alone=alone))

    assert said(3, ["4", "7"]) == said(2, ["4"]) == "expandable_segments:True"
    of_each = [processes.environment_of(slot, 3, ["4", "7"]) for slot in range(3)]  # the second has a GPU for itself
    assert [one["PYTORCH_CUDA_ALLOC_CONF"] for one in of_each] == ["expandable_segments:True"] * 3
    assert said(2, ["4", "7"]) is None and said(1, ["4"]) is None and said(2, []) is None
    monkeypatch.setenv(RUNS_ON_GPU, "5")
    assert said(1, ["4"]) == "expandable_segments:True" and said(1, ["4"], alone=True) is None
    for name, own in product(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), ("max_split_size_mb:64", "")):
        monkeypatch.setenv(name, own)
        assert said(2, ["4"]) == own and "expandable" not in str(processes.environment_of(0, 2, ["4"]))
        monkeypatch.delenv(name)


def test_a_run_that_is_repeated_alone_has_the_whole_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNS_ON_GPU, "5")
    code = f"import os; open(folder / 'said', 'a').write(os.environ.get({RUNS_ON_GPU!r}, '-')); {OUT_OF_MEMORY}"
    points = [point(tmp_path / name, code) for name in ("a", "b")]
    for gpus in (["4"], []):
        processes.Sweep(points, 2, gpus).run()
    assert [(tmp_path / name / "said").read_text() for name in ("a", "b")] == ["515-", "515-"]


@pytest.mark.parametrize("slots", [1, 2])
def test_a_refused_point_leaves_its_reason_and_a_folder_only_if_it_had_one(tmp_path: Path, slots: int) -> None:
    refused = "(folder / 'run.log').write_text('1 failed: no GPU\\n'); (folder / 'config.yaml').touch(); sys.exit(2)"
    points = [Point([str(tmp_path / name), refused], name, tmp_path / name, finished=False) for name in ("old", "new")]
    points[0].run_dir.mkdir()
    assert sweep(*points, slots=slots) == {"old": "no GPU", "new": "no GPU"}
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_how_far_a_sweep_is_counts_runs_by_their_steps(tmp_path: Path) -> None:
    """Of five runs one was finished before, one is made, one has failed, one is half done, one waits."""
    records = "".join(f'{{"kind": "train", "step": {step}, "time": {10 * step}}}\n' for step in (4, 5))
    halves = f"(folder / 'metrics.jsonl').write_text({records!r}); {WAITS}"
    points = [
        point(tmp_path / "good", DONE),
        point(tmp_path / "bad", "sys.exit(1)"),
        point(tmp_path / "half", halves),
        point(tmp_path / "waits", DONE),
    ]
    (tmp_path / "half" / "config.yaml").write_text("steps: 10")
    running = processes.Sweep([*points, Point([], "before", tmp_path / "before", finished=True)], 1, [])
    for _ in range(2):
        running.fill(0)
        wait_until(lambda: (running.collect(), not running.running)[1])
    running.fill(0)
    wait_until(lambda: (tmp_path / "half" / "started").exists())
    assert len(running.took) == 1  # that of the good one
    running.took = [40.0]
    running.running[0] = running.running[0]._replace(since=time.monotonic() - 30)
    # five steps of 10 s after 30 s make 80 s; so 50 s, and a run of the mean of 40 and 80
    assert running.state() == "2 of 5 runs done, 1 running (50%), 1 failed, about 1:50 left"
    running.stop(Terminated(signal.SIGTERM))


def test_the_last_word_of_a_sweep_counts_all_its_runs(tmp_path: Path) -> None:
    assert sweep(point(tmp_path / "a", DONE), point(tmp_path / "b", DONE)) == {}
    assert "2 of 2 runs done, 0 running, 0 failed" in watch.took


def test_the_time_left_waits_for_the_slowest_and_starts_the_rest_where_a_slot_is_free() -> None:
    begun = Pace(9.0, None)
    assert time_left([], [], [1.0] * 4, 2) is None and time_left([begun], [], [1.0] * 4, 2) is None
    assert time_left([begun], [60.0], [1.0], 2) == 60  # the first has no pace yet: 51, beside 60 in the other slot
    assert time_left([begun], [60.0], [1.0, 1.0], 2) == 51 + 60
    assert time_left([Pace(50.0, 50.0)] * 8, [], [1.0], 8) == 50 + 100  # one more is a round of its own
    assert time_left([Pace(20.0, 100.0), Pace(20.0, 10.0)], [], [], 2) == 100


def test_a_run_that_is_continued_takes_what_its_checkpoint_leaves_and_says_nothing_of_whole_ones(
    tmp_path: Path,
) -> None:
    assert time_left([], [60.0], [0.5, 0.25], 1) == 45
    assert time_left([Pace(5.0, 10.0, share=0.25)], [60.0], [1.0], 1) == 10 + 60
    assert time_left([Pace(5.0, None, share=0.25)], [60.0], [1.0], 1) == 10 + 60
    assert time_left([Pace(5.0, 10.0, share=0.25)], [], [1.0], 1) is None
    made = {}
    for step in (0, 5, 40, 90):
        folder = tmp_path / str(step)
        (folder / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
        (folder / "config.yaml").write_text("steps: 100")
        made[step] = share_to_make(folder)
    assert made == pytest.approx({0: 1.0, 5: 1.0, 40: 0.6 + AROUND, 90: 0.1 + AROUND})
    (tmp_path / "90" / "config.yaml").unlink()
    assert share_to_make(tmp_path / "90") == share_to_make(tmp_path / "new") == 1.0


def test_a_run_of_another_process_is_left_to_it_and_waited_for(tmp_path: Path) -> None:
    """Of three locked runs the other process finishes one, gives one up, and writes nothing more of the third."""
    points = [point(tmp_path / name, DONE + "; (folder / 'mine').touch()") for name in ("done", "given_up", "silent")]
    held = {run.name: locks.wait_for_lock(run.run_dir / ".lock", "a run") for run in points}
    os.utime(points[2].run_dir / ".lock", (0, 0))

    def release() -> None:
        time.sleep(0.3)
        (tmp_path / "done" / "done.json").touch()
        for name in ("done", "given_up"):
            held[name].close()

    other = threading.Thread(target=release)
    other.start()
    failed = sweep(*points)
    other.join()
    held["silent"].close()
    assert [run.name for run in points if (run.run_dir / "mine").exists()] == ["given_up"]
    assert [*failed] == ["silent"]
    assert f"pid {os.getpid()}, since 20" in failed["silent"] and "written nothing for 1 hours" in failed["silent"]


def test_a_run_that_another_process_took_first_is_no_failure(tmp_path: Path) -> None:
    """The child finds the lock taken and exits with EX_TEMPFAIL; then the other process has finished it."""
    assert sweep(point(tmp_path / "taken", f"{DONE}; sys.exit(75)")) == {}


LAUNCHER = """
import sys
from pathlib import Path
from qerl_bench.sweep import processes
from qerl_core.sweeps.points import Point
from qerl_core.exits import exit_in_words
processes.run_command = lambda: [sys.executable, "-c", sys.argv[1]]
folders = [Path(sys.argv[2]) / name for name in "ab"]
points = [Point([str(folder), sys.argv[3]], folder.name, folder, False) for folder in folders]
with exit_in_words("stopped"):
    processes.Sweep(points, 2, []).run()
"""


@pytest.mark.usefixtures("signals_heard")
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_runs_end_with_the_launcher(tmp_path: Path, signum: signal.Signals) -> None:
    code = "import os; (folder / 'pid').write_text(str(os.getpid())); " + WAITS
    parent = subprocess.Popen([sys.executable, "-c", LAUNCHER, STUB, str(tmp_path), code], stderr=subprocess.PIPE)
    wait_until(lambda: all((tmp_path / name / "started").exists() for name in "ab"))
    pids = [int((tmp_path / name / "pid").read_text()) for name in "ab"]
    parent.send_signal(signum)
    said = parent.communicate(timeout=30)[1].decode()
    assert parent.returncode == (-9 if signum == signal.SIGKILL else 128 + signum)
    words = "stopped; 0 of 2 runs are done; a: no step is saved; b: no step is saved; the same command goes on"
    assert (words in whole(said)) == (signum != signal.SIGKILL)
    wait_until(lambda: not any(running(pid) for pid in pids))


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_slots_are_checked() -> None:
    for slots in (-2, 0, "many"):
        with pytest.raises(ConfigError, match=rf"hydra.launcher.slots must be null or .* at least 1, got {slots!r}"):
            ProcessLauncher(slots, False, None).launch([], 0)  # type: ignore[arg-type]


@pytest.fixture
def signals_heard() -> Iterator[None]:
    """SIGHUP and SIGINT are not ignored, as they are in a test run under nohup, and in the background of a script."""
    heard = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {signum: signal.signal(signum, handler) for signum, handler in heard.items()}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.usefixtures("signals_heard")
def test_terminations_are_raised_once_or_noted() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with terminations_raise():
        with terminations_noted(noting=True) as noted:
            os.kill(os.getpid(), signal.SIGHUP)
            assert noted.signum == signal.SIGHUP
        with pytest.raises(Terminated, match="SIGTERM") as error, terminations_noted(noting=False):
            os.kill(os.getpid(), signal.SIGTERM)
        assert error.value.signum == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)  # the same request, sent by somebody else
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("signals_heard")
def test_a_second_ctrl_c_ends_a_step_at_once_and_one_that_comes_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminations_noted(noting=True) as noted:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # as a launcher passes on what the terminal has sent already
        os.kill(os.getpid(), signal.SIGINT)
        assert noted.signum == signal.SIGINT
        monkeypatch.setattr(termination, "REPEAT_S", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("signals_heard")
def test_a_stop_that_a_library_swallows_comes_with_the_next_phase() -> None:
    with terminations_raise():
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), phase("loading"):
            pass
        with phase("unwinding"):
            pass
    imported = False
    with terminations_raise(), pytest.raises(Terminated), terminations_held():
        os.kill(os.getpid(), signal.SIGTERM)
        imported = True
    assert imported


@pytest.mark.usefixtures("signals_heard")
@pytest.mark.parametrize("place", ["load_packed", "preflight"])
def test_ctrl_c_while_a_model_is_made_is_a_line(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = "qerl_bench.model_setup" if place == "load_packed" else "qerl_bench.run_setup"
    monkeypatch.setattr(f"{module}.{place}", lambda *given, **more: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(SystemExit) as end:
        main(["run", "experiment=smoke", "quant=nvfp4", "device=cpu", f"root={tmp_path}"])
    said = capsys.readouterr().err
    assert end.value.code == 130 and "Traceback" not in said
    assert said.endswith("stopped; no step is saved, and the same command begins again\n")


def test_a_signal_while_the_last_step_is_saved_ends_the_run_before_its_evaluation(
    make_config: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = trainer_state.save_checkpoint

    def signalled(*given: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        saved(*given)

    monkeypatch.setattr(trainer_state, "save_checkpoint", signalled)
    words = ("steps=1", "eval.questions=2", "eval.samples=1", "task.max_completion_tokens=8")
    with pytest.raises(Terminated, match="SIGTERM"):
        steps_of(make_config, tmp_path, "run", *words)
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert kinds == ["eval", "train"] and (tmp_path / "runs/run/checkpoints/step_000001").is_dir()


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminations_raise():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_wait_for_a_lock_has_a_limit(tmp_path: Path) -> None:
    held = locks.lock(tmp_path / "lock")
    assert held is not None
    with pytest.raises(locks.TrainingStopped, match=f"the warm start .* pid {os.getpid()}"):
        locks.wait_for_lock(tmp_path / "lock", "the warm start", limit_s=0.0)
    held.close()
    locks.wait_for_lock(tmp_path / "lock", "the warm start").close()
