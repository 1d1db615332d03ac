"""--config-dir: which override it becomes, what it refuses, and that a run's children and Python find the folder."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from hydra_plugins.process_launcher.launcher import ProcessLauncher
from qerl_bench.__main__ import COMMANDS, READERS, main
from qerl_bench.conduct.runner import check_options, parse_options, parser_of
from qerl_bench.config import build, compose
from qerl_core.checks import ConfigError
from qerl_core.options import user_options
from qerl_core.options.composer import HYDRA_DEFAULTS
from qerl_core.options.explain import usage
from qerl_core.options.user_options import folders, with_search_path, words_in_use
from qerl_core.process.installation import CONF_DIR
from qerl_core.rundir.environment import own_modules

OPTION = "_target_: {module}.Own\nname: {name}\n"
MODULE = """
from dataclasses import dataclass

from qerl_bench.quant.bf16 import BF16


@dataclass(frozen=True, kw_only=True)
class Own(BF16):
    pass
"""


def test_each_form_of_the_flag_becomes_one_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "it's mine", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    monkeypatch.chdir(tmp_path)
    words = with_search_path(["--config-dir", "it's mine", "quant=nvfp4", "-m", f"--config-dir={second}"])
    assert words[:2] == ["quant=nvfp4", "-m"] and len(words) == 3
    for folder in (first, second):
        (folder / "quant").mkdir()
        (folder / "quant" / f"{folder.name[0]}.yaml").write_text(f"defaults: [bf16]\nname: {folder.name[0]}\n")
        assert build(compose([words[2], f"quant={folder.name[0]}"])).quant.name == folder.name[0]
    assert with_search_path(["steps=3"]) == ["steps=3"]


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    for words in (["--config-dir", str(tmp_path / "none")], ["--config-dir", ""], ["-cd", __file__]):
        with pytest.raises(ConfigError, match="--config-dir"):
            with_search_path(words)
    with pytest.raises(ConfigError, match=r"hydra\.searchpath"):
        with_search_path(["--config-dir", str(tmp_path), "hydra.searchpath=[x]"])


@pytest.mark.parametrize("command", [*COMMANDS])
def test_every_command_accepts_the_flag_and_puts_the_folder_in_use(
    command: str, tmp_path: Path, stand_in: Callable[..., None]
) -> None:
    """A command that composes nothing gets its other words alone."""
    folder = tmp_path / "it's mine"
    folder.mkdir()
    package = "qerl_studies" if command in READERS else "qerl_bench"
    given: list[list[str]] = []
    module = import_module(f"{package}.commands.{command}")
    stand_in(module, main=lambda words: given.append([*words]))
    stand_in(user_options, _in_use=[])
    assert main([command, "--config-dir", str(folder), "a=b"]) == 0
    assert folders() == [CONF_DIR, folder]
    (words,) = given
    assert words[0] == "a=b" and len(words) == (2 if COMMANDS[command].composes else 1)


def test_sweeps_studies_and_help_know_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "it's mine"
    (folder / "quant").mkdir(parents=True)
    (folder / "quant" / "own.yaml").write_text("defaults: [bf16]\nname: own\n")
    words = with_search_path(["--config-dir", str(folder)])
    assert " own" in usage([*words, "-h"]) and " own" not in usage()

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF_DIR), **HYDRA_DEFAULTS):
        config = hydra_compose("run", words, return_hydra_config=True)
    launcher = ProcessLauncher(slots=1, mps=False)
    launcher.setup(hydra_context=None, task_function=None, config=config)  # type: ignore[arg-type]
    assert launcher.search_path == words

    study = tmp_path / "study.yaml"
    content = yaml.safe_load((CONF_DIR.parent / "studies" / "worlds-2026" / "study.yaml").read_text())
    study.write_text(yaml.safe_dump(content | {"arms": {"own": {"tier": 1, "words": ["quant=own"]}}}))
    options = parse_options(parser_of(""), [str(study), "words=task.numbers=[3,4],steps=5", *words])
    assert options.words == ["task.numbers=[3,4]", "steps=5", *words]
    design, _, _ = check_options(parse_options(parser_of(""), [str(study), *words]))
    assert design.formats == ["own"] and words[0] in design.words(design.arms[0], 0, 0, None)


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_test_knows_no_folder_or_module_of_another(name: str, tmp_path: Path) -> None:
    assert folders() == [CONF_DIR]
    (tmp_path / "quant").mkdir()
    (tmp_path / "quant" / f"{name}.yaml").write_text(OPTION.format(module="same_module_of_two_tests", name=name))
    (tmp_path / "same_module_of_two_tests.py").write_text(MODULE + f"\n    of_test = {name!r}\n")
    words = with_search_path(["--config-dir", str(tmp_path)])
    assert build(compose([*words, f"quant={name}"])).quant.of_test == name
    assert folders() == [CONF_DIR, tmp_path]


def test_its_modules_are_imported_recorded_and_handed_on(tmp_path: Path) -> None:
    (tmp_path / "quant").mkdir()
    (tmp_path / "quant" / "own.yaml").write_text(OPTION.format(module="own_module_of_a_test", name="own"))
    (tmp_path / "own_module_of_a_test.py").write_text(MODULE)
    (tmp_path / "unused.py").write_text("")
    words = with_search_path(["--config-dir", str(tmp_path)])
    assert build(compose([*words, "quant=own"])).quant.name == "own"
    assert words_in_use() == words and list(own_modules()) == ["own_module_of_a_test.py"]


def test_a_number_for_an_axis_is_not_blamed_on_an_option_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "mine.yaml").write_text("defaults: [none]\nname: mine\n")
    words = with_search_path(["eval=mine", "hydra.job.chdir=5", "quant=5", f"--config-dir={tmp_path}"])
    with pytest.raises(ConfigError, match=r"no quant=5\. .*nvfp4"):
        compose(words)
    with pytest.raises(ConfigError, match=r"no eval=7\. .*mine"):
        compose([words[-1], "eval=7"])


def test_an_option_that_the_projects_own_would_hide_is_refused(tmp_path: Path) -> None:
    (tmp_path / "quant").mkdir()
    (tmp_path / "quant" / "nvfp4.yaml").write_text("defaults: [bf16]\nname: nvfp4\n")
    with pytest.raises(ConfigError, match=r"quant/nvfp4\.yaml .* rename"):
        compose(with_search_path(["--config-dir", str(tmp_path)]))
