"""A file that takes the place of another is never read for it: while it is read, and later with its size and times.

Kind 8 (9) of the reports: env.json named the digest of a new GGUF file for the weights of the old one. A GGUF file that
is replaced, written to or touched in the middle of its conversion is in tests/models/test_gguf.py.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qerl_bench import run_setup
from qerl_bench.config import build, compose
from qerl_bench.model.gguf.convert import record_of
from qerl_bench.model.gguf.header import read_header
from qerl_core.checks import ConfigError
from qerl_core.options import names
from qerl_core.rundir.run_dir import RunDir
from qerl_core.sweeps.status import state_of
from qerl_studies.runs.committed import read_study
from tests.models.gguf_files import model_of, write
from tests.models.test_gguf import hub
from tests.run_folders import DONE, SHORT, write_run
from tests.scripts import ROOT


def take_the_place(of: Path, by: Path) -> None:
    """Of equal size, with the time of change of the other: as cp -p, rsync -t or a store of fixed times leave it."""
    before = of.stat()
    assert by.stat().st_size == before.st_size and by.read_bytes() != of.read_bytes()
    os.utime(by, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(by, of)
    assert of.stat().st_mtime_ns == before.st_mtime_ns


@pytest.fixture(scope="module")
def two_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """GGUF files of equal size with other weights."""
    place = tmp_path_factory.mktemp("two")
    return write(place / "one.gguf", model_of("qwen2")), write(place / "two.gguf", model_of("qwen2", seed=1))


def test_a_conversion_is_not_that_of_an_earlier_file(two_files: tuple[Path, Path], tmp_path: Path) -> None:
    file, other = (Path(shutil.copy2(one, tmp_path)) for one in two_files)
    converted = hub(file).converted(tmp_path / "cache")
    first = load_file(converted / "model.safetensors")
    take_the_place(file, other)
    assert hub(file).converted(tmp_path / "cache") == converted  # the name cannot tell
    second = load_file(converted / "model.safetensors")
    assert not torch.equal(
        first["lm_head.weight" if "lm_head.weight" in first else "model.embed_tokens.weight"],
        second["lm_head.weight" if "lm_head.weight" in second else "model.embed_tokens.weight"],
    )
    alone = hub(Path(shutil.copy2(two_files[1], tmp_path / "alone.gguf"))).converted(tmp_path / "cache")
    found, expected = record_of(converted), record_of(alone)
    assert found is not None and expected is not None and found["digest"] == expected["digest"]


def test_a_file_that_moved_keeps_its_conversion(two_files: tuple[Path, Path], tmp_path: Path) -> None:
    """Another inode with the same content: it is read once more, and not converted."""
    file = Path(shutil.copy2(two_files[0], tmp_path))
    converted = hub(file).converted(tmp_path / "cache")
    made = (converted / "model.safetensors").stat()
    again = Path(shutil.copy2(file, tmp_path / "again"))
    os.replace(again, file)
    for _ in range(2):
        assert hub(file).converted(tmp_path / "cache") == converted
        assert (converted / "model.safetensors").stat() == made


def test_a_header_is_not_that_of_an_earlier_file(tmp_path: Path) -> None:
    one = write(tmp_path / "one.gguf", model_of("qwen2"))
    content = one.read_bytes()
    assert read_header(one).tensors
    other = tmp_path / "other.gguf"
    other.write_bytes(content.replace(b"qwen2", b"qwen3"))
    take_the_place(one, other)
    assert read_header(one).metadata["general.architecture"] == "qwen3"


@pytest.fixture(scope="module")
def folder(two_files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of safetensors."""
    return hub(two_files[0]).converted(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_a_checkpoint_that_changes_while_it_is_loaded_is_refused(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest was taken before, and env.json has it."""
    mine = Path(shutil.copytree(folder, tmp_path / "mine"))
    (mine / "gguf.json").unlink()
    other = tmp_path / "other"
    other.write_bytes((mine / name).read_bytes()[:-1] + b" ")

    def refuse_or_not(options: Any, path: Path) -> None:
        with RunDir(path, compose(["device=cpu"])) as run, run_setup.set_up(options, options.engine, run, "cpu"):
            pass

    words = [
        "model=hub",
        f"model.id={mine}",
        "task=arithmetic",
        "device=cpu",
        f"root={tmp_path}",
        "task.template=plain",
    ]
    refuse_or_not(build(compose(words)), tmp_path / "whole")
    real = run_setup.build_policy

    def built(*given: Any) -> Any:
        policy = real(*given)
        if other.exists():
            os.replace(other, mine / name)
        return policy

    monkeypatch.setattr(run_setup, "build_policy", built)
    with pytest.raises(ConfigError, match=rf"{name} was changed while it was read"):
        refuse_or_not(build(compose(words)), tmp_path / "changed")


def test_a_text_of_calibration_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("What is 1 + 1? 2\n" * 400)
    words = ["experiment=smoke", "quant=nvfp4", "quantizer=gptq", f"quantizer.calibration.file={text}", "device=cpu"]
    words += ["quantizer.calibration.samples=2", "quantizer.calibration.length=64"]
    options = build(compose([*words, f"root={tmp_path}"]))
    real = run_setup.build_policy

    def built(*given: Any) -> Any:
        policy = real(*given)
        text.write_text("What is 2 + 2? 4\n" * 400)
        return policy

    monkeypatch.setattr(run_setup, "build_policy", built)
    with (
        RunDir(tmp_path / "run", compose(["device=cpu"])) as run,
        pytest.raises(ConfigError, match=r"text\.txt was changed while it was read"),
        run_setup.set_up(options, options.engine, run, "cpu"),
    ):
        pass


def test_an_option_is_not_that_of_an_earlier_file(tmp_path: Path) -> None:
    file, other = tmp_path / "one.yaml", tmp_path / "other.yaml"
    file.write_text("sigma: 0.1\n")
    assert names._read(file) == {"sigma": 0.1}
    other.write_text("sigma: 0.2\n")
    take_the_place(file, other)
    assert names._read(file) == {"sigma": 0.2}


def test_a_study_is_not_that_of_earlier_files(tmp_path: Path) -> None:
    study = Path(shutil.copytree(ROOT / "studies" / "tiny" / "data", tmp_path / "tiny"))
    (settings,) = study.glob("settings.json*")
    assert read_study(study).runs
    other = tmp_path / "other"
    other.write_bytes(b"\0" * settings.stat().st_size)
    take_the_place(settings, other)
    with pytest.raises(ConfigError):
        read_study(study)


def test_a_run_that_took_the_place_of_another_is_looked_at_again(tmp_path: Path) -> None:
    """`status` looks at a finished run once, and `watch=true` for hours."""
    line = {"kind": "train", "step": 3, "reward/mean": 0.5}
    run = write_run(tmp_path / "run", SHORT, [line], DONE)
    assert state_of(run) == ("done", "")
    other = tmp_path / "other"
    other.write_text((run / "done.json").read_text().replace('"wall_s": 1.0', '"wall_s": "1"'))
    take_the_place(run / "done.json", other)
    assert state_of(run)[0] == "damaged"
