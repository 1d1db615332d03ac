"""Runs that are forked from a loaded parent: the same numbers, and ends, signals and environments as of fresh ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hydra_plugins.process_launcher.launcher import ProcessLauncher
from qerl_bench.conduct.deadline import Deadline
from qerl_bench.conduct.runner import Blocks
from qerl_bench.sweep import loaded_parent, processes
from qerl_core.checks import ConfigError
from qerl_core.process.installation import run_command
from qerl_core.process.termination import Terminated
from qerl_core.sweeps.points import Point
from tests.unit.test_launcher import DONE, WAITS, point, running, wait_until

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="runs are forked on Linux only")

# A program whose runs are Python, fresh or forked; LOADS stands for what is imported.
STUB = """
import os, signal, sys, threading, time
from pathlib import Path
from qerl_bench.sweep import fork_server
from qerl_bench.sweep.loaded_parent import is_loaded_parent
from qerl_core.process.children import end_with_parent
def run(words):
    end_with_parent()
    folder = Path(words[0])
    (folder / "said").write_text(f"{os.getpid()} {os.getppid()}")
    exec(words[1], globals() | {"folder": folder})
    return 0
LOADS
fork_server.load = load
sys.exit(fork_server.serve(run) if is_loaded_parent() else run(sys.argv[1:]))
"""
NOTHING = "def load(): pass"
FORKED = f"assert os.getppid() != {os.getpid()}"
FRESH = f"assert os.getppid() == {os.getpid()}"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, run_by: Callable[[str], None]) -> Callable[[str], None]:
    paths = [str(ROOT / "src"), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return lambda loads: run_by(STUB.replace("LOADS", loads))


def sweep(*points: Point, slots: int = 2, gpus: tuple[str, ...] = ()) -> dict[str, str]:
    made = processes.Sweep(points, slots, [*gpus], preload=True)
    failed = {failed.name: reason for failed, reason in made.run()}
    assert made.preloaded is not None and not any(running(parent.pid) for parent in made.preloaded._all)
    return failed


def parents(*points: Point) -> set[str]:
    return {(one.run_dir / "said").read_text().split()[1] for one in points}


def test_runs_are_processes_of_one_parent_and_their_ends_are_told(
    tmp_path: Path, program: Callable[[str], None]
) -> None:
    program(NOTHING)
    logged = "(folder / 'run.log').write_text('1 step\\n2 failed: too hot\\nTraceback\\n'); sys.exit(1)"
    points = [
        point(tmp_path / "good", f"{FORKED}; {DONE}"),
        point(tmp_path / "logged", logged),
        point(tmp_path / "early", "sys.exit('error: no such option:\\n    take another')"),
        point(tmp_path / "silent", "sys.exit(7)"),
        point(tmp_path / "killed", "os.kill(os.getpid(), 9)"),
        point(tmp_path / "bug", "1 / 0"),
    ]
    assert sweep(*points) == {
        "logged": "too hot",
        "early": "error: no such option: take another",
        "silent": "exit code 7",
        "killed": "killed by SIGKILL",
        "bug": "ZeroDivisionError: division by zero",
    }
    assert len(parents(*points)) == 1
    assert len({(one.run_dir / "said").read_text() for one in points}) == len(points)


def test_a_run_has_its_own_environment_output_and_random_numbers(
    tmp_path: Path, program: Callable[[str], None]
) -> None:
    program(NOTHING)
    code = (
        f"import numpy; print(os.environ['CUDA_VISIBLE_DEVICES'], numpy.random.rand(), sys.argv[1:]); {FORKED}; {DONE}"
    )
    points = [point(tmp_path / name, code) for name in ("a", "b")]
    assert sweep(*points, gpus=("4", "7")) == {} and len(parents(*points)) == 1
    said = [(one.run_dir / "launch.log").read_text().split(maxsplit=2) for one in points]
    assert [gpu for gpu, *_ in said] == ["4", "7"] and said[0][1] != said[1][1]
    assert [words.strip() for *_, words in said] == [str(one.overrides) for one in points]


def test_what_imports_read_from_the_environment_is_that_of_the_parent(
    tmp_path: Path, program: Callable[[str], None]
) -> None:
    program("def load(): global threads; threads = os.environ.get('OMP_NUM_THREADS')")
    code = f"assert threads == os.environ.get('OMP_NUM_THREADS'); {FORKED}; {DONE}"
    points = [point(tmp_path / name, code) for name in ("a", "b")]
    with loaded_parent.Preloaded() as preloaded:
        for one, number in zip(points, ("1", "2"), strict=True):
            environment = {**os.environ, "OMP_NUM_THREADS": number}
            child = processes.start(one, environment, side_by_side=True, preloaded=preloaded)
            wait_until(lambda child=child: child.poll() is not None)
            assert child.poll() == 0
    assert len(parents(*points)) == 2


@pytest.mark.parametrize(
    "loads",
    [
        "def load(): threading.Thread(target=time.sleep, args=[60], daemon=True).start()",
        "fork_server.cuda_began = lambda: True\n" + NOTHING,
    ],
    ids=["thread", "cuda"],
)
def test_runs_import_by_themselves_where_a_fork_is_not_safe(
    loads: str, tmp_path: Path, program: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    program(loads)
    assert sweep(*[point(tmp_path / name, f"{FRESH}; {DONE}") for name in ("a", "b", "c")]) == {}
    said = [record.getMessage() for record in caplog.records if "preload=false" in record.getMessage()]
    assert len(said) == 1 and "an import has started" in said[0]


def test_a_parent_that_is_killed_ends_its_runs_which_begin_again_by_themselves(
    tmp_path: Path, program: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    program(NOTHING)
    first = "if not (folder / 'again').exists():\n    (folder / 'again').touch()\n    KILLS\n    time.sleep(60)\n"
    kills = first.replace("KILLS", f"{FORKED}; time.sleep(0.5); os.kill(os.getppid(), 9)")
    beside = first.replace("KILLS", FORKED)
    assert (
        sweep(point(tmp_path / "a", f"{kills}{FRESH}; {DONE}"), point(tmp_path / "b", f"{beside}{FRESH}; {DONE}")) == {}
    )
    assert sum("preload=false" in record.getMessage() for record in caplog.records) == 1


def test_code_that_has_changed_is_imported_anew(tmp_path: Path, program: Callable[[str], None]) -> None:
    code = tmp_path / "code"
    code.write_text("old")
    loads = f"code = Path({str(code)!r})\nfork_server.code_digest = code.read_text\n"
    program(loads + "def load(): global loaded; loaded = code.read_text()")
    changes = f"assert loaded == 'old'; code.write_text('new'); {DONE}"
    points = [point(tmp_path / "a", changes), point(tmp_path / "b", f"assert loaded == 'new'; {FORKED}; {DONE}")]
    assert sweep(*points, slots=1) == {} and len(parents(*points)) == 2


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
    processes.Sweep(points, 2, [], preload=True).run()
"""
SAVES = (
    "from qerl_core.process.termination import terminations_noted\n"
    "with terminations_noted(noting=True, says=None) as noted:\n"
    "    (folder / 'started').touch()\n"
    "    while noted.signum is None: time.sleep(0.01)\n"
    "    (folder / 'saved').write_text(str(noted.signum))\n"
)


@pytest.mark.parametrize("to_group", [False, True], ids=["launcher", "group"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_runs_and_their_parent_end_with_the_launcher(
    tmp_path: Path, program: Callable[[str], None], signum: signal.Signals, to_group: bool
) -> None:
    """After a checkpoint, also where a terminal or scheduler sends the signal to all of them."""
    if to_group and signum == signal.SIGKILL:
        pytest.skip("nothing is left to save")
    words = [sys.executable, "-c", LAUNCHER, STUB.replace("LOADS", NOTHING), str(tmp_path), SAVES]
    launcher = subprocess.Popen(words, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=hears)
    wait_until(lambda: all((tmp_path / name / "started").exists() for name in "ab"))
    pids = {int(pid) for name in "ab" for pid in (tmp_path / name / "said").read_text().split()}
    assert len(pids) == 3 and launcher.pid not in pids
    (os.killpg if to_group else os.kill)(launcher.pid, signum)
    launcher.communicate(timeout=30)
    assert launcher.returncode == (-9 if signum == signal.SIGKILL else 128 + signum)
    wait_until(lambda: not any(running(pid) for pid in pids))
    passed_on = signal.SIGTERM if signum in (signal.SIGKILL, signal.SIGINT) else signum
    got = {(tmp_path / name / "saved").read_text() for name in "ab"}
    assert got <= {str(int(passed_on)), str(int(signum))} and len(got) > 0


def hears() -> None:
    """What a program in the foreground of a terminal has."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_run_heeds_signals_as_its_launcher_and_ignores_what_that_ignores(
    tmp_path: Path, program: Callable[[str], None]
) -> None:
    program(NOTHING)
    seen = "said = [signal.getsignal(signal.SIGHUP).name, len(signal.pthread_sigmask(signal.SIG_BLOCK, ()))]; "
    code = f"{seen}(folder / 'signals').write_text(str(said)); {FORKED}; {DONE}"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert sweep(point(tmp_path / "a", code), point(tmp_path / "b", code)) == {}
    finally:
        signal.signal(signal.SIGHUP, before)
    assert {(tmp_path / name / "signals").read_text() for name in "ab"} == {"['SIG_IGN', 0]"}


def test_a_sweep_that_is_stopped_passes_the_signal_to_forks(tmp_path: Path, program: Callable[[str], None]) -> None:
    program(NOTHING)
    made = processes.Sweep([point(tmp_path / name, WAITS) for name in "ab"], 2, [], preload=True)
    assert made.preloaded is not None
    with made.preloaded:
        made.fill(0)
        wait_until(lambda: (tmp_path / "a" / "started").exists())
        made.stop(Terminated(signal.SIGTERM))
        assert made.running[0].child.poll() == -signal.SIGTERM
        begun = time.monotonic()
    assert time.monotonic() - begun < loaded_parent.END_LIMIT_S / 2


def test_blocks_of_a_study_share_a_parent(tmp_path: Path, program: Callable[[str], None]) -> None:
    program(NOTHING)
    done = Point([], "done", tmp_path / "done", finished=True)
    done.run_dir.mkdir()
    (done.run_dir / "done.json").write_text('{"wall_s": 1}')
    takes = f"{FORKED}; (folder / 'done.json').write_text('{{\"wall_s\": 1}}')"
    first, second = ([point(tmp_path / f"{name}{n}", takes) for n in (1, 2)] for name in "ab")
    made = Blocks([[done, *first], second], 1, [], Deadline(10), preload=True)
    assert (made.done, made.total, len(made.todo)) == (1, 5, 2)
    assert made.run() == [] and made.done == 5 and len(parents(*first, *second)) == 1
    assert made.preloaded is not None and not any(running(parent.pid) for parent in made.preloaded._all)


def test_a_sweep_of_one_run_to_do_forks_nothing(tmp_path: Path) -> None:
    done = Point([], "done", tmp_path / "done", finished=True)
    assert processes.Sweep([done, point(tmp_path / "a", DONE)], 2, [], preload=True).preloaded is None


def test_whether_runs_are_forked_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded_parent.forks_runs(None, []) and not loaded_parent.forks_runs(None, ["0"])
    assert loaded_parent.forks_runs(True, ["0"]) and not loaded_parent.forks_runs(False, [])
    with pytest.raises(ConfigError, match=r"hydra.launcher.preload .* got 'often'"):
        ProcessLauncher(None, False, "often").check()  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not loaded_parent.forks_runs(None, [])
    with pytest.raises(ConfigError, match=r"hydra.launcher.preload=true .*darwin"):
        ProcessLauncher(None, False, True).check()


def test_what_is_imported_for_runs_starts_neither_threads_nor_cuda() -> None:
    """In a process of its own, with as many threads as there are cores: the libraries as they are installed."""
    code = (
        "from qerl_bench.sweep import fork_server\nfork_server.load()\nassert fork_server.unsafe() is None\n"
        "import torch\nassert not torch.cuda.is_initialized()"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_threads_of_this_process_are_seen() -> None:
    """In a process of its own: pytest's may have begun anything, and a fork of it may begin that again."""
    code = (
        "import threading, time; from qerl_bench.sweep import fork_server; print(fork_server.unsafe()); "
        "threading.Thread(target=time.sleep, args=[9], daemon=True).start(); print(fork_server.unsafe())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = done.stdout.splitlines()
    assert before == "None" and after.startswith("an import has started 1 threads")


def made_by(root: Path, preload: bool) -> dict[str, Any]:
    """What three short runs of a sweep left: numbers, answers, adapters and what they say of their origin."""
    words = ["experiment=smoke", "quant=nvfp4", "aqn=exp", "seed=3,4,5", "steps=2", "save_every=2", "device=cpu"]
    more = [f"root={root}", "hydra.launcher.slots=2", f"hydra.launcher.preload={preload}", "-m"]
    done = subprocess.run([*run_command(), *words, *more], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not preload or "preload=false" not in done.stderr
    left: dict[str, Any] = {}
    for run in sorted(file.parent for file in root.glob("runs/*/env.json")):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        clocked = ("time", "speed/", "memory/")
        left[f"{run.name} metrics"] = [
            {key: value for key, value in line.items() if not key.startswith(clocked)} for line in lines
        ]
        origin = json.loads((run / "env.json").read_text())
        left[f"{run.name} env"] = {key: value for key, value in origin.items() if "started" not in key}
        names = ("*.safetensors", "rollouts.jsonl", "eval.json", "samples.parquet", "layers.parquet", "*.png", "*.svg")
        files = [file for name in names for file in sorted(run.rglob(name))]
        assert len(files) > 8
        left |= {f"{run.name} {file.relative_to(run)}": file.read_bytes() for file in files}
    return left


@pytest.mark.slow
def test_forked_runs_equal_fresh_ones_bit_for_bit(tmp_path: Path) -> None:
    """Metrics, completions, answers, adapters, figures and env.json, whose command has another folder. One of three has
    its greedy answers from another run."""
    made = {preload: made_by(tmp_path / str(preload), preload) for preload in (False, True)}
    assert made[False].keys() == made[True].keys()
    for name, fresh in made[False].items():
        forked = made[True][name]
        if name.endswith(" env"):
            argv = [word.replace(str(tmp_path / "True"), str(tmp_path / "False")) for word in forked["argv"]]
            forked = {**forked, "argv": argv}
        assert forked == fresh, name
