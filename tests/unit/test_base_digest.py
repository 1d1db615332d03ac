"""What env.json says about the base weights of a run, and what happens to a damaged warm start."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qerl_bench import model_setup
from qerl_bench.config import build, compose
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model import digest as model_digest
from qerl_bench.model.digest import digest_of, name_of_base
from qerl_bench.model.hub import HubModel
from qerl_core.checks import TrainingStopped
from qerl_core.rundir.run_dir import RunDir


def local(folder: Path) -> HubModel:
    return HubModel(
        name="local",
        id=str(folder),
        revision=None,
        trust_remote_code=False,
        dtype="bfloat16",
        lr=1e-5,
        template={},
        dither=None,
        dither_scale=1.0,
    )


def test_one_file_has_the_digest_that_sha256sum_prints(
    tmp_path: Path, make_experiment: Callable[..., Experiment]
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    expected = "sha256:" + hashlib.sha256(b"weights").hexdigest()[:16]
    assert digest_of(local(tmp_path), None) == expected
    assert digest_of(make_experiment().model, tmp_path) == expected  # its warm start


def test_any_content_and_any_name_changes_the_digest_of_several_files(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.safetensors").write_text(name)
    found = [digest_of(local(tmp_path), None)]
    (tmp_path / "b.safetensors").write_text("c")
    found.append(digest_of(local(tmp_path), None))
    (tmp_path / "b.safetensors").rename(tmp_path / "c.safetensors")
    found.append(digest_of(local(tmp_path), None))
    assert len(set(found)) == 3


def test_a_process_hashes_a_file_once_until_it_changes(
    tmp_path: Path, listen: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    hashed = listen(model_digest, "digest")
    assert model_digest.file_digest(file) == model_digest.file_digest(file)
    assert len(hashed) == 2  # written just now: a change within a tick of the file system's clock would not be seen
    monkeypatch.setattr(model_digest, "SETTLED_NS", 0)
    first = model_digest.file_digest(file)
    assert first == model_digest.file_digest(file) and len(hashed) == 3
    when = file.stat()
    time.sleep(0.05)  # more than a tick
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(when.st_atime_ns, when.st_mtime_ns))  # as rsync -t and tar write it
    assert model_digest.file_digest(file) != first and len(hashed) == 4
    (tmp_path / "other").write_bytes(b"weights")
    (tmp_path / "other").rename(file)
    assert model_digest.file_digest(file) == first and len(hashed) == 5


def test_of_a_large_file_blocks_from_the_first_to_the_last_are_read(
    tmp_path: Path, stand_in: Callable[..., None]
) -> None:
    stand_in(model_digest, MAX_WHOLE_BYTES=20, BLOCK_BYTES=4, BLOCKS=3)
    content = bytes(range(30))  # blocks at 0, 13 and 26
    (tmp_path / "model.safetensors").write_bytes(content)
    expected = hashlib.sha256(b"30" + content[:4] + content[13:17] + content[26:]).hexdigest()
    assert digest_of(local(tmp_path), None) == f"sha256:{expected[:16]}"


def test_weights_that_are_not_stored_are_told_by_seed_and_shape(
    tmp_path: Path, make_experiment: Callable[..., Experiment]
) -> None:
    assert digest_of(make_experiment("model.seed=3").model, None) == (
        "untrained: hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=64, warm_start_steps=0, seed=3"
    )
    assert digest_of(local(tmp_path), None) is None  # a folder without safetensors


def warm_start(command: list[str]) -> SimpleNamespace:
    """In place of the process that makes a base: writes the files of a finished run."""
    cfg = compose(command[2:])
    with RunDir(build(cfg).run_dir, cfg) as run:
        with run.checkpoint(2) as folder:
            (folder / "model").mkdir()
            for name in ("config.json", "model.safetensors"):
                (folder / "model" / name).write_text(name)
        run.append("metrics.jsonl", [{"kind": "train", "step": step} for step in range(1, cfg.steps + 1)])
        run.finish()
    return SimpleNamespace(poll=lambda: 0)


def test_a_damaged_warm_start_is_set_aside_and_made_again(
    tmp_path: Path,
    stand_in: Callable[..., None],
    make_experiment: Callable[..., Experiment],
    caplog: pytest.LogCaptureFixture,
) -> None:
    started: list[list[str]] = []
    experiment = make_experiment("model.warm_start_steps=2")

    def start(command: list[str]) -> Any:
        started.append(command)
        return warm_start(command)

    def base() -> Path:
        folder = model_setup.base_checkpoint(experiment.model, experiment.task, str(tmp_path), start)
        assert folder is not None
        return folder

    first = base()
    assert base() == first and len(started) == 1
    damages = {
        "model/model.safetensors": lambda: (first / "model.safetensors").write_text("modem.safetensors"),
        "model/config.json": (first / "config.json").unlink,
        "has no checkpoint": lambda: shutil.rmtree(first.parents[1]),
    }
    for times, (named, damage) in enumerate(damages.items(), start=1):
        stand_in(time, strftime=lambda form, times=times: f"{times}")
        damage()
        caplog.clear()
        assert base() == first and (first / "config.json").read_text() == "config.json"
        (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
        assert named in warning and f".damaged-{times}" in warning
        assert first.parents[2].with_name(f"{first.parents[2].name}.damaged-{times}").is_dir()
    assert len(started) == 4


def test_a_warm_start_that_fails_is_told_with_its_log(
    tmp_path: Path, make_experiment: Callable[..., Experiment]
) -> None:
    failed: Any = SimpleNamespace(poll=lambda: 3)
    experiment = make_experiment("model.warm_start_steps=2")
    with pytest.raises(TrainingStopped, match=rf"model=tiny ended with code 3: {tmp_path}/cache/runs/.*/run.log"):
        model_setup.base_checkpoint(experiment.model, experiment.task, str(tmp_path), lambda command: failed)


def test_a_base_in_the_hub_cache_is_named_by_its_repository(tmp_path: Path) -> None:
    folder = tmp_path / "models--Qwen--Qwen3-4B" / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    assert name_of_base(local(folder)) == "Qwen3-4B"
    assert name_of_base(local(Path("Qwen/Qwen3-4B"))) == "Qwen/Qwen3-4B"
