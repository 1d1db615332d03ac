"""Options keep the name and the class of their file, whichever way they come into a config."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from qerl_bench.commands.eval import apply_overrides
from qerl_bench.config import build, compose
from qerl_bench.sweep.check import check_points
from qerl_core.checks import ConfigError
from qerl_core.options import composer
from qerl_core.options.composer import Composer
from qerl_core.options.files import LINE, alternatives
from qerl_core.process.installation import CONF_DIR

OTHERS = {"experiment", "recipe", "claim", "run.yaml", "sweeping.yaml"}
AXES = sorted(folder.name for folder in CONF_DIR.iterdir() if folder.name not in OTHERS)
BF16, NVFP4 = "qerl_bench.quant.bf16.BF16", "qerl_bench.quant.nvfp4.NVFP4"
BY_HAND = f"{{name:nvfp4,_target_:{BF16}}}"


@pytest.mark.parametrize("axis", AXES)
def test_the_name_of_an_option_cannot_be_set(axis: str) -> None:
    chosen = OmegaConf.select(compose(), f"{axis}.name")
    other = next(file.stem for file in sorted((CONF_DIR / axis).glob("*.yaml")) if file.stem != chosen)
    with pytest.raises(ConfigError) as refusal:
        compose([f"{axis}.name={other}"])
    said = f"{axis}.name={other} cannot be set: .* with {axis}={chosen} it is {chosen}. Choose {axis}={other} instead"
    assert refusal.match(said)
    with pytest.raises(
        ConfigError, match=rf"{axis}.name=mine cannot be set: .* Leave it out; choose {axis}=.*\b{other}\b"
    ):
        compose([f"{axis}.name=mine"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["quant={name:nvfp4}"], "quant.name=nvfp4 cannot be set"),
        ([f"quant={BY_HAND}", "experiment=smoke"], "quant.name=nvfp4 cannot be set"),
        (["quant=nvfp4", f"quant._target_={BF16}"], f"quant._target_={BF16} cannot be set: .* it is {NVFP4}"),
        (["quant._target_=os.system"], "quant._target_=os.system cannot be set"),
        (["aqn=exp", "aqn.name=exp_repo"], "Choose aqn=exp_repo instead"),  # another option of the same class
        (["model=qwen2.5-3b-instruct", "model.name=qwen2.5-7b-instruct"], "Choose model=qwen2.5-7b-instruct instead"),
        (["task=gsm8k", "task.name=math500"], "Choose task=math500 instead"),
        (["eval=paper", "eval.name=task"], "Choose eval=task instead"),
        (["aqn=format_error", "aqn.format.name=mxfp4"], "Choose quant@aqn.format=mxfp4 instead"),
        (["quant=[bf16,nvfp4]"], r"quant is one option: choose quant=bf16\|"),
        (["~quant", f"+quant={BY_HAND}"], "quant is one option: choose quant="),
        (["task=reasoning_gym", "task.name=gsm8k"], "calls task gsm8k, which is qerl_bench.task.dataset.DatasetTask"),
    ],
)
def test_other_ways_to_set_a_name_or_class_are_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(compose(words))


def test_the_names_of_runs_are_no_names_of_options_and_checked_no_time(listen: Callable[..., list[Any]]) -> None:
    """A check reads the files of all options, 30 ms for each point of a sweep."""
    checked = listen(composer, "check_option_names")
    composes = Composer()
    assert [composes.tree([f"name=run-{seed}", f"seed={seed}"])["name"] for seed in range(3)] == [
        *("run-0", "run-1", "run-2")
    ]
    assert len(checked) == 1  # of the options that all points share
    with pytest.raises(ConfigError, match=r"quant\.name"):
        composes.tree(["quant.name=nvfp4"])
    assert len(checked) == 2


def test_a_sweep_is_refused_before_it_starts() -> None:
    with pytest.raises(ConfigError, match=r"aqn.name=exp seed=1: aqn.name=exp cannot be set"):
        check_points([["aqn.name=exp", "seed=1"]])


@pytest.mark.parametrize(
    "words",
    [
        ["aqn=layerwise", "quant=nvfp4", "aqn@aqn.schedule=linear"],
        ["task=reasoning_gym", "task.name=zebra_puzzles"],
        ["quant=nvfp4.yaml", "aqn=exp", "aqn.sigma_start=0.02"],
        ["model=qwen2.5-0.5b-instruct", "model.id=/a/local/folder"],
    ],
)
def test_other_values_can_be_set(words: list[str]) -> None:
    build(compose(words))


def _own(folder: Path, name: str, text: str) -> list[str]:
    """Command-line words that choose the option quant=`name`, a file of the user's in another folder."""
    file = folder / "quant" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return [f"hydra.searchpath=[{folder}]", f"quant={name}"]


def test_a_users_own_option_is_called_by_its_file(tmp_path: Path) -> None:
    own = _own(tmp_path, "mine", f"_target_: {BF16}\nname: mine\n")
    assert build(compose(own)).quant.name == "mine"
    below = _own(tmp_path, "sub/mine", f"_target_: {BF16}\nname: sub-mine\n")
    assert build(compose(below)).quant.name == "sub-mine"
    with pytest.raises(ConfigError, match=r"quant.name=nvfp4 cannot be set: .* with quant=mine it is mine"):
        compose([*own, "quant.name=nvfp4"])
    with pytest.raises(ConfigError, match=r"mine.yaml says name: nvfp4; .* the name of the file: mine"):
        compose(_own(tmp_path / "1", "mine", f"_target_: {BF16}\nname: nvfp4\n"))
    with pytest.raises(ConfigError, match=r"mine.yaml must name the class"):
        compose(_own(tmp_path / "2", "mine", "block: 16\n"))
    with pytest.raises(ConfigError, match=r"mine.yaml says name: nvfp4"):  # a preset needs a name of its own
        compose(_own(tmp_path / "3", "mine", "defaults: [nvfp4]\n"))
    assert build(compose(_own(tmp_path / "4", "mine", "defaults: [nvfp4]\nname: mine\n"))).quant.name == "mine"


def test_stored_configs_are_checked_by_what_they_say() -> None:
    stored = compose(["quant=nvfp4"])
    stored.quant._target_ = BF16
    with pytest.raises(ConfigError, match=f"calls quant nvfp4, which is {NVFP4}, but its quant._target_ is {BF16}"):
        build(stored)
    for target in ("os.system", "subprocess.Popen", "no_such_package.Format"):
        stored.quant = {"_target_": target, "name": "mine"}
        with pytest.raises(ConfigError, match=rf"quant._target_.*{target}"):
            build(stored)
    stored = compose(["task=gsm8k"])
    stored.task.train._target_ = "subprocess.Popen"
    with pytest.raises(ConfigError, match=r"task.train._target_.*subprocess.Popen"):
        build(stored)


@pytest.mark.parametrize("word", ["eval.name=paper", "task._target_=x", "engine.name=vllm", "task.name=gsm8k"])
def test_an_evaluation_of_a_run_cannot_rename_either(word: str) -> None:
    with pytest.raises(ConfigError, match=f"{word} would change the name of .* choose another"):
        apply_overrides(compose(), [word])


def test_the_program_checks_where_hydra_searches(tmp_path: Path) -> None:
    """With a flag nothing is composed in advance."""
    _own(tmp_path, "mine", f"_target_: {BF16}\nname: mine\n")
    program = [sys.executable, str(CONF_DIR.parent / "src" / "run.py"), "--config-dir", str(tmp_path)]
    done = subprocess.run(
        [*program, "quant=mine", "quant.name=nvfp4", f"root={tmp_path}", "hydra.output_subdir=null"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "quant.name=nvfp4 cannot be set" in done.stderr


def test_many_alternatives_are_cut_to_a_line_and_few_are_listed() -> None:
    options = [f"model-{number:02}" for number in range(40)]
    assert alternatives("model", options[:3]) == "model=model-00|model-01|model-02"
    cut = alternatives("model", options)
    listed, dots, rest = cut.partition("|...")
    assert dots and len(listed) <= LINE and listed.partition("=")[2].split("|") == options[: listed.count("|") + 1]
    assert rest == " (all of them: --explain model)"
    assert alternatives("model", ["x" * 200]) == f"model={'x' * 200}"
