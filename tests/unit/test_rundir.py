"""The run directory: what survives a crash at the worst moment, and what is refused rather than overwritten."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from qerl_core.checks import ConfigError
from qerl_core.rundir.checkpoints import check_checkpoint, is_finished, last_checkpoint
from qerl_core.rundir.durable import write_atomically
from qerl_core.rundir.environment import code_digest, computing_files, cpu_name
from qerl_core.rundir.recorded_types import require_environment
from qerl_core.rundir.run_checks import check_run_dir
from qerl_core.rundir.run_dir import RunDir
from qerl_kernels import decode_configs
from tests.failing import failing

CFG = OmegaConf.create(
    {
        "name": "a",
        "root": ".",
        "steps": 10,
        "seed": 0,
        "save_every": 5,
        "quant": {"name": "nvfp4"},
        "logger": {"name": "jsonl"},
    }
)


def _other(**changed: Any) -> Any:
    return OmegaConf.merge(CFG, changed)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    with RunDir(tmp_path / "run", CFG) as opened:
        yield opened


def _save(run: RunDir, step: int) -> None:
    with run.checkpoint(step) as folder:
        (folder / "adapter").mkdir()
        (folder / "adapter" / "weights.bin").write_text("weights")
        (folder / "state.json").write_text("{}")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- records ---------------------------------------------------------------------------------------------------------


def test_records_are_one_line_of_json_each_and_on_disk_at_once(run: RunDir) -> None:
    text = 'quotes " and \u2028 breaks\r\n\x00\x85 and \ud800'
    run.append("rollouts.jsonl", [{"step": 1, "completion": text}, {"step": 1, "completion": ""}])
    run.append("rollouts.jsonl", [{"step": 2, "completion": text}])
    content = (run.path / "rollouts.jsonl").read_text()
    assert content.count("\n") == 3 and content.endswith("\n") and content.isascii()
    assert [record["completion"] for record in _lines(run.path / "rollouts.jsonl")] == [text, "", text]
    assert run.resume_step() == 0


def test_numbers_that_are_not_finite_become_null_with_a_warning(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="qerl_bench"):
        run.append("metrics.jsonl", [{"kind": "train", "step": 3, "loss": math.nan, "grad_norm": -math.inf, "lr": 0.1}])
    assert _lines(run.path / "metrics.jsonl") == [
        {"kind": "train", "step": 3, "loss": None, "grad_norm": None, "lr": 0.1}
    ]
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2
    assert "loss" in warned[0] and "3" in warned[0] and "nan" in warned[0] and "null" in warned[0]
    assert "grad_norm" in warned[1] and "-inf" in warned[1]


def test_finite_numbers_come_back_to_the_last_bit(run: RunDir) -> None:
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 2**53 + 1]
    run.append("metrics.jsonl", [{"kind": "train", "step": 1, **{f"x{i}": value for i, value in enumerate(values)}}])
    [record] = run.metrics()
    assert [record[f"x{i}"] for i in range(len(values))] == values


# --- resuming --------------------------------------------------------------------------------------------------------


def _history(run: RunDir, last: int, saved: int | None = None) -> None:
    run.append("metrics.jsonl", [{"kind": "eval", "step": 0, "eval/accuracy_greedy": 0.1}])
    for step in range(1, last + 1):
        run.append("rollouts.jsonl", [{"step": step, "completion": "a"}, {"step": step, "completion": "b"}])
        run.append("metrics.jsonl", [{"kind": "train", "step": step, "loss": step / 10}])
        if step == saved:
            _save(run, step)


def test_a_resume_keeps_what_came_before_the_checkpoint_and_nothing_else(run: RunDir) -> None:
    _history(run, 7, saved=5)
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 8, "lo')
    with open(run.path / "rollouts.jsonl", "a") as file:
        file.write('{"step": 8')
    assert run.resume_step() == 5
    assert [(record["kind"], record["step"]) for record in run.metrics()] == [("eval", 0)] + [
        ("train", i) for i in range(1, 6)
    ]
    assert [record["step"] for record in _lines(run.path / "rollouts.jsonl")] == [i for i in range(1, 6) for _ in "ab"]
    run.append("metrics.jsonl", [{"kind": "train", "step": 6, "loss": 0.0}])
    assert run.metrics()[-1]["step"] == 6


@pytest.mark.parametrize("half", ["", "{", '{"kind": "train", "step": 5}', "\x00\x00"])
def test_half_a_line_is_dropped_even_if_it_could_be_read(run: RunDir, half: str) -> None:
    """Without its newline a line was not written to its end, whatever it looks like."""
    _history(run, 4)
    _save(run, 5)
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write(half)
    run.resume_step()
    assert [record["step"] for record in run.metrics()] == [0, 1, 2, 3, 4]
    assert (run.path / "metrics.jsonl").read_text().endswith("\n")


@pytest.mark.parametrize(("steps", "kept"), [(5, ("train", 5)), (10, ("eval", 5))])
def test_the_evaluation_after_the_last_step_is_done_again(tmp_path: Path, steps: int, kept: tuple[str, int]) -> None:
    """It is written after the last checkpoint: a run that dies before done.json evaluates again and records once. One
    on the way was written before its checkpoint."""
    with RunDir(tmp_path / "run", _other(steps=steps)) as run:
        _history(run, 5)
        _save(run, 5)
        run.append("metrics.jsonl", [{"kind": "eval", "step": 5, "eval/accuracy_greedy": 0.9}])
        run.resume_step()
        assert [(record["kind"], record["step"]) for record in run.metrics()][-1] == kept
        assert run.metrics()[0]["kind"] == "eval"


def test_without_a_checkpoint_a_run_starts_again(run: RunDir) -> None:
    _history(run, 3)
    assert run.resume_step() == 0
    assert run.metrics() == [] and _lines(run.path / "rollouts.jsonl") == []


def test_a_fresh_run_resumes_at_zero(run: RunDir) -> None:
    assert run.resume_step() == 0
    assert run.metrics() == []
    assert not (run.path / "metrics.jsonl").exists()


def test_resuming_twice_changes_nothing(run: RunDir) -> None:
    _history(run, 7, saved=5)
    run.resume_step()
    first = (run.path / "metrics.jsonl").read_bytes(), (run.path / "rollouts.jsonl").read_bytes()
    run.resume_step()
    assert ((run.path / "metrics.jsonl").read_bytes(), (run.path / "rollouts.jsonl").read_bytes()) == first


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_sealed_by_a_manifest(run: RunDir) -> None:
    _save(run, 5)
    folder = run.path / "checkpoints" / "step_000005"
    assert last_checkpoint(run.path) == folder
    assert _names(folder) == ["adapter/weights.bin", "manifest.json", "state.json"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"] == {  # sha256sum of `weights` and of `{}`
        "adapter/weights.bin": {
            "bytes": 7,
            "sha256": "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c",
        },
        "state.json": {"bytes": 2, "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"},
    }
    assert [*manifest["run"]] == ["seals.jsonl"]  # nothing else was written yet
    check_checkpoint(folder)


def test_the_newest_checkpoint_is_the_largest_number(run: RunDir) -> None:
    for step in (5, 10, 9, 999_999, 1_000_000):
        _save(run, step)
        newest = last_checkpoint(run.path)
        assert newest is not None and int(newest.name.removeprefix("step_")) == max(step, 10 if step == 9 else step)
    assert run.resume_step() == 1_000_000


def test_a_crash_while_saving_leaves_the_checkpoint_before_it(run: RunDir) -> None:
    _save(run, 5)
    with pytest.raises(KeyboardInterrupt), run.checkpoint(10) as folder:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt
    newest = last_checkpoint(run.path)
    assert newest is not None and newest.name == "step_000005"
    check_run_dir(run.path, CFG)
    assert run.resume_step() == 5
    assert sorted(path.name for path in (run.path / "checkpoints").iterdir()) == ["step_000005"]
    _save(run, 10)
    assert _names(run.path / "checkpoints" / "step_000010") == ["adapter/weights.bin", "manifest.json", "state.json"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "adapter" / "weights.bin").write_text("weightz"), "damaged: adapter/weights.bin"),
        (lambda folder: (folder / "adapter" / "weights.bin").write_text(""), "damaged: adapter/weights.bin"),
        (lambda folder: (folder / "state.json").unlink(), "damaged: state.json"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing or broken"),
        (
            lambda folder: (folder / "manifest.json").write_text('{"state.json": "44'),
            "manifest.json is missing or broken",
        ),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\x80\x00\xff"), "manifest.json is missing or broken"),
        (lambda folder: (folder / "manifest.json").write_text("[1, 2]"), "manifest.json is missing or broken"),
        (lambda folder: (folder / "manifest.json").write_text(""), "manifest.json is missing or broken"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_a_remedy(
    tmp_path: Path, damage: Callable[[Path], object], says: str
) -> None:
    with RunDir(tmp_path / "run", CFG) as run:
        _save(run, 5)
        _save(run, 10)
    folder = tmp_path / "run" / "checkpoints" / "step_000010"
    damage(folder)
    before = _names(tmp_path)
    with pytest.raises(ConfigError) as caught:
        RunDir(tmp_path / "run", CFG)
    message = str(caught.value)
    assert says in message and str(folder) in message and "Delete this folder" in message
    assert _names(tmp_path) == before  # nothing was written
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    with RunDir(tmp_path / "run", CFG) as run:
        assert run.resume_step() == 5


# --- one folder, one config, one process -----------------------------------------------------------------------------


def test_another_config_is_refused_and_told_apart(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run", CFG):
        pass
    stored = (tmp_path / "run" / "config.yaml").read_bytes()
    with pytest.raises(ConfigError) as caught:
        RunDir(tmp_path / "run", _other(steps=20, quant={"name": "nf4", "extra": 1}))
    message = str(caught.value)
    assert message.count(" there and ") == 3 and " more)" not in message
    for part in (
        "steps is 10 there and 20 here",
        "quant.name is 'nvfp4' there and 'nf4' here",
        "quant.extra is None there and 1 here",
    ):
        assert part in message
    assert (tmp_path / "run" / "config.yaml").read_bytes() == stored
    with pytest.raises(ConfigError, match="seed is 0 there and 1 here"):
        RunDir(tmp_path / "run", _other(seed=1))


def test_what_does_not_change_the_numbers_may_change(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run", CFG):
        pass
    with RunDir(tmp_path / "run", _other(root="elsewhere", save_every=1, logger={"name": "wandb"}, name="b")) as run:
        assert OmegaConf.load(run.path / "config.yaml")["save_every"] == 1


def test_many_differences_are_counted_and_a_few_shown(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run", CFG):
        pass
    with pytest.raises(ConfigError, match=r"and 5 more\)") as caught:
        RunDir(tmp_path / "run", _other(**{f"new{i}": i for i in range(9)}))
    assert str(caught.value).count(" there and ") == 4


def test_a_finished_run_keeps_its_config(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run", CFG) as run:
        _history(run, 10)
        run.finish()
    stored = (tmp_path / "run" / "config.yaml").read_bytes()
    with RunDir(tmp_path / "run", _other(save_every=1)) as run:
        assert run.finished
    assert (tmp_path / "run" / "config.yaml").read_bytes() == stored


HOLD = """
import sys
from pathlib import Path
from omegaconf import OmegaConf
from qerl_core.checks import ConfigError
from qerl_core.rundir.run_dir import RunDir
try:
    RunDir(Path(sys.argv[1]), OmegaConf.create({"steps": 10}))
except ConfigError as error:
    print(error)
    sys.exit(2)
"""


def test_a_second_process_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    def second() -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(
            [sys.executable, "-c", HOLD, str(tmp_path)], capture_output=True, text=True, env=environment
        )

    with RunDir(tmp_path, OmegaConf.create({"steps": 10})):
        refused = second()
        assert refused.returncode == 2, refused.stderr
        assert "another process is running in" in refused.stdout and str(tmp_path) in refused.stdout
    assert second().returncode == 0


def test_a_refused_lock_is_not_kept_open(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run", CFG):
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(ConfigError, match="another process"):
                RunDir(tmp_path / "run", CFG)
        assert len(os.listdir("/proc/self/fd")) == descriptors
    with RunDir(tmp_path / "run", CFG):
        pass  # free again


def test_on_a_file_system_without_locks_a_run_is_kept_and_no_other_process_gets_it(
    tmp_path: Path, no_locks: None, caplog: pytest.LogCaptureFixture
) -> None:
    with RunDir(tmp_path / "run", CFG) as run:
        assert "has no locks (flock): a lease guards the run instead" in caplog.text
        run.log("train", 1, {"loss": 1.0})
        with pytest.raises(ConfigError, match=r"another process is running in .*; wait for it, or .*root=DIR"):
            RunDir(tmp_path / "run", CFG)
    with RunDir(tmp_path / "run", CFG) as run:
        assert [record["loss"] for record in run.metrics()] == [1.0]


def test_the_lock_ends_with_an_exception(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), RunDir(tmp_path / "run", CFG):
        raise RuntimeError
    with RunDir(tmp_path / "run", CFG):
        pass


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "runs" / "x"):
        with pytest.raises(ConfigError, match="root=DIR") as caught:
            check_run_dir(path, CFG)
        assert str(tmp_path / "file") in str(caught.value)


def test_checking_writes_nothing(tmp_path: Path) -> None:
    check_run_dir(tmp_path / "runs" / "x", CFG)
    assert list(tmp_path.iterdir()) == []


# --- atomic writes, environment, the end -----------------------------------------------------------------------------


def test_write_atomically_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "done.json"
    write_atomically(path, "old")
    with failing(os, "replace", OSError("power cut")), pytest.raises(OSError, match="power cut"):
        write_atomically(path, "new and much longer")
    assert path.read_text() == "old"
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["done.json"]


def test_done_json(run: RunDir) -> None:
    run.last_step = 3
    assert not run.finished
    run.append("metrics.jsonl", [{"kind": "eval", "step": 0, "time": 1.0, "eval/accuracy_greedy": 0.1}])
    for step, peak in ((1, 2.0), (2, 3.5), (3, 3.0)):
        run.append(
            "metrics.jsonl", [{"kind": "train", "step": step, "time": 2.0, "loss": step / 2, "memory/peak_gib": peak}]
        )
    run.append(
        "metrics.jsonl", [{"kind": "eval", "step": 3, "time": 3.0, "eval/accuracy_greedy": 0.6, "bad": math.nan}]
    )
    assert not is_finished(run.path)
    run.finish()
    done = json.loads((run.path / "done.json").read_text())
    assert done["final"] == {"eval/accuracy_greedy": 0.6, "loss": 1.5, "memory/peak_gib": 3.0, "bad": None}
    assert done["peak_memory_gib"] == 3.5
    assert 0 <= done["wall_s"] < 60
    assert run.finished and is_finished(run.path)
    assert 0 <= done["ended"] - done["started"] < 60
    assert -0.001 < time.time() - done["ended"] < 60  # it is rounded to a thousandth
    assert done["base"] is None
    run.spent_s, run.begun = 1000.0, 1.5  # before the checkpoint that it continued from
    run.write_environment("cpu", "sha256:1f")
    run.finish()
    done = json.loads((run.path / "done.json").read_text())
    assert 1000 <= done["wall_s"] < 1060
    assert (done["started"], done["base"]) == (1.5, "sha256:1f")
    run.begun = None  # a checkpoint of an older version
    run.finish()
    assert json.loads((run.path / "done.json").read_text())["started"] is None


def test_done_json_of_a_run_that_measured_nothing(run: RunDir) -> None:
    run.last_step = 0
    run.finish()
    done = json.loads((run.path / "done.json").read_text())
    assert (done["final"], done["peak_memory_gib"]) == ({}, None)


def test_environment(run: RunDir) -> None:
    run.write_environment("cpu", "sha256:1f")
    first = json.loads((run.path / "env.json").read_text())
    assert first["device"] == "cpu" and first["gpu"] is None and first["driver"] is None
    assert first["runs_on_gpu"] is None and first["allocator"] is None
    assert first["packages"]["torch"] and first["packages"]["hydra-core"] == "1.3.8"
    assert first["base"] == "sha256:1f" and (first["cpu"] is None or "model name" not in first["cpu"])
    assert first["argv"] == sys.argv and first["python"].startswith("3.")
    assert first["commit"] is None or len(first["commit"]) == 40


def test_the_environment_tells_the_code_and_what_the_metrics_mean(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change in what makes numbers is another version; one in what only reads them is not."""
    run.write_environment("cpu", None)
    first = json.loads((run.path / "env.json").read_text())
    assert first["code"] == code_digest() and len(first["code"]) == 12
    assert first["metrics"]["completions/tokens"] == "tokens: completion tokens sampled"
    read = Path.read_bytes

    def edited(name: str) -> str:
        monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + (b"#" if path.name == name else b""))
        return code_digest()

    assert edited("nvfp4.py") != first["code"] != edited("update.py")
    for name in ("style.py", "run_dir.py", "exits.py", "slurm.py", "runner.py"):
        assert edited(name) == first["code"], name


def test_the_version_of_the_code_is_that_of_what_computes() -> None:
    """Of the core what numbers are made with; neither words and run folders, nor launchers, commands and readers."""
    names = {*computing_files()}
    assert {"qerl_bench/experiment.py", "qerl_bench/quant/nvfp4.py", "qerl_kernels/decode.py"} <= names
    assert {name for name in names if name.startswith("qerl_core/")} == {
        *(f"qerl_core/{name}.py" for name in ("checks", "records", "seeding", "statistics", "process/device")),
        *(f"qerl_core/metrics/{name}.py" for name in ("__init__", "compute", "definitions")),
    }
    without = ("qerl_studies/", "qerl_bench/commands/", "qerl_bench/conduct/", "qerl_bench/sweep/", "hydra_plugins/")
    assert not [name for name in names if name.startswith(without)]


def test_the_environment_tells_which_kernel_tables_count(
    run: RunDir, tmp_path: Path, gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's own goes before the shipped one, and neither is among the sources that `code` stands for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpu(get_device_name=lambda: "NVIDIA H200")
    own = decode_configs.cache_file("NVIDIA H200")
    own.parent.mkdir()
    own.write_text("{}")
    run.write_environment("cuda", None)
    shipped, (path, digest) = json.loads((run.path / "env.json").read_text())["kernel_tables"].items()
    assert shipped[0].endswith("decode_h200.json") and len(shipped[1]) == 64
    assert (path, digest) == (str(own), hashlib.sha256(b"{}").hexdigest())
    run.write_environment("cpu", None)
    assert json.loads((run.path / "env.json").read_text())["kernel_tables"] == {}


def test_an_earlier_environment_is_kept(run: RunDir) -> None:
    """A run that was continued with other packages or on another machine says so."""
    for device in ("first", "second", "third"):
        run.write_environment(device, None)
    found = {path.name: json.loads(path.read_text())["device"] for path in run.path.glob("env*.json")}
    assert found.pop("env.json") == "third"
    assert sorted(found.values()) == ["first", "second"]


def test_the_name_of_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "cpuinfo"
    named.write_text("processor\t: 0\nmodel name\t: Fast CPU: 9000\nmodel name\t: x\n")
    assert cpu_name(named) == "Fast CPU: 9000"
    named.write_text("processor : 0\n")
    for found, name in (("aarch64", "aarch64"), ("", None)):
        monkeypatch.setattr("platform.processor", lambda found=found: found)
        assert cpu_name(named) == name


def test_no_run_continues_on_other_base_weights(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunDir(path, CFG) as run:
        run.write_environment("cpu", "sha256:1f")
        run.write_environment("cpu", "sha256:2e")  # nothing was made with the others
        _save(run, 5)
    for _ in range(2):  # a refusal changes nothing
        with RunDir(path, CFG) as run, pytest.raises(ConfigError, match=r"sha256:2e.*now sha256:1f.*model\.id.*name"):
            run.write_environment("cpu", "sha256:1f")
    with RunDir(path, CFG) as run:
        run.write_environment("cpu", "sha256:2e")
        run.write_environment("cpu", None)
        run.write_environment("cpu", "sha256:1f")  # as one before could not be told


# --- what must not change between attempts, and what is kept of it ----------------------------------------------------

INPUTS = {"tokenizer.json": "1f", "the training data": "2e"}


def _attempt(path: Path, save: int | None = None, **said: Any) -> dict[str, Any]:
    """An attempt that makes a checkpoint after the step `save`: what its env.json says."""
    with pytest.MonkeyPatch.context() as patch, RunDir(path, CFG) as run:
        if said:
            patch.setattr("qerl_core.rundir.run_dir.environment", lambda device: said)
        run.write_environment("cpu", None, inputs=said.pop("inputs", None))
        if save is not None:
            _save(run, save)
        return json.loads((path / "env.json").read_text())


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (INPUTS | {"tokenizer.json": "3d"}, "tokenizer.json"),
        (INPUTS | {"the training data": "3d"}, "the training data"),
        ({"tokenizer.json": "1f"}, "the training data"),
        (INPUTS | {"chat_template.jinja": "4c"}, "chat_template.jinja"),
    ],
)
def test_no_run_continues_with_other_files_or_data(now: dict[str, str], named: str, tmp_path: Path) -> None:
    _attempt(tmp_path / "run", 5, code="a", inputs=INPUTS)
    for _ in range(2):  # a refusal changes nothing
        with pytest.raises(ConfigError, match=rf"other contents of {named}\. Put them back .*another name"):
            _attempt(tmp_path / "run", code="a", inputs=now)
    assert "earlier" in _attempt(tmp_path / "run", code="a", inputs=INPUTS)


def test_files_that_an_earlier_version_did_not_record_are_not_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _attempt(tmp_path / "run", 5, code="a")
    with caplog.at_level(logging.INFO, "qerl_core"):
        _attempt(tmp_path / "run", 8, code="a", inputs=INPUTS)
    assert "not compared" in caplog.text
    with pytest.raises(ConfigError, match="other contents"):
        _attempt(tmp_path / "run", code="a", inputs={})


def test_what_an_earlier_version_did_not_record_of_an_attempt_is_left_out(tmp_path: Path) -> None:
    """So whoever reads the run finds values of their kinds (`recorded_types.py`)."""
    with RunDir(tmp_path / "run", CFG) as run:
        run.write("env.json", json.dumps({"code": "a", "device": "cpu"}))
        _save(run, 5)
    (entry,) = _attempt(tmp_path / "run", code="b", device="cpu")["earlier"]
    assert entry == {"after": 0, "code": "a", "device": "cpu"}
    require_environment("env.json", json.loads((tmp_path / "run" / "env.json").read_text()), "")


def test_other_code_and_packages_are_told_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of the attempts whose steps are kept: the second one made none."""
    path, torch = tmp_path / "run", {"torch": "2.12", "numpy": "2"}
    first = _attempt(path, 5, code="a", packages=torch)
    assert (first["after"], first["earlier"], caplog.text) == (0, [], "")
    assert _attempt(path, code="b", packages=torch)["after"] == 5
    assert "code (a, now b)" in caplog.text and "torch" not in caplog.text
    caplog.clear()
    third = _attempt(path, 8, code="a", packages=torch | {"torch": "2.13"})
    assert "packages (torch 2.12, now 2.13)" in caplog.text and "code (" not in caplog.text
    assert [(entry["after"], entry["packages"]["torch"]) for entry in third["earlier"]] == [(0, "2.12")]
    assert [entry["after"] for entry in _attempt(path, code="c", packages=torch)["earlier"]] == [0, 5]
    for folder in path.glob("checkpoints/step_*"):
        shutil.rmtree(folder)
    assert _attempt(path, 5, code="b", packages=torch)["earlier"] == []  # it begins again
    caplog.clear()
    assert _attempt(path, code="b", packages=torch)["earlier"] == [] and caplog.text == ""
