"""What other programs leave beside runs, and half of a run: left out of what is read, by name, and never counted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from qerl_core.checks import ConfigError
from qerl_core.process.arguments import whole
from qerl_core.sweeps.status import statuses
from qerl_studies.commands import collect, compare
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.find import find_runs

ASSETS = Path(__file__).parents[1] / "assets" / "runs"
RUNS = sorted(path.name for path in ASSETS.iterdir())[:2]
LINES = '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.4}\n'
OURS_NEARLY = '{"kind": "train", "step": 1, "loss": 0.5}\n'


def files(folder: Path, contents: dict[str, str | bytes]) -> None:
    for name, content in contents.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)


def of_program(contents: dict[str, str | bytes]) -> Callable[[Path], object]:
    return lambda folder: files(folder, contents)


def half(*kept: str) -> Callable[[Path], object]:
    """What a copy had reached: these files, the last one in half."""

    def copied(folder: Path) -> None:
        folder.mkdir()
        for name in kept:
            shutil.copy(ASSETS / RUNS[1] / name, folder)
        last = folder / kept[-1]
        last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])

    return copied


UNSEEN: dict[str, Callable[[Path], object]] = {  # what nobody takes for a run
    "W&B": of_program({"wandb/run-1/files/config.yaml": "wandb_version: 1\n", "wandb/run-1/files/output.log": "x"}),
    "Lightning": of_program({"version_0/hparams.yaml": "lr: 1\n", "version_0/metrics.csv": "step,loss\n1,2\n"}),
    "Trainer": of_program({"checkpoint-5/trainer_state.json": "{}", "checkpoint-5/config.json": "{}"}),
    "Hydra": of_program({"multirun.yaml": "{}", "0/.hydra/config.yaml": "lr: 1\n"}),
    "an editor": of_program({"settings.json": '{"editor.tabSize": 4}', ".vscode/settings.json": "{}"}),
    "a config alone": of_program({"config.yaml": "lr: 1\n"}),
}
SAID: dict[str, Callable[[Path], object]] = {  # what looks like a run
    "lines of its own": of_program({"metrics.jsonl": LINES}),
    "lines and a config": of_program({"metrics.jsonl": OURS_NEARLY, "config.yaml": "lr: 1\n"}),
    "lines and a config with steps": of_program({"metrics.jsonl": OURS_NEARLY, "config.yaml": "seed: 0\nsteps: 1\n"}),
    "lines that are a picture": of_program({"metrics.jsonl": b"\x89PNG\r\n\x1a\n"}),
    "lines in a folder below": of_program({"exp/1/metrics.jsonl": LINES}),
    "a table of its own": of_program({"settings.json": '{"a": 1}', "tidy.parquet": "run,step\n"}),
    "a config and checkpoints": of_program({"config.yaml": "lr: 1\n", "checkpoints/last/weights.bin": "x"}),
    "half of the lines": half("config.yaml", "done.json", "env.json", "metrics.jsonl"),
    "half of env.json": half("config.yaml", "done.json", "metrics.jsonl", "env.json"),
    "half of the config": half("done.json", "env.json", "metrics.jsonl", "config.yaml"),
    "no config": half("done.json", "env.json", "metrics.jsonl"),
}
STEPS = {"lines and a config with steps": "unfinished"}  # to `status`, which asks a config for no more than steps


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(ASSETS / RUNS[0], tmp_path / "runs" / RUNS[0])
    return tmp_path / "runs"


@pytest.mark.parametrize("name", [*UNSEEN, *SAID])
def test_a_folder_beside_a_run_is_left_out_and_said(
    name: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (UNSEEN | SAID)[name](root / "beside")
    assert [run.path.name for run in load_runs([root])] == [RUNS[0]]
    said = whole(capsys.readouterr().err)
    assert ("left out: " in said and "beside" in said) == (name in SAID) and len(said.splitlines()) == (name in SAID)
    collect.main([str(root), f"out={tmp_path}/study"])
    assert [*json.loads((tmp_path / "study" / "settings.json").read_text())["runs"]] == [RUNS[0]]
    compare.main([str(root / RUNS[0]), str(root)])
    printed = capsys.readouterr().out
    assert "1 runs, 0 of them unfinished" in printed and printed.count("(1 run)") == 2
    states = {one.run.name: one.state for one in statuses([root])}
    assert states.pop(RUNS[0]) == "done" and {*states.values()} <= (
        {"damaged", STEPS.get(name)} if name in SAID else set()
    )


@pytest.mark.parametrize("name", SAID)
def test_alone_it_is_refused(name: str, root: Path) -> None:
    shutil.rmtree(root / RUNS[0])
    SAID[name](root / "beside")
    with pytest.raises(ConfigError, match="beside"):
        load_runs([root])


def test_what_mirrors_and_copying_programs_leave_in_a_run_is_none(root: Path) -> None:
    files(
        root / RUNS[0],
        {
            "wandb/run-1/files/config.yaml": "wandb_version: 1\n",
            "wandb/run-1/files/metrics.jsonl": LINES,
            "._metrics.jsonl": b"\0\5\x16\7",
            ".metrics.jsonl.aB3dE5": "{",
            ".ipynb_checkpoints/config.yaml": "x: 1\n",
            "backup/metrics.jsonl": LINES,
            "backup/config.yaml": "x: 1\n",
        },
    )
    assert find_runs(root) == [root / RUNS[0]] == [one.run for one in statuses([root])]
