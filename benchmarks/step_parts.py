"""Decoding steps with some of what makes them fast for few rows, so that one process times what each part gives.

A word names the parts of a step, joined by +, or is "all" or "none":

    ahead       the next weight is brought to the L2 cache, at most `ahead.AHEAD_BYTES` of it; ahead8: at most 8 MiB
    beside      a matmul runs beside x A^T of its adapter (`projection.runs_beside`)
    gate        the matmul of gate and up ends with SwiGLU (`decode.GATES`)
    rotation    attention rotates queries and keys itself (`decoder_layer.ROTATES`)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from qerl_kernels import ahead, decode, decoder_layer, projection

ALL, NONE = "all", "none"
_OFF: dict[str, tuple[Any, str, int]] = {
    "ahead": (ahead, "AHEAD_BYTES", 0),
    "beside": (projection, "BESIDE_ROWS", 0),
    "gate": (decode, "GATES", False),
    "rotation": (decoder_layer, "ROTATES", False),
}


def named(word: str) -> str:
    """`word` itself. Raises ValueError if it names no parts of a step."""
    unknown = [part for part in _parts(word) if part not in _OFF and not re.fullmatch(r"ahead\d+", part)]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: choose from {ALL}, {NONE}, {', '.join(_OFF)}, ahead8 and the like")
    return word


def only(word: str, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows, while steps are recorded with the parts of `word` alone. Each row says so."""
    before = {name: getattr(module, constant) for name, (module, constant, _) in _OFF.items()}
    parts = _parts(word)
    try:
        for name, (module, constant, off) in _OFF.items():
            setattr(module, constant, before[name] if name in parts else off)
        for mib in re.findall(r"\bahead(\d+)", word):
            ahead.AHEAD_BYTES = int(mib) << 20
        for row in rows:
            yield row | {"parts": word}
    finally:
        for name, (module, constant, _) in _OFF.items():
            setattr(module, constant, before[name])


def _parts(word: str) -> list[str]:
    return list(_OFF) if word == ALL else [] if word == NONE else word.split("+")
