"""The kernels that round inputs: the bits of the reference, and its counts."""

from __future__ import annotations

import pytest
import torch

from qerl_kernels import fp8
from qerl_kernels.activations import KINDS, MOST_INPUTS, round_blocks, round_rows

kinds = pytest.mark.parametrize("kind", KINDS)


def _x(rows: int, width: int) -> torch.Tensor:
    """Rows of many sizes, one of zeros, and a few tokens whose channels differ as much as those of models."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(rows, width, generator=generator) ** 3 * torch.logspace(-6, 5, rows)[:, None]
    x[1] = 0
    x[2, ::3] = -0.0
    x[3, 7] = 1000 * x[3].abs().max()
    return x


def _same(x: torch.Tensor, kind: str, device: str) -> None:
    """Against the reference on a CPU, whose NaN have other bits; they decide the scale of a row that has one."""
    counts = torch.tensor([5, 7], device=device)
    found, wanted = round_rows(x.to(device), kind, counts).cpu(), round_blocks(x, kind)
    assert found.dtype == x.dtype and torch.equal(found.isnan(), wanted.isnan())
    integers = torch.int32 if x.dtype == torch.float32 else torch.int16
    compared = ~(x.isnan().any(-1, keepdim=True) | wanted.isnan())
    assert torch.equal(*(one[compared].view(integers) for one in (found, wanted)))
    inputs = x != 0
    assert counts.tolist() == [5 + int((inputs & (found == 0)).sum()), 7 + int(inputs.sum())]


def _dtypes(device: str) -> tuple[torch.dtype, ...]:
    return (torch.float32,) if device == "cpu" else (torch.float32, torch.bfloat16, torch.float16)


@kinds
@pytest.mark.parametrize("width", [32, 96, 1536, 8960, MOST_INPUTS])
def test_the_bits_are_those_of_the_reference(device: str, kind: str, width: int) -> None:
    for dtype in _dtypes(device):
        x = _x(6 if device == "cpu" else 64, width)
        _same((x if dtype != torch.float16 else x.clamp(-6e4, 6e4)).to(dtype), kind, device)


@kinds
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, under the interpreter
def test_ends_of_the_range(device: str, kind: str) -> None:
    """Scales that are subnormal or not finite, and inputs that are not; NVFP4's 1 / scale must not overflow at 0."""
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    x[x == 0] = 1.0
    for row, factor in enumerate((1e-45, 1e-42, 1e-38, 1e-35, 1e-20, 1e-8, 1e20, 1e37)):
        x[row] *= factor
    x[8, 5], x[9, 6], x[10, 7], x[11, :40] = torch.nan, torch.inf, -torch.inf, 3e38
    for dtype in _dtypes(device)[:2]:
        values = x.to(dtype)
        _same(torch.where(values == 0, torch.finfo(dtype).smallest_normal, values), kind, device)


@kinds
def test_ties_go_to_the_even_code(device: str, kind: str) -> None:
    halves = torch.arange(-512, 512) / 4
    steps = torch.cat([halves[halves.abs() <= top] for top in (6, 127.5)])
    subnormal = torch.arange(-20, 21) * 2.0**-10  # multiples of half of the least E4M3
    for top in (6.0, 2688.0, 127.5, 448.0):
        x = torch.zeros(2, 1280)
        x[0, : len(steps)], x[1, 32 : 32 + len(subnormal)] = steps.clamp(-top, top), subnormal
        x[:, -1] = top
        for dtype in _dtypes(device):
            _same(x.to(dtype), kind, device)


@kinds
def test_rows_of_other_shapes_and_dtypes(device: str, kind: str) -> None:
    counts = torch.zeros(2, dtype=torch.long, device=device)
    x = _x(8, 64).to(device)
    for other in (x.view(2, 4, 64), x.view(4, 2, 64).transpose(0, 1), x[0], x.double(), x[:0]):
        found = round_rows(other, kind, counts)
        assert found.shape == other.shape and torch.equal(found, round_blocks(other, kind))
    skipped = torch.tensor([0, 1, 0, 0, 7, 0, 0, 0], device=device)
    for fused in (True, False):
        some = torch.zeros_like(counts)
        assert torch.equal(round_rows(x.view(1, 8, 64), kind, some, fused, skipped)[0], round_blocks(x, kind))
        assert some[1] == int((x[skipped == 0] != 0).sum())
    before = counts.tolist()
    assert torch.equal(round_rows(x, kind, counts, fused=False), round_blocks(x, kind))
    assert counts[1] == before[1] + int((x != 0).sum())


@pytest.mark.parametrize("case", [32, 96, 1536, 18944, "ties", "ends"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, under the interpreter
def test_codes_of_fp8_are_those_of_the_reference(device: str, case: int | str) -> None:
    values = _x(12, case if isinstance(case, int) else 1280)
    if case == "ties":
        values[:, :1024] = torch.arange(-512, 512) / torch.tensor([4.0, 1024.0]).repeat(6)[:, None]
        values[:, -1] = 448.0
    elif case == "ends":
        values[:4] *= torch.tensor([1e-36, 1e-32, 1e25, 1e32])[:, None]
        values[8, 5], values[9, 6], values[10, 7], values[11, :40] = torch.nan, torch.inf, -torch.inf, 3e38
    for dtype in (torch.float16, *([torch.bfloat16] if device == "cuda" else [])):  # the interpreter's is wrong
        x = (values if dtype != torch.float16 else values.clamp(-6e4, 6e4)).to(dtype)
        skipped, finite, found = torch.arange(len(x)) % 3, x.isfinite().all(-1), []
        for place, fused in ((device, True), ("cpu", False)):
            counts = torch.tensor([5, 7], device=place)
            codes, scales = (one.cpu() for one in fp8.quantize(x.to(place), counts, fused, skipped.to(place)))
            assert torch.equal(codes.float().isnan().any(-1) | scales[:, 0].isnan(), ~finite)
            bits = codes[finite].view(torch.uint8), scales[finite].view(torch.int32)
            found.append((*(one.tolist() for one in bits), case == "ends" or counts.tolist()))
        assert found[0] == found[1]
        assert torch.equal((codes.float() * scales).to(dtype)[finite], round_blocks(x, "fp8")[finite])


@pytest.mark.parametrize("width", [96, 1536, 18944])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, under the interpreter
def test_codes_of_fp8_with_factors_are_those_of_the_reference(device: str, width: int) -> None:
    """And of their rounded products, among which are ties, zeros and what rounds to zero; NaN stays in its row."""
    values = _x(12, width) * torch.tensor([1.0, 1e-4, 1e3, 0.0]).repeat(3)[:, None]
    values[4, 5], values[5, 6] = torch.nan, torch.inf
    factors = (values[6] * values[8]).abs() / 448
    factors[::3] = 2.0 ** torch.randint(-30, 3, factors[::3].shape)
    for dtype in (torch.float16, *([torch.bfloat16] if device == "cuda" else [])):  # the interpreter's is wrong
        x, found = values.to(dtype), []
        finite = (x.float() * factors).isfinite().all(-1)
        for place, fused in ((device, True), ("cpu", False)):
            counts = torch.tensor([5, 7], device=place)
            codes, scales = (one.cpu() for one in fp8.quantize(x.to(place), counts, fused, factors=factors.to(place)))
            assert torch.equal(codes.float().isnan().any(-1) | scales[:, 0].isnan(), ~finite)
            found.append([one[finite].tolist() for one in (codes.view(torch.uint8), scales.view(torch.int32))])
        assert found[0] == found[1]
        products = (x.float() * factors).bfloat16()[finite]
        assert torch.equal((codes.float() * scales)[finite].bfloat16(), round_blocks(products, "fp8"))


@pytest.mark.parametrize("shape", [(16, 16), (144, 272), (128, 384), (16, 1040)])
def test_transposed_codes(device: str, shape: tuple[int, int]) -> None:
    codes = (torch.arange(shape[0] * shape[1]).reshape(shape) * 37 % 253).to(torch.uint8).view(torch.float8_e4m3fn)
    fp8.scratch(shape, torch.uint8, torch.device(device)).fill_(255)
    found = fp8.transpose(codes.to(device)).view(torch.uint8).cpu()
    assert found.is_contiguous() and torch.equal(found, codes.view(torch.uint8).t())


@pytest.mark.parametrize("shape", [(300, 256), (3, 2064), (1, 16), (2, 4096)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, under the interpreter
def test_dequantized_fp8_has_the_bits_of_the_reference(device: str, shape: tuple[int, int]) -> None:
    """All finite codes under scales from the least to those that overflow, and whatever was in the buffer before."""
    rows, width = shape
    codes = (torch.arange(rows * width).reshape(shape) * 7 % 256).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    random = torch.rand(rows, 1, generator=torch.Generator().manual_seed(0))
    scales = (random * torch.tensor([2.0**-140, 1e-36, 1e-3, 1.0, 1e30, 3e38]).repeat(rows)[:rows, None]).float()
    weight = codes.view(torch.float8_e4m3fn).to(device)
    wanted = fp8.dequantize(weight.cpu(), scales, torch.bfloat16, fused=False).clone()
    assert torch.equal(wanted, (weight.cpu().double() * scales.double()).float().bfloat16())
    fp8.scratch(shape, torch.bfloat16, weight.device).fill_(torch.nan)
    found = fp8.dequantize(weight, scales.to(device), torch.bfloat16)
    assert torch.equal(found.cpu().view(torch.int16), wanted.view(torch.int16))
    assert found.data_ptr() == fp8.scratch((1,), torch.uint8, weight.device).data_ptr()
