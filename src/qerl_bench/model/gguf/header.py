"""The header of a GGUF file: its metadata, and where each tensor lies. Nothing behind it is read.

The layout is that of llama.cpp's docs/gguf.md, versions 2 and 3, little-endian. The gguf package takes ten seconds for
the header of a file with 262,144 tokens, and says of a file that is cut short only that a shape does not fit.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from qerl_core.checks import ConfigError, require, require_package
from qerl_core.file_state import FileState, file_state

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = 32  # of tensors, unless general.alignment says otherwise
FLOATS = ("F32", "F16", "BF16")  # types of tensors that were not rounded to blocks
SCALED = "NVFP4"  # the type of which a tensor may have a factor, in a tensor beside it
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_REMEDY = "download the file again"


@dataclass(frozen=True)
class Tensor:
    """A tensor of the file: `kind` is its type (Q4_K), `shape` begins with rows, `start` counts from the file's."""

    kind: str
    shape: tuple[int, ...]
    start: int
    size: int  # bytes

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def need(self, key: str) -> Any:
        """The value of a metadata key. Raises ConfigError without one."""
        require(key in self.metadata, f"{self.path} has no {key} in its metadata; choose another file for model.id")
        return self.metadata[key]


def scale_of(name: str, leaf: str = "scale") -> str:
    """The tensor beside the weight `name` that holds its factor."""
    return f"{name.removesuffix('weight')}{leaf}"


def read_header(path: Path) -> Header:
    """The header of a whole GGUF file, kept for further calls while the file stays as it is.

    Raises ConfigError without the gguf package, or if there is no file, it is none of GGUF, one part of several, cut
    short, or has a tensor of a type that the package does not know.
    """
    require_package("gguf", f"model.id={path}", "gguf")
    require_file(path)
    return _read(path, file_state(path))


def require_file(path: Path) -> None:
    """Raise ConfigError unless there is a file."""
    require(path.is_file(), f"model.id={path}: there is no such file. Give a GGUF file, a folder or a hub id")


@lru_cache(maxsize=4)
def _read(path: Path, state: FileState) -> Header:
    size = state.size
    require(size >= 24, f"model.id={path} has {size} bytes and is no GGUF file; {_REMEDY}")
    with open(path, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        reader = _Reader(path, content)
        magic, version = reader.take(4), reader.scalar("I")
        require(
            magic == MAGIC, f"model.id={path} is no GGUF file: it begins with {magic!r}. Give a GGUF file or a folder"
        )
        require(
            version in VERSIONS,
            f"model.id={path} has version {version} of GGUF; readable are {VERSIONS}, little-endian. Convert it with a "
            "newer llama.cpp",
        )
        tensors, keys = reader.scalar("Q"), reader.scalar("Q")
        metadata = _once(path, "key", [reader.entry() for _ in range(keys)])
        _require_whole(path, metadata)
        listed = [reader.tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        require(
            isinstance(alignment, int) and alignment > 0 and alignment % 8 == 0,
            f"model.id={path}: general.alignment={alignment} is no multiple of 8, so its tensors cannot be found; "
            f"{_REMEDY}",
        )
        first = -(-reader.position // alignment) * alignment
    places = [(name, _place(path, name, first, size, *rest)) for name, rest in listed]
    _require_apart(path, places)
    return Header(path, metadata, _once(path, "tensor", places))


def _once(path: Path, kind: str, named: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = sorted(name for name, count in Counter(name for name, _ in named).items() if count > 1)
    require(not twice, f"model.id={path} has the {kind} {', '.join(twice[:3])} twice; choose another file")
    return dict(named)


def _require_apart(path: Path, places: list[tuple[str, Tensor]]) -> None:
    """Raise ConfigError if a tensor begins before the end of another: one of the two is not what its name says."""
    ordered = sorted(places, key=lambda one: (one[1].start, one[1].size))
    for (before, one), (name, other) in pairwise(ordered):
        require(
            one.start + one.size <= other.start,
            f"model.id={path}: tensor {name} begins at byte {other.start:,}, inside of {before}; {_REMEDY}",
        )


def _require_whole(path: Path, metadata: Mapping[str, Any]) -> None:
    named = _PART.search(path.name)
    parts = int(named[2]) if named else int(metadata.get("split.count", 1))
    require(
        parts == 1,
        f"model.id={path} is one of {parts} parts of a split file, which are not read. Join them: llama-gguf-split "
        "--merge FIRST_PART WHOLE.gguf",
    )


def _place(path: Path, name: str, first: int, size: int, shape: tuple[int, ...], number: int, offset: int) -> Tensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {int(kind): kind for kind in GGMLQuantizationType}
    kind = known.get(number)
    require(
        kind is not None, f"model.id={path}: tensor {name} has the unknown type {number}. Give a file of another type"
    )
    assert kind is not None
    weights, in_bytes = GGML_QUANT_SIZES[kind]
    require(
        shape != () and shape[-1] % weights == 0,
        f"model.id={path}: tensor {name} has the shape {shape}, which blocks of {weights} do not fit; {_REMEDY}",
    )
    start, length = first + offset, math.prod(shape) // weights * in_bytes
    require(
        start + length <= size,
        f"model.id={path} is cut short: tensor {name} ends at byte {start + length:,}, the file at {size:,}; {_REMEDY}",
    )
    return Tensor(kind.name, shape, start, length)


class _Reader:
    """Takes values off the front of `content`."""

    def __init__(self, path: Path, content: mmap) -> None:
        self.path, self.content, self.position = path, content, 0

    def take(self, length: int) -> bytes:
        end = self.position + length
        require(
            end <= len(self.content),
            f"model.id={self.path} is cut short or damaged inside its header, at byte {self.position:,}; {_REMEDY}",
        )
        taken = self.content[self.position : end]
        self.position = end
        return taken

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def entry(self) -> tuple[str, Any]:
        key = self.text()
        return key, self.value(self.scalar("I"))

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ConfigError(f"model.id={self.path} has a value of the unknown type {kind} in its header; {_REMEDY}")
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind not in _SCALARS:
            return [self.value(kind) for _ in range(length)]
        code = _SCALARS[kind]
        return [*struct.unpack(f"<{length}{code}", self.take(length * struct.calcsize(code)))]

    def tensor(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        """Name; and shape with rows first, type and offset."""
        name, dimensions = self.text(), self.scalar("I")
        require(dimensions <= 4, f"model.id={self.path}: tensor {name!r} has {dimensions} dimensions; {_REMEDY}")
        shape = tuple(reversed([self.scalar("Q") for _ in range(dimensions)]))
        return name, (shape, self.scalar("I"), self.scalar("Q"))
