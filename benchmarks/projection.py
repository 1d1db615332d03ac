"""Microseconds of x A^T of an adapter, ours and the library's, in turns.

    python benchmarks/projection.py [--out FILE] [--rows 1,8,..] [--widths 3584,18944] [--ranks 32,96]

Each call of a run reads another A, and together they are several times the L2 cache. `projection.pays` says where ours
is used: it should be where it is not slower.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import timing
import torch

from qerl_kernels import projection

LISTS = {"rows": "1,8,32,64,128,256", "widths": "3584,18944", "ranks": "32,96"}


def measure(widths: Sequence[int], ranks: Sequence[int], rows: Sequence[int]) -> Iterator[dict[str, Any]]:
    gpu = torch.cuda.get_device_name()
    for width, rank, m in itertools.product(widths, ranks, rows):
        count = max(2, timing.ROTATED_BYTES // (2 * rank * width))
        matrices = torch.randn((count, rank, width), dtype=torch.bfloat16, device="cuda").unbind()
        x = torch.randn((m, width), dtype=torch.bfloat16, device="cuda")
        runs = [
            [lambda x=x, a=a: projection.project(x, a) for a in matrices],
            [lambda x=x, a=a: x @ a.t() for a in matrices],
        ]
        ours, library = (timing.quantiles(spans)["p50_us"] for spans in timing.times(runs))
        least = timing.floor_us(2 * (m + rank) * width, 2 * m * rank * width, timing.COPY_RATE, timing.MATRIX_RATE)
        yield {
            "gpu": gpu, "torch": torch.__version__, "k": width, "rank": rank, "rows": m,
            "pieces": projection.pieces_of(rank, width)[1], "ours_us": ours, "cublas_us": library,
            "speedup": round(library / ours, 2), "floor_us": round(least, 2),
        }  # fmt: skip


def main() -> None:
    parser = timing.argument_parser(__doc__)
    for name, default in LISTS.items():
        parser.add_argument(f"--{name}", default=default)
    options = parser.parse_args()
    timing.require_gpu(parser)
    lists = {name: [int(one) for one in getattr(options, name).split(",")] for name in LISTS}
    timing.print_rows(timing.write_rows(measure(**lists), options.out), leave_out=("gpu", "torch"))


if __name__ == "__main__":
    main()
