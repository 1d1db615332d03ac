"""Whether embedding and head of a GGUF file are one tied matrix that was rounded twice.

They are if they differ by no more than their rounding; then the finer one serves both.
"""

from __future__ import annotations

import logging
from concurrent.futures import Executor
from functools import partial

import numpy as np

from qerl_bench.model.gguf.architecture import EMBEDDING, HEAD
from qerl_bench.model.gguf.header import Header
from qerl_bench.model.gguf.weights import cell_widths, chunks, has_known_cells, stored, values

log = logging.getLogger(__name__)
ONE_ROUNDING = 1.5  # two roundings of one row differ by 0.85 to 1.07 of what their cells give


def finer_of_one(header: Header, pool: Executor) -> str | None:
    """The one of embedding and head that has the narrower cells; None if they are two matrices.

    They are two if they differ in any row by more than two roundings of the same numbers. None, too, and a line in the
    log, if one has a type whose cells are not known.
    """
    kinds = [header.tensors[name].kind for name in (EMBEDDING, HEAD)]
    if not all(map(has_known_cells, kinds)):
        log.info(
            "%s: %s and %s have the types %s; whether they are one tied matrix is not known of these, so both are kept",
            *(header.path.name, EMBEDDING, HEAD, " and ".join(kinds)),
        )
        return None
    first, *others = chunks(header.tensors[EMBEDDING])
    sums = _cells_of_one(header, first)  # alone, because two matrices differ here already
    for more in pool.map(partial(_cells_of_one, header), others if sums is not None else []):
        sums = None if sums is None or more is None else sums + more
    return None if sums is None else (EMBEDDING, HEAD)[int(sums.argmin())]


def _cells_of_one(header: Header, rows: range) -> np.ndarray | None:
    """The sums of squared widths of cells, of embedding and head; None if they differ by more than their rounding."""
    both, cells = [], []
    for tensor in (header.tensors[name] for name in (EMBEDDING, HEAD)):
        raw = stored(header, tensor, rows)
        both.append(values(raw, tensor.kind))
        cells.append(np.square(cell_widths(raw, tensor.kind)).mean(1))
    gap = np.square(np.subtract(*both)).mean(1)
    if (gap > ONE_ROUNDING**2 * sum(cells) / 12).any():
        return None
    return np.array(cells).sum(1, dtype=np.float64)
