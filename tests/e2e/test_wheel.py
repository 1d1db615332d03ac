"""The built wheel in an environment of its own, outside of the checkout: commands, a sweep, and a user's own option."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import copytree

import pytest

pytest.importorskip("hatchling")

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    *("experiment=smoke", "steps=2", "save_every=2", "optim.warmup_steps=0", "eval.questions=4", "device=cpu"),
    *("model.hidden_size=64", "model.layers=2", "model.intermediate_size=64", "task.max_completion_tokens=12"),
]
HALVING = """
from dataclasses import dataclass

from qerl_bench.aqn.base import Schedule


@dataclass(frozen=True, kw_only=True)
class Halving(Schedule):
    name: str
    sigma_start: float

    def sigma(self, step: int, total_steps: int) -> float:
        return self.sigma_start * 0.5**step
"""
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and, behind it, what this one has: its bin/ holds the command."""
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = place.glob("*.whl")
    venv.create(place / "venv", with_pip=False)
    python = place / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    (installed,) = (place / "venv" / "lib").glob("python*/site-packages")
    (installed / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (installed / "halving.py").write_text(HALVING)
    return place / "venv"


@pytest.fixture
def command(site: Path, tmp_path: Path) -> Command:
    """command("run", "steps=1", ...): the installed program, started in an empty folder."""
    return partial(started, tmp_path, str(site / "bin" / "qerl-bench"))


def started(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """This program, in `folder`, without what leads to the checkout."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "QERL_ROOT")}
    return subprocess.run(
        words, cwd=folder, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )


def test_the_wheel_holds_every_file_that_the_package_reads(site: Path) -> None:
    (packages,) = site.glob("lib/python*/site-packages")
    ours = ("src/qerl_core", "src/qerl_studies", "src/qerl_bench", "kernels/qerl_kernels")
    for folder, there in (*((one, packages / Path(one).name) for one in ours), ("conf", packages / "qerl_core/conf")):
        files = [file for file in (ROOT / folder).rglob("*") if file.is_file() and "__pycache__" not in file.parts]
        assert files and not [file for file in files if not (there / file.relative_to(ROOT / folder)).is_file()]


def option(tmp_path: Path, target: str) -> str:
    """The word that finds aqn=halving, an option of the user's own, of class `target`."""
    own = tmp_path / "my options" / "aqn" / "halving.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(f"_target_: {target}\nname: halving\nsigma_start: 1.0e-2\n")
    return f"hydra.searchpath=['file://{own.parent.parent}']"


def test_a_run_a_warm_start_and_a_sweep_over_an_option_of_the_users_own(command: Command, tmp_path: Path) -> None:
    words = [*TINY, "quant=nvfp4", "model.warm_start_steps=3", option(tmp_path, "halving.Halving"), "aqn=halving"]
    done = command("run", *words, "aqn.sigma_start=1e-2,2e-2", "-m")
    assert done.returncode == 0, done.stderr
    runs = sorted(path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert len(runs) == 2 and all((run / "done.json").exists() for run in runs)
    assert all("-nvfp4-halving-grpo-" in run.name for run in runs)
    assert list((tmp_path / "cache").rglob("done.json"))
    env = json.loads((runs[0] / "env.json").read_text())
    assert env["commit"] is None and env["code"]
    assert {"reward.png", "entropy.png"} <= {file.name for file in (runs[0] / "figures").iterdir()}
    again = command("run", *words, "aqn.sigma_start=1e-2")
    assert "finished before" in again.stdout + again.stderr

    listed = command("status")
    assert listed.stdout.count("done") == 3 and "2 runs, 2 done" in listed.stdout, listed.stderr
    kept = command("collect", "runs", "out=study")
    assert kept.returncode == 0 and (tmp_path / "study" / "tidy.parquet").exists(), kept.stderr
    asked = command("eval", f"runs/{runs[0].name}", "eval.questions=3", "--config-dir", "my options")
    assert asked.returncode == 0 and "accuracy_greedy" in asked.stdout, asked.stderr


def test_a_users_option_keeps_its_name_and_needs_its_class(command: Command, tmp_path: Path) -> None:
    words = [*TINY, option(tmp_path / "1", "halving.Halving"), "aqn=halving"]
    refused = command("run", *words, "aqn.name=exp")
    assert refused.returncode == 2 and "aqn.name=exp cannot be set" in refused.stderr
    words = [*TINY, option(tmp_path / "2", "no_such_module.Halving"), "aqn=halving"]
    refused = command("run", *words)
    assert refused.returncode == 2 and "aqn._target_=no_such_module.Halving cannot be imported" in refused.stderr


def test_each_command_reads_runs_outside_of_a_checkout(command: Command, site: Path, tmp_path: Path) -> None:
    """Claims, experiments, templates and styles are in the package, and so is what completes its options.

    One interpreter for all but the first command: each would take seconds to import the same.
    """
    copytree(ROOT / "tests" / "assets" / "runs", tmp_path / "runs")
    said = command("claims", "runs", "out=out", "--all")
    assert said.returncode == 0 and (tmp_path / "out" / "claims.svg").exists(), said.stderr
    assert len([line for line in said.stdout.splitlines() if re.match(r"\| \d+\. ", line)]) == 13
    several = [
        ["claims", "runs", "out=out", "papers=literature"],
        ["report", "runs", "out=out/report"],
        ["figure", "reward", "runs", "out=out", "style=neurips"],
        ["figure", "runs", "runs", "out=out", "format=latex"],
        ["plan", "runs"],
        ["run", "--explain", "aqn.stages", "aqn=exp"],
        ["run", "experiment=tiny/ranks", "--cfg", "job"],
        ["run", "--help"],
    ]
    code = f"from qerl_bench.__main__ import main\nfor words in {several!r}:\n    assert main(words) == 0, words"
    done = started(tmp_path, str(site / "bin" / "python"), "-c", code)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    for shown in ("aqn.stages = ", "_target_: qerl_bench.quant", "usage: qerl-bench run"):
        assert shown in done.stdout
    assert {"reward.pdf", "runs.tex", "literature.md"} <= {file.name for file in (tmp_path / "out").iterdir()}
    script = command("--completion").stdout
    (place,) = re.findall(r"conf=(\S+)", script)
    assert (Path(place) / "aqn" / "exp.yaml").is_file() and str(ROOT) not in script


def test_the_names_for_python_are_in_the_package(site: Path, tmp_path: Path) -> None:
    code = (
        "from qerl_bench import claims, effects, figure, load_runs, run\n"
        f"made = run(*{TINY!r}, quiet=True)\n"
        "assert made.finished and [one.name for one in load_runs()] == [made.name]\n"
        "print(len(claims(load_runs(), everything=True)), effects([made]).empty, len(figure('runs', [made])))"
    )
    done = started(tmp_path, str(site / "bin" / "python"), "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == ["True", "1"] and "step 2/2" in done.stderr
