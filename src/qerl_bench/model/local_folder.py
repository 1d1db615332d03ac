"""What is missing of a model in a local folder, found by names alone, before anything large is imported."""

from __future__ import annotations

from pathlib import Path

from qerl_bench.checks import require

LOCAL = ("/", ".", "~")  # how paths begin, and no hub id
WEIGHTS = ("*.safetensors", "*.bin")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.*", "tekken.json", "spiece.model", "*.tiktoken")
CODE = "tokenization*.py"  # a tokenizer that comes as code


def check_folder(id: str) -> None:
    """Raise ConfigError if `id` is a local path at which there is no whole model. A hub id is not looked at."""
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
