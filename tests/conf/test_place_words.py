"""model=PLACE is model=hub model.id=PLACE, for a hub id, a folder or a GGUF file that no option is named like."""

from __future__ import annotations

from pathlib import Path

import pytest

from qerl_bench.__main__ import main
from qerl_bench.config import compose
from qerl_bench.sweep.check import check_points
from qerl_core.checks import ConfigError
from qerl_core.options.composer import Composer
from qerl_core.options.user_options import with_search_path


@pytest.mark.parametrize("place", ["./x.gguf", "x.GGUF", "/a/folder", "ORG/Name-1.5B", "'/a b/c'"])
def test_a_place_is_an_id_of_the_hub(place: str) -> None:
    composed = compose(["seed=3", f"model={place}", "model.dither=1"])
    assert composed == compose(["seed=3", "model=hub", f"model.id={place}", "model.dither=1"])
    assert composed.model.id == place.strip("'")


def test_an_option_of_that_name_comes_first(tmp_path: Path) -> None:
    assert compose(["model=small/25m"]).model.name == "small-25m"
    (tmp_path / "model" / "mine").mkdir(parents=True)
    (tmp_path / "model" / "mine" / "7b.yaml").write_text("defaults: [../hub]\nid: ORG/other\n")
    words = with_search_path(["model=mine/7b", "--config-dir", str(tmp_path)])
    assert Composer().spelled_out(words) == words
    assert Composer().spelled_out(words[:1]) == ["model=hub", "model.id=mine/7b"]


@pytest.mark.parametrize("word", ["model=qwen3-4c", "model=small/26m", "model=folder"])
def test_a_name_that_is_no_place_is_answered_with_options_and_places(word: str) -> None:
    with pytest.raises(ConfigError, match=rf"there is no {word}\. .*--explain model.* model=ORG/NAME"):
        compose([word])


@pytest.mark.parametrize("words", [["model=a/b,./x.gguf"], ["model=[a/b"], ["+model=a/b"], ["xmodel=a/b"]])
def test_other_words_stay_as_they_are(words: list[str]) -> None:
    assert Composer().spelled_out(words) == words


def test_points_of_a_sweep_are_places_too() -> None:
    with pytest.raises(ConfigError, match=r"model=\./none\.gguf: .*no such file"):
        check_points([["model=tiny"], ["model=./none.gguf"]])


@pytest.mark.parametrize("command", [["run"], ["run", "-m"], ["probe"]])
def test_commands_take_places(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main([*command, "model=./none.gguf"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "model.id=none.gguf: there is no such file" in " ".join(said.split())


def test_hydra_composes_a_place(capfd: pytest.CaptureFixture[str]) -> None:
    main(["run", "model=ORG/Name", "seed=3", "--cfg", "job"])
    assert "\n  id: ORG/Name\n" in capfd.readouterr().out
