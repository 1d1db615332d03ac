"""What is missing of a model in a local folder is said from names alone, before a library is imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qerl_bench.config import build as build_experiment
from qerl_bench.config import compose
from qerl_bench.model.local_folder import check_folder
from qerl_core.checks import ConfigError
from tests.models.builds import build

WHOLE = ("config.json", "model.safetensors", "tokenizer.json")
HEAVY = ("torch", "transformers")


def folder(place: Path, *names: str) -> Path:
    place.mkdir()
    for name in names:
        (place / name).write_text("{}" if name.endswith("json") else "")
    return place


@pytest.mark.parametrize("missing", WHOLE)
def test_each_missing_part_is_named(missing: str, tmp_path: Path) -> None:
    place = folder(tmp_path / "model", *(name for name in WHOLE if name != missing))
    with pytest.raises(ConfigError, match=f"model.id={place}.*{missing.partition('.')[0].replace('model', 'weights')}"):
        check_folder(str(place))


@pytest.mark.parametrize("tokenizer", ["tokenizer.json", "tokenizer.model", "vocab.txt", "tokenization_x.py"])
def test_a_whole_folder_and_a_hub_id_pass(tokenizer: str, tmp_path: Path, packages: Callable[..., None]) -> None:
    place = folder(tmp_path / "model", "config.json", "pytorch_model.bin", tokenizer)
    packages(sentencepiece=True)
    check_folder(str(place))
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


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n"
DAMAGE = {  # file and what it holds -> what is said of it, the way on included
    ("config.json", "<!doctype html>"): "no JSON.*download",
    ("config.json", '{"model_type": '): "no JSON.*download",
    ("tokenizer_config.json", "[]"): "no JSON object.*download",
    ("special_tokens_map.json", ""): "no JSON.*download",
    ("tokenizer.json", '{"model": {'): "cut short.*download",
    ("tokenizer.json", POINTER): "git lfs pull",
    ("model.safetensors", POINTER): "git lfs pull",
    ("config.json", POINTER): "git lfs pull",
}


@pytest.mark.parametrize(("file", "content"), DAMAGE, ids=lambda part: part[:14])
def test_a_file_that_is_not_whole_is_named(file: str, content: str, tmp_path: Path) -> None:
    place = folder(tmp_path / "model", *WHOLE)
    (place / file).write_text(content)
    (place / "consolidated.safetensors").write_text(POINTER)  # which is not read
    with pytest.raises(ConfigError, match=f"{place}/{file} .*{DAMAGE[file, content]}"):
        check_folder(str(place))


@pytest.mark.parametrize(("file", "needs"), [("tokenizer.model", "sentencepiece"), ("vocab.json", "merges.txt")])
def test_a_tokenizer_without_what_reads_it_is_refused_with_the_way_to_one(
    file: str, needs: str, tmp_path: Path, packages: Callable[..., None]
) -> None:
    place = folder(tmp_path / "model", "config.json", "model.safetensors", file)
    packages(sentencepiece=False, tiktoken=False)
    with pytest.raises(ConfigError, match=f"{place}/{file} is the tokenizer.*{needs}.*tokenizer.json.*save_pretrained"):
        check_folder(str(place))
    (place / "merges.txt").touch()
    packages(tiktoken=True)
    check_folder(str(place))


def test_a_folder_with_tokenizer_json_alone_is_read_as_far_as_plain_prompts(tmp_path: Path) -> None:
    """Its chat template and the names of its special tokens lie in other files."""
    place = build("llama", tmp_path / "llama")
    for file in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (place / file).unlink()
    model = build_experiment(compose(["model=hub", f"model.id={place}", "quant=bf16"])).model
    model.check_files()
    model.check(({"role": "rendered", "content": "2+2="},))
    with pytest.raises(ConfigError, match=f"model.id={place} .*no chat template.*task.template=plain"):
        model.check(({"role": "user", "content": "2+2?"},))
