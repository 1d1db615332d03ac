"""--config-dir: which override it becomes, what it refuses, and that a run's children and Python find the folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from qerl_bench import own_options
from qerl_bench.checks import ConfigError
from qerl_bench.config import build, compose
from qerl_bench.own_options import own_modules, with_search_path, words_in_use

OPTION = "_target_: {module}.Own\nname: {name}\n"
MODULE = """
from dataclasses import dataclass

from qerl_bench.quant.bf16 import BF16


@dataclass(frozen=True, kw_only=True)
class Own(BF16):
    pass
"""


@pytest.fixture(autouse=True)
def forget_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_options, "_in_use", [])
    monkeypatch.setattr(sys, "path", [*sys.path])


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


def test_its_modules_are_imported_recorded_and_handed_on(tmp_path: Path) -> None:
    (tmp_path / "quant").mkdir()
    (tmp_path / "quant" / "own.yaml").write_text(OPTION.format(module="own_module_of_a_test", name="own"))
    (tmp_path / "own_module_of_a_test.py").write_text(MODULE)
    (tmp_path / "unused.py").write_text("")
    words = with_search_path(["--config-dir", str(tmp_path)])
    assert build(compose([*words, "quant=own"])).quant.name == "own"
    assert words_in_use() == words and list(own_modules()) == ["own_module_of_a_test.py"]


def test_an_option_that_the_projects_own_would_hide_is_refused(tmp_path: Path) -> None:
    (tmp_path / "quant").mkdir()
    (tmp_path / "quant" / "nvfp4.yaml").write_text("defaults: [bf16]\nname: nvfp4\n")
    with pytest.raises(ConfigError, match=r"quant/nvfp4\.yaml .* rename"):
        compose(with_search_path(["--config-dir", str(tmp_path)]))
