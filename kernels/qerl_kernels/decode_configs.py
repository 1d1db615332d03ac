"""Tile sizes of the decode GEMM: a table measured per GPU, and a rule for shapes that are not in the table.

Nothing is tuned while a model runs. `decode_h200.json` is shipped. `benchmarks/gemm.py --search` measures shapes on
the GPU at hand and writes a table of the same form to the user's cache folder, which takes precedence. The `lora_rank`
of an entry is the rank of the adapter in its measurement; shipped entries of a 7B from 64 tokens on have 32. For
`mma_v2` there is no table: no card that needs it was at hand, so its rule is a guess, slow at 256 tokens on an H200.
Tables are of 4 bits; weights of 8 bits have a rule alone, which was timed and not searched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from qerl_kernels.layout import BLOCK, EIGHT_BITS, INPUTS

BUCKETS = (8, 16, 32, 64, 128, 256)  # tokens, rounded up
WGMMA, MMA_V2 = "wgmma", "mma_v2"  # kernels: of Hopper, and of every card from sm_80 on
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
SHARED_LIMIT = 227 * 1024 - 256  # bytes of a program on Hopper, less the barriers
RANK = "lora_rank"  # of one layer, before layers are concatenated; 0 or absent: no adapter
_SHIPPED = {"NVIDIA H200": "decode_h200.json"}


@dataclass(frozen=True)
class Config:
    rows: int  # of W per program
    tokens: int
    warps: int  # 16 or 32 rows each
    split: int  # programs that split the K of the same rows
    ring: int  # columns of 64 inputs that are prefetched
    buffers: int  # of activations, `ring` columns each
    separate: bool = False  # a second kernel adds the partial sums, not the last program to finish
    registers: int | None = None  # limit, if the compiler's choice lets too few programs run concurrently
    overlap: bool = False  # wgmma: the tensor core may run into the next round: faster, but needs more registers
    kernel: str = WGMMA

    @property
    def shared(self) -> int:
        """Bytes of the activation buffers."""
        return self.buffers * self.ring * self.tokens * 128


def bucket(tokens: int) -> int:
    return next(b for b in BUCKETS if b >= tokens)


def choose(gpu: str, shape: tuple[int, int], tokens: int, kernel: str = WGMMA, format_name: str = "nvfp4") -> Config:
    """The measured configuration for W (N, K) and up to 256 tokens; without one, that of `by_rule`.

    A round takes whole blocks, so a measured one that would cut a block is none.
    """
    columns, eight_bits = max(1, BLOCK[format_name] // INPUTS), format_name in EIGHT_BITS
    measured = None if eight_bits else table(gpu).get(f"{shape[0]}x{shape[1]}", {}).get(str(bucket(tokens)))
    if measured is None or measured.kernel != kernel or measured.ring % columns:
        return by_rule(shape, tokens, kernel, format_name)
    return measured


def by_rule(shape: tuple[int, int], tokens: int, kernel: str = WGMMA, format_name: str = "nvfp4") -> Config:
    """Small tiles, and K split until about 400 programs run. For wgmma near the best for most shapes on H200.

    `mma_v2` has its activations in registers too, and 99 KiB of shared memory on some cards: fewer tokens and columns.
    Weights of 8 bits have half as many columns on their way, where there are many: as many bytes.
    """
    size, wgmma = bucket(tokens), kernel == WGMMA
    rings = {8: 8, 16: 8, 32: 8, 64: 4, 128: 2, 256: 2} if wgmma else {8: 8, 16: 8, 32: 4, 64: 2, 128: 2, 256: 2}
    ring, take = min(rings[size], 4 if format_name in EIGHT_BITS else 8), min(size, 128 if wgmma else 64)
    blocks = -(-shape[0] // 64) * (size // take)
    split = _nearest(400 / blocks, -(-shape[1] // (64 * ring)))
    return Config(64, take, 4, split, ring, 2, separate=size > 32 and split > 1, kernel=kernel)


def candidates(shape: tuple[int, int], tokens: int, kernel: str = WGMMA) -> Iterator[Config]:
    """What a search tries, with 1 to 4 programs per processor of an H200.

    For wgmma the tiles that were best for some shape there, for mma_v2 variations of its rule.
    """
    size, rule = bucket(tokens), by_rule(shape, tokens, kernel)
    take, wgmma = rule.tokens, kernel == WGMMA
    tiles: tuple[tuple[int, int, int, int, int | None], ...] = {  # rows, warps, ring, buffers, registers
        8: ((64, 4, 8, 2, None), (128, 8, 8, 2, None), (128, 8, 4, 2, None)),
        16: ((64, 4, 8, 2, None), (64, 4, 8, 3, None), (128, 8, 8, 2, None), (128, 8, 4, 2, None)),
        32: ((64, 4, 8, 2, None), (64, 4, 4, 3, None), (64, 4, 4, 2, None), (128, 8, 4, 2, None)),
        64: ((64, 4, 4, 2, None), (64, 4, 2, 3, None), (128, 8, 4, 2, None), (128, 8, 4, 2, 80), (128, 8, 2, 3, 80)),
        128: ((64, 4, 2, 2, None), (64, 4, 2, 3, None), (128, 8, 2, 3, None), (128, 8, 2, 2, 128), (128, 8, 2, 3, 128)),
        256: (
            (64, 4, 2, 2, None),
            (64, 4, 2, 3, None),
            (128, 8, 2, 2, None),
            (128, 8, 2, 3, 128),
            (256, 16, 2, 2, 128),
        ),
    }[size]
    if not wgmma:
        rings = ((rule.ring, 2), (rule.ring // 2, 2), (rule.ring // 2, 3))
        tiles = tuple((16 * warps, warps, ring, buffers, None) for warps in (4, 8) for ring, buffers in rings)
    for rows, warps, ring, buffers, registers in tiles:
        blocks, rounds = -(-shape[0] // rows) * (size // take), -(-shape[1] // (64 * ring))
        for split in sorted({_nearest(target / blocks, rounds) for target in (132, 264, 396, 528)}):
            for separate in (False, True) if split > 1 and size > 8 else (False,):
                for overlap in (False, True) if size > 16 and wgmma else (False,):
                    yield Config(rows, take, warps, split, ring, buffers, separate, registers, overlap, kernel)


def _nearest(split: float, rounds: int) -> int:
    return min((s for s in SPLITS if s == 1 or s <= rounds), key=lambda s: abs(s - split))


def cache_file(gpu: str) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "qerl_kernels" / f"decode {gpu}.json"


def tables(gpu: str) -> list[Path]:
    """The tables in use on this GPU: the shipped one, then the user's, which takes precedence."""
    shipped = [Path(__file__).with_name(_SHIPPED[gpu])] if gpu in _SHIPPED else []
    return [path for path in (*shipped, cache_file(gpu)) if path.is_file()]


@cache
def table(gpu: str) -> dict[str, dict[str, Config]]:
    """Configurations by shape ("NxK") and bucket; the user's replace the shipped ones."""
    merged: dict[str, dict[str, Config]] = {}
    for path in tables(gpu):
        for shape, entries in json.loads(path.read_text()).items():
            configs = {size: {k: v for k, v in entry.items() if k != RANK} for size, entry in entries.items()}
            merged.setdefault(shape, {}).update({size: Config(**config) for size, config in configs.items()})
    return merged


def write_table(path: Path, best: dict[tuple[int, int], dict[int, Config]], lora_rank: int = 0) -> None:
    """Add configurations by shape and bucket, measured with an adapter of `lora_rank`, to the table `path`."""
    entries = json.loads(path.read_text()) if path.is_file() else {}
    for (n, k), configs in best.items():
        entries.setdefault(f"{n}x{k}", {}).update({str(s): asdict(c) | {RANK: lora_rank} for s, c in configs.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f'  "{shape}": {{\n' + _rows(configs) + "\n  }" for shape, configs in entries.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    table.cache_clear()


def _rows(configs: dict[str, dict[str, Any]]) -> str:
    return ",\n".join(f'    "{size}": {json.dumps(config)}' for size, config in configs.items())
