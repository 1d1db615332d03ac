"""What a command reads and imports before it answers: configs composed once per choice, torch only for a run to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.config_repository import ConfigRepository
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict

from qerl_bench.config import compose
from qerl_bench.sweep.check import check_points
from qerl_bench.sweep.table import sweep_table
from qerl_core.checks import ConfigError
from qerl_core.options import composer
from qerl_core.options.composer import HYDRA_DEFAULTS, Composer, register_resolvers
from qerl_core.options.fingerprint import as_dict
from qerl_core.options.user_options import search_path
from qerl_core.process.arguments import whole
from qerl_core.process.hidden_packages import UNUSED, hidden_packages
from qerl_core.process.installation import CONF_DIR
from qerl_studies.tables.terminal import places, render, summary
from tests.quick_compose import GENUINE

SOURCES = Path(__file__).parents[2] / "src"
FINISHED = next((Path(__file__).parents[1] / "assets" / "runs").iterdir())


def by_hydra(words: list[str]) -> dict:
    """As it does it itself, without the shortcuts of tests."""
    register_resolvers()
    with pytest.MonkeyPatch.context() as patch:
        for place, function in GENUINE.items():
            patch.setattr(*place, function)
        with initialize_config_dir(str(CONF_DIR), **HYDRA_DEFAULTS, job_name="run"):
            cfg = hydra_compose("run", overrides=words, return_hydra_config=True)
        with open_dict(cfg):
            cfg.pop("hydra")
        return as_dict(cfg)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["steps=7", "quant=nvfp4", "lora.rank=3", "seed=5", "aqn=exp"],  # values before and behind choices
        ["experiment=smoke", "model.lr=2e-5", "lora.rank=8"],  # others refer to both
        ["optim={lr: 1e-5}", "optim.lr=2e-5"],
        ["optim.lr=2e-5", "optim={lr: 1e-5}"],
        ["aqn=format_error", "quant@aqn.format=mxfp4", "++aqn.stages=3"],
        ["~optim", "+optim.lr=1e-5"],
        ["~lora.rank", "lora.alpha=1", "name=mine", "root='a b'"],
        ["train.packing=false", "task.operations=['+']", "hydra.verbose=true"],
    ],
    ids=" ".join,
)
def test_configs_are_those_of_hydra(words: list[str]) -> None:
    composer = Composer()
    for _ in range(2):  # the second from what the first composed
        assert composer.tree(words) == by_hydra(words)
    assert compose(words) == OmegaConf.create(by_hydra(words))


def test_files_that_were_read_for_another_config_make_the_same_one() -> None:
    composer = Composer()
    shared = ["aqn=format_error", "quant@aqn.format=mxfp4"]
    for words in (["quant=nvfp4"], shared, ["quant=mxfp4"], ["experiment=smoke", "quant=nvfp4"], ["experiment=smoke"]):
        assert composer.tree(words) == by_hydra(words)


def test_a_file_is_read_once_a_process_until_it_changes(tmp_path: Path, listen: Callable[..., list[Any]]) -> None:
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    words = [*search_path([tmp_path]), "experiment=mine"]
    for steps in (3, 44):
        file.write_text(f"# @package _global_\nsteps: {steps}\n")
        read = listen(ConfigRepository, "load_config")
        assert [Composer().tree(words)["steps"] for _ in range(2)] == [steps, steps]
        assert [path for _, path in read].count("experiment/mine") == 1
    assert [path for _, path in read] == ["experiment/mine"]


@pytest.mark.parametrize("word", ["lora.rnak=3", "quant=int3", "+lora.rank=3", "lora.rank=1,2", "~lora.x", "a=[1"])
def test_wrong_words_are_refused_because_hydra_refuses_them(word: str) -> None:
    """For the same reason, in words of our own."""
    with pytest.raises(HydraException) as by_itself:
        by_hydra([word])
    with pytest.raises(ConfigError) as refusal:
        compose([word])
    assert isinstance(refusal.value.__cause__, HydraException)
    assert str(refusal.value.__cause__) == str(by_itself.value)


def test_the_points_of_a_sweep_are_composed_once_per_choice(listen: Callable[..., list[Any]]) -> None:
    made = listen(composer, "hydra_compose")
    values = [[f"seed={seed}", f"lora.rank={seed + 1}"] for seed in range(10)]
    grid = [[f"quant={quant}", *words] for words in values for quant in ("bf16", "nf4")]
    assert len({point.name for point in check_points(grid)}) == 20
    assert sorted(made) == [("run", ["quant=bf16"]), ("run", ["quant=nf4"])]


def finished_run(root: Path) -> list[str]:
    """A finished run below `root`, and the words that name it."""
    words = ["experiment=smoke", f"root={root}", "name=x"]
    shutil.copytree(FINISHED, root / "runs" / "x")
    (root / "runs" / "x" / "config.yaml").write_text(OmegaConf.to_yaml(compose(words)))
    return words


def test_a_finished_point_is_one_with_the_same_config(tmp_path: Path) -> None:
    words = finished_run(tmp_path)
    (point,) = check_points([words])
    assert point.finished and point.run_dir == tmp_path / "runs" / "x"
    with pytest.raises(ConfigError, match=r"lora.rank is 32 there and 8 here"):
        check_points([[*words, "lora.rank=8"]])


HEAVY = ("torch", "transformers", "peft", "matplotlib", "scipy")


def imported(*words: str, code: int = 0, **variables: str) -> tuple[str, str, set[str]]:
    """What a command that ends with `code` prints to stdout and stderr, and which heavy packages it imports."""
    program = (
        "import atexit, sys; from qerl_bench.__main__ import main; "
        "atexit.register(lambda: print('imported', *sys.modules)); main()"
    )
    environment = {**os.environ, **variables, "PYTHONPATH": f"{SOURCES}{os.pathsep}{SOURCES.parent / 'kernels'}"}
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stderr
    result, _, modules = done.stdout.rpartition("imported ")
    return result, done.stderr, set(HEAVY) & set(modules.split())


def test_a_finished_run_is_told_without_torch(tmp_path: Path) -> None:
    words, folder = finished_run(tmp_path), tmp_path / "runs" / "x"
    result, said, heavy = imported("run", *words)
    assert heavy == set()
    assert result == "\n".join([render(summary([folder])), *places(folder), ""])
    assert said == f"finished before: {folder} (delete the folder to run it again)\n"
    result, said, heavy = imported("run", "-m", *words, "seed=0")
    assert heavy == set()
    assert result == f"{sweep_table([folder])}\n"
    lines = whole(said).splitlines()
    told = [line[9:] for line in lines if "before seals" not in line]
    assert told == ["sweep of 1 runs: 1 finished before, 0 to do", "1 at a time"]
    assert not (tmp_path / "runs" / "x" / ".hydra").exists()


@pytest.mark.parametrize("command", ["run", "probe", "eval"])
def test_a_gpu_that_is_hidden_is_missed_without_torch(command: str, tmp_path: Path) -> None:
    words = ["experiment=smoke", f"root={tmp_path}"]
    if command == "eval":
        finished_run(tmp_path)
        (tmp_path / "runs" / "x" / "checkpoints" / f"step_{compose(words).steps:06}").mkdir(parents=True)
        words = [str(tmp_path / "runs" / "x")]
    _, said, heavy = imported(command, *words, "device=cuda", code=2, CUDA_VISIBLE_DEVICES="")
    assert heavy == set() and "device=cuda" in said and "device=cpu" in said


def test_status_reads_neither_torch_nor_pandas(tmp_path: Path) -> None:
    finished_run(tmp_path)
    result, said, heavy = imported("status", str(tmp_path))
    assert heavy == set() and said == "" and "1 runs, 1 done" in result


def test_a_run_keeps_unused_packages_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    with hidden_packages(), pytest.raises(ImportError):
        import sklearn  # noqa: F401
    assert "sklearn" not in sys.modules and "sklearn" in UNUSED


def test_another_python_is_told_to_activate_the_environment() -> None:
    """-S hides what is installed, as if `make run` had been followed by the system's Python."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", SOURCES / "run.py", "quant=nvfp4"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "no module hydra" in done.stderr and "source .venv/bin/activate" in done.stderr


def test_a_module_of_our_own_that_is_missing_keeps_its_traceback(tmp_path: Path) -> None:
    shutil.copy(SOURCES / "run.py", tmp_path)
    (tmp_path / "qerl_bench").mkdir()
    (tmp_path / "qerl_bench" / "__init__.py").touch()
    (tmp_path / "qerl_bench" / "__main__.py").write_text("import qerl_bench.gone\n")
    done = subprocess.run([sys.executable, tmp_path / "run.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" in done.stderr and "No module named 'qerl_bench.gone'" in done.stderr
