"""Identifies the base weights of a run. Name and seed are not enough: machines make different weights from one seed."""

from __future__ import annotations

import hashlib
import time
from functools import lru_cache
from pathlib import Path

from qerl_bench.model.base import Model
from qerl_bench.quant.weight_files import weight_files
from qerl_core.file_state import FileState, file_state
from qerl_core.options.model_names import last_part
from qerl_core.rundir.checksums import digest

MAX_WHOLE_BYTES = 2**30  # larger files are sampled
BLOCK_BYTES, BLOCKS = 2**20, 64  # the blocks read of a larger file, evenly spaced from its first byte to its last
DIGITS = 16
SETTLED_NS = 2 * 10**9  # since the last change of a file whose digest is remembered


def digest_of(model: Model, base: Path | None) -> str | None:
    """Identifies the weights that `model` loads, before packing; `base` is the folder of its warm start, if any.

    For a checkpoint: `sha256:` and the first DIGITS hex digits, for a single file the same as sha256sum prints. Several
    files count by name, in order. Of files above MAX_WHOLE_BYTES only the size and BLOCKS blocks count; the first block
    includes the header. For weights made from a seed: seed and sizes. None for a checkpoint without safetensors. Raises
    ConfigError if the model cannot be found.
    """
    folder = base or model.folder()
    if folder is not None:
        return f"sha256:{_files_digest(weight_files(folder))[:DIGITS]}"
    spec = {key: value for key, value in vars(model).items() if key not in ("name", "dtype", "lr")}
    return f"untrained: {', '.join(f'{key}={value}' for key, value in spec.items())}" if "seed" in spec else None


def name_of_base(model: Model) -> str:
    """What others may read of where the weights come from: a hub id, the last part of a path, or the option."""
    source = getattr(model, "id", model.name)
    name = last_part(source) if Path(source).exists() else source
    dither = getattr(model, "dither", None)
    return name if dither is None else f"{name} (dither {dither})"


def _files_digest(files: list[Path]) -> str:
    if len(files) == 1:
        return file_digest(files[0])
    return hashlib.sha256("".join(f"{file.name} {file_digest(file)}\n" for file in files).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 in hex of a file, of one above MAX_WHOLE_BYTES of its size and some blocks.

    A process hashes a file once while device, inode, size and both times are the same and SETTLED_NS old, since clocks
    of file systems are coarse. Nothing is remembered for other processes: runs record this number, and from one start
    to the next a disk may change bytes without the times, which would then be recorded as those that were written.
    """
    state = file_state(path)
    if time.time_ns() - max(state.written, state.changed) < SETTLED_NS:
        return _file_digest(path)
    return _known_digest(path.absolute(), state)


@lru_cache(maxsize=256)
def _known_digest(path: Path, state: FileState) -> str:
    return _file_digest(path)


def _file_digest(path: Path) -> str:
    size = path.stat().st_size
    if size <= MAX_WHOLE_BYTES:
        return digest(path)
    state = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for block in range(BLOCKS):
            file.seek(block * (size - BLOCK_BYTES) // (BLOCKS - 1))
            state.update(file.read(BLOCK_BYTES))
    return state.hexdigest()
