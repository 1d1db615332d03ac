"""A run folder that somebody else prepared is data: reading it runs nothing, and tells nothing of this machine."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from omegaconf import OmegaConf

from qerl_bench.commands import eval as command
from qerl_bench.config import build, compose
from qerl_core.checks import ConfigError
from qerl_core.exits import exit_in_words
from qerl_core.rundir.checksums import SEALS
from qerl_core.rundir.run_checks import check_run_dir
from qerl_studies.runs.load import load_run

if TYPE_CHECKING:
    from conftest import Runs

SECRET = "hunter2-and-more"
EVALUATE = ["eval=task", "eval.samples=1", "eval.questions=2"]


class Burglar:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.canary,)


@pytest.fixture
def prepared(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run, without its seals, next to a pickle and a module that leave a canary where they are loaded."""
    folder = runs.copy("finished", tmp_path / "run")
    (folder / SEALS).unlink()
    for file in folder.glob("**/done.json"):
        file.write_text("{}")
    for manifest in folder.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{}")
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Burglar(tmp_path / "canary"), protocol=2))
    (tmp_path / "evilmodule.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'canary')!r}).touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TOKEN", SECRET)
    return folder


def _every_reader(folder: Path, config: Any) -> list[Callable[[], object]]:
    return [
        lambda: command.main([str(folder), *EVALUATE]),
        lambda: load_run(folder),
        lambda: check_run_dir(folder, config),
    ]


CALLS = {
    "pickle": {"_target_": "pandas.read_pickle", "filepath_or_buffer": "evil.pkl"},
    "copy": {"_target_": "shutil.copyfile", "src": "evil.pkl", "dst": "canary"},
    "module": {"_target_": "evilmodule.Anything"},
    "imported by the project": {"_target_": "qerl_bench.experiment_spec.Path"},
    "no option": {"_target_": "qerl_core.rundir.run_dir.RunDir", "path": "canary", "cfg": {}},
    "list": [[{"deep": {"_target_": "evilmodule.Anything"}}]],
    "no text": {"_target_": ["os", "system"]},
}


@pytest.mark.parametrize(
    ("call", "place"),
    [
        *((call, "importance_sampling.clip_max") for call in CALLS),
        *(("module", place) for place in ("quantizer.extra", "task.operators", "kl", "device")),
    ],
)
def test_a_config_that_names_other_code_runs_nothing(prepared: Path, call: str, place: str) -> None:
    config = yaml.safe_load((prepared / "config.yaml").read_text())
    group, _, key = place.partition(".")
    if key:
        config[group][key] = CALLS[call]
    else:
        config[group] = CALLS[call]
    (prepared / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match=place):
        command.main([str(prepared), *EVALUATE])
    assert "evilmodule" not in sys.modules
    assert not (prepared.parent / "canary").exists() and not Path("canary").exists()


def test_words_that_name_other_code_run_nothing(prepared: Path) -> None:
    """On the command line, for a run and for an evaluation."""
    for word in ("{_target_:evilmodule.Anything}", "[{_target_:evilmodule.Anything}]"):
        with pytest.raises(ConfigError, match=r"kl.coef.*--config-dir"):
            compose([f"kl.coef={word}"])
        with pytest.raises(ConfigError, match=r"task.operators.*--config-dir"):
            command.main([str(prepared), "eval=task", f"task.operators={word}"])
    assert "evilmodule" not in sys.modules


@pytest.mark.parametrize(
    "line",
    [
        "device: ${oc.env:TOKEN}",
        'device: "\\x24{oc.env:TOKEN}"',
        "device: !!python/object/apply:os.getenv [TOKEN]",
        "device: !!python/object/apply:pathlib.Path.touch [canary]",
        "device: !foreign {a: 1}",
        "device: 2026-11-22",
        "device: &a [*a]",
        "device: !!set {a, b}",
    ],
)
def test_a_config_that_is_more_than_data_is_refused(runs: Runs, prepared: Path, line: str) -> None:
    text = (prepared / "config.yaml").read_text()
    (prepared / "config.yaml").write_text(text.replace("device: cpu", line))
    for read in _every_reader(prepared, runs.config):
        with pytest.raises(ConfigError, match=r"config\.yaml") as caught:
            read()
        assert SECRET not in str(caught.value)
    assert not Path("canary").exists()


def test_a_pickle_in_a_checkpoint_is_not_opened(runs: Runs, prepared: Path) -> None:
    from qerl_bench.commands.run import run_experiment

    (prepared / "checkpoints" / "step_000006" / "trainer.pt").write_bytes((prepared.parent / "evil.pkl").read_bytes())
    (prepared / "done.json").unlink()
    config = OmegaConf.merge(runs.config, {"root": str(prepared.parent)})
    (prepared.parent / "runs").mkdir()
    prepared.rename(prepared.parent / "runs" / "run")
    with pytest.raises(ConfigError, match=r"step_000006.*trainer\.pt"):
        run_experiment(build(config), config)
    assert not Path("canary").exists()


def test_no_variable_of_the_environment_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", SECRET)
    with pytest.raises(ConfigError, match=r"hydra\.job\.env_copy=\['TOKEN'\].*leave it out") as caught:
        compose(["hydra.job.env_copy=[TOKEN]"])
    assert SECRET not in str(caught.value)


def test_a_refused_evaluation_exits_in_words(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (prepared / "config.yaml").write_bytes(b"\x80\x00\xff")
    with pytest.raises(SystemExit) as caught, exit_in_words("stopped"):
        command.main([str(prepared), *EVALUATE])
    assert caught.value.code == 2 and "config.yaml" in capsys.readouterr().err
