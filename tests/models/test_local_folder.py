"""What is missing of a model in a local folder is said from names alone, before a library is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qerl_bench.checks import ConfigError
from qerl_bench.model.local_folder import check_folder

WHOLE = ("config.json", "model.safetensors", "tokenizer.json")
HEAVY = ("torch", "transformers")


def folder(place: Path, *names: str) -> Path:
    place.mkdir()
    for name in names:
        (place / name).touch()
    return place


@pytest.mark.parametrize("missing", WHOLE)
def test_each_missing_part_is_named(missing: str, tmp_path: Path) -> None:
    place = folder(tmp_path / "model", *(name for name in WHOLE if name != missing))
    with pytest.raises(ConfigError, match=f"model.id={place}.*{missing.partition('.')[0].replace('model', 'weights')}"):
        check_folder(str(place))


@pytest.mark.parametrize("tokenizer", ["tokenizer.json", "tokenizer.model", "vocab.txt", "tokenization_x.py"])
def test_a_whole_folder_and_a_hub_id_pass(tokenizer: str, tmp_path: Path) -> None:
    check_folder(str(folder(tmp_path / "model", "config.json", "pytorch_model.bin", tokenizer)))
    check_folder("ORG/NAME")


def test_no_folder_and_a_folder_of_gguf_files(tmp_path: Path) -> None:
    for id in (f"{tmp_path}/none", "./none", "~/none"):
        with pytest.raises(ConfigError, match=f"{id}: there is no such folder"):
            check_folder(id)
    place = folder(tmp_path / "files", "a-q4_0.gguf", "b.gguf")
    with pytest.raises(ConfigError, match=f"model={place}/a-q4_0.gguf"):
        check_folder(f"{place}/")


@pytest.mark.parametrize("names", [(), ("config.json", "model.safetensors"), ("x.gguf",)], ids=["empty", "cut", "gguf"])
def test_the_command_says_it_without_importing_torch(names: tuple[str, ...], tmp_path: Path) -> None:
    place = folder(tmp_path / "model", *names)
    program = (
        "import sys; from qerl_bench.__main__ import main\n"
        "try: main(['run', *sys.argv[1:]])\n"
        f"finally: print(*{{*{HEAVY}}} & {{*sys.modules}})"
    )
    words = [f"model={place}", "task=gsm8k", f"root={tmp_path}", "device=cpu"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 2 and f"model.id={place}" in done.stderr.replace("\n    ", " ")
    assert done.stdout.strip() == ""
