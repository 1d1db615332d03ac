"""Which base weights a run started from. Name and seed do not say: one seed gives other weights on another machine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qerl_bench.model.base import Model

WHOLE = 2**30  # bytes of a file up to which all of it is read
BLOCK, BLOCKS = 2**20, 64  # of a larger file: bytes, and how many blocks of them, from its first to its last
DIGITS = 16


def digest_of(model: Model, base: Path | None) -> str | None:
    """What identifies the weights that `model` loads, before anything is packed; `base` is its warm start, if any.

    `sha256:` and the first DIGITS hex digits, for a single file those that sha256sum prints. Several files count by
    name, in order. Of a file above WHOLE bytes, its size and BLOCKS evenly spaced blocks are read, the first with the
    header among them. Weights that are made from a seed have seed and shape instead. None for a checkpoint without
    safetensors. Raises ConfigError if the model cannot be found.
    """
    folder = base or model.folder()
    if folder is not None:
        return f"sha256:{_of_files(sorted(folder.glob('*.safetensors')))[:DIGITS]}"
    spec = vars(model)
    shape = {key: value for key, value in spec.items() if key not in ("name", "dtype", "lr")}
    return f"untrained: {', '.join(f'{key}={value}' for key, value in shape.items())}" if "seed" in spec else None


def _of_files(files: list[Path]) -> str:
    if len(files) == 1:
        return _of_file(files[0])
    return hashlib.sha256("".join(f"{file.name} {_of_file(file)}\n" for file in files).encode()).hexdigest()


def _of_file(path: Path) -> str:
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size <= WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for block in range(BLOCKS):
            file.seek(block * (size - BLOCK) // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()
