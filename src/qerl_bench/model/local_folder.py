"""What is missing of a model in a local folder, found by names and first bytes, before anything large is imported."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from qerl_bench.quant.weight_files import weight_files
from qerl_core.checks import ConfigError, require

LOCAL = ("/", ".", "~")  # how paths begin, and no hub id
WEIGHTS = ("*.safetensors", "*.bin")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.*", "tekken.json", "spiece.model", "*.tiktoken")
CODE = "tokenization*.py"  # a tokenizer that comes as code
WHOLE_TOKENIZER = "tokenizer.json"  # the one form that needs no other file and no other package
MODELS = {
    "tokenizer.model": ("sentencepiece", "tiktoken"),
    "spiece.model": ("sentencepiece",),
}  # packages, one of which
SETTINGS = ("config.json", "tokenizer_config.json", "special_tokens_map.json")
REMEDY = f"{WHOLE_TOKENIZER} alone is enough: AutoTokenizer.from_pretrained(ID).save_pretrained(FOLDER) writes it"
POINTER = b"version https://git-lfs"  # how a file begins that Git LFS has not fetched yet


def check_folder(id: str) -> None:
    """Raise ConfigError, naming the file, if `id` is a local path at which there is no whole model.

    A hub id is not looked at.
    """
    folder = Path(id)
    if not folder.is_dir():
        require(
            not id.startswith(LOCAL) or folder.exists(),
            f"model.id={id}: there is no such folder. Give a folder, a GGUF file or a hub id, model=ORG/NAME",
        )
        return
    files = sorted(file.name for file in folder.glob("*.gguf"))
    whole = "Give a folder as save_pretrained writes it"
    remedy = f"It has a GGUF file: model={id.rstrip('/')}/{files[0]}" if files else whole
    for what, patterns in {
        "config.json": ("config.json",),
        f"weights ({', '.join(WEIGHTS)})": WEIGHTS,
        f"tokenizer ({', '.join(TOKENIZERS[:3])} or the like)": (*TOKENIZERS, CODE),
    }.items():
        found = any(True for pattern in patterns for _ in folder.glob(pattern))
        require(found, f"model.id={id}: the folder has no {what}. {remedy}")
    weights = weight_files(folder) or folder.glob("*.bin")
    named = (folder / name for name in (*SETTINGS, WHOLE_TOKENIZER, *MODELS))
    for file in (*weights, *filter(Path.is_file, named)):
        require(not _begins(file, POINTER), f"{file} is a pointer of Git LFS to a file that is not here: git lfs pull")
    for file in filter(Path.is_file, (folder / name for name in SETTINGS)):
        _require_object(file)
    _check_tokenizer(folder)


def _begins(file: Path, start: bytes) -> bool:
    with open(file, "rb") as opened:
        return opened.read(len(start)) == start


def _require_object(file: Path) -> None:
    try:
        said = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON ({error}): correct it, or download it again") from None
    require(isinstance(said, dict), f"{file} is no JSON object: correct it, or download it again")


def _check_tokenizer(folder: Path) -> None:
    file, vocabulary = folder / WHOLE_TOKENIZER, folder / "vocab.json"
    if file.is_file():
        content = file.read_bytes().strip()
        whole = content.startswith(b"{") and content.endswith(b"}")
        require(whole, f"{file} is cut short, or no JSON object: download it again")
        return
    for name, packages in MODELS.items():
        require(
            not (folder / name).is_file() or any(map(find_spec, packages)),
            f"{folder / name} is the tokenizer, and is read with the package {' or '.join(packages)}, which is not "
            f"installed: pip install {packages[0]}. {REMEDY}",
        )
    require(
        not vocabulary.is_file() or (folder / "merges.txt").is_file() or any(folder.glob(CODE)),
        f"{vocabulary} is the tokenizer, and the folder has no merges.txt beside it. {REMEDY}",
    )
