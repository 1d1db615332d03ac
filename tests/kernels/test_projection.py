"""x A^T of an adapter: against float64, whatever the other rows are, and from one launch to the next."""

from __future__ import annotations

import pytest
import torch

from qerl_kernels import decode, projection, scratch
from qerl_kernels.projection import pieces_of, project

SIZES = ((1, 16, 8), (2, 200, 8), (17, 330, 33), (16, 1000, 96), (33, 4200, 16), (70, 64, 200))
LARGE = ((1, 3584, 32), (13, 3584, 96), (64, 18944, 32), (100, 5120, 192), (256, 3584, 256))


def _inputs(m: int, k: int, r: int, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m + k + r + seed)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16  # the interpreter's bfloat16 arithmetic is wrong
    x, a = (torch.randn(n, k, generator=generator).to(device, dtype) for n in (m, r))
    return x, a


def _check(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """The kernel's output, where partial sums and output held NaN: sums in FP32, rounded once."""
    partial, counters = scratch.workspace(x.device, 0)
    partial.fill_(torch.nan)
    y = torch.full((len(x), len(a)), torch.nan, dtype=x.dtype, device=x.device)
    projection._launch(x, a, y)
    want, sums = x.double() @ a.double().t(), x.double().abs() @ a.double().abs().t()
    rounding = 2.0**-8 if x.dtype == torch.bfloat16 else 2.0**-23
    assert bool(((y.double() - want).abs() <= want.abs() * rounding + sums * 2.0**-20).all())
    assert torch.count_nonzero(counters) == 0
    return y


def test_it_is_that_of_float64(device: str) -> None:
    for m, k, r in SIZES if device == "cpu" else SIZES + LARGE:
        for seed in range(1 if device == "cpu" else 3):
            x, a = _inputs(m, k, r, device, seed)
            assert torch.equal(_check(x, a), project(x, a)), (m, k, r)


def test_a_row_does_not_depend_on_the_others(device: str) -> None:
    """The same bits alone, at another place, and among so many rows that they make several tiles."""
    x, a = _inputs(40, 1000 if device == "cpu" else 3584, 24, device)
    together = project(x, a)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).to(device)
    assert torch.equal(project(x[order], a), together[order])
    for row in (0, 17, 39):
        assert torch.equal(project(x[row : row + 1], a)[0], together[row])


@pytest.mark.parametrize("rank", [1, 8, 32, 96, 192, 256])
@pytest.mark.parametrize("width", [16, 896, 3584, 5120, 18944, 27648])
def test_pieces_cover_the_inputs(rank: int, width: int) -> None:
    """Each once; many programs where the inputs suffice, and no more pieces than are added in time."""
    (inputs, pieces), rank_blocks = pieces_of(rank, width), -(-rank // 16)
    assert (pieces - 1) * inputs < width <= pieces * inputs and inputs % 64 == 0 and pieces <= 64
    assert pieces * rank_blocks >= 80 or inputs == 64 or rank_blocks == 1


def test_wrong_arguments_are_explained(interpreter: None) -> None:
    x, a = torch.zeros(3, 32), torch.zeros(4, 32)
    for wrong, message in (
        ((x, a[:, :16]), "contiguous|shape"), ((x, a.double()), "float32"), ((x[:0], a), "1 to 256"),
        ((x, torch.zeros(257, 32)), "1 to 256"), ((torch.zeros(32, 3).t(), a), "contiguous"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            project(*wrong)


@pytest.mark.parametrize(
    ("rows", "width", "rank", "wanted"),
    [(128, 3584, 96, True), (256, 3584, 96, False), (8, 18944, 32, True), (32, 18944, 32, False), (1, 64, 257, False)],
)
def test_a_library_multiplies_where_it_was_faster(rows: int, width: int, rank: int, wanted: bool) -> None:
    assert projection.pays(torch.empty(rows, width), torch.empty(rank, width)) == wanted


def test_only_hopper_multiplies_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the rows of the constant; of few rows also where a library computes x A^T faster."""
    x, a = torch.empty(8, 256, dtype=torch.bfloat16), torch.empty(32, 256, dtype=torch.bfloat16)
    assert not projection.runs_beside(x, a)
    for kernel, wanted in ((decode.WGMMA, True), (decode.MMA_V2, False), (None, False)):
        monkeypatch.setattr(projection, "kernel_of", lambda _, kernel=kernel: kernel)
        assert projection.runs_beside(x, a) == wanted
    monkeypatch.setattr(projection, "kernel_of", lambda _: decode.WGMMA)
    wide = torch.empty(257, 18944)
    assert projection.runs_beside(wide[:64], wide[:32]) and not projection.pays(wide[:64], wide[:32])
    for rows, rank in ((65, 32), (64, 257)):  # a library's
        assert not projection.runs_beside(wide[:rows], wide[:rank])
    assert not projection.runs_beside(wide[:, :256], a)
    for most, wanted in ((8, True), (7, False), (0, False)):
        monkeypatch.setattr(projection, "BESIDE_ROWS", most)
        assert projection.runs_beside(x, a) == wanted
