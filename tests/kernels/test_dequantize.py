"""The dequantize kernel against the references, bit for bit: all codes under all scales, and odd shapes."""

from __future__ import annotations

import pytest
import torch

from qerl_kernels import mxfp4, nf4, nvfp4
from qerl_kernels.dequantize import dequantize
from qerl_kernels.layout import BLOCK, repack
from qerl_kernels.scratch import scratch
from tests.kernels.symmetric_weights import SPECS, packed_symmetric

Packed = dict[str, torch.Tensor]
ALL_CODES = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)  # 16 codes


def _wanted(format_name: str, packed: Packed, shape: tuple[int, int]) -> torch.Tensor:
    """The operand in FP64 (nf4: FP32), rounded to bfloat16 once; exact for the FP4 formats."""
    if format_name in SPECS:
        return SPECS[format_name].operand(packed, shape, torch.bfloat16)
    if format_name == "nvfp4":
        return nvfp4.operand(packed["weight_packed"], packed["weight_scale"], torch.float32).bfloat16()
    if format_name == "mxfp4":
        return mxfp4.operand(packed["weight_packed"], packed["weight_scale"], torch.float32).bfloat16()
    codes = packed["weight"].flatten().int()
    values = torch.tensor(nf4.VALUES, device=codes.device)[torch.stack((codes >> 4, codes & 0xF), -1).flatten()]
    return (values.view(-1, 64) * packed["absmax"][:, None]).view(shape).bfloat16()


def _random(format_name: str, shape: tuple[int, int], seed: int = 0) -> Packed:
    generator = torch.Generator().manual_seed(seed)

    def bytes_of(*size: int, below: int = 256) -> torch.Tensor:
        return torch.randint(0, below, size, generator=generator, dtype=torch.uint8)

    n, k = shape
    if format_name in SPECS:
        return packed_symmetric(format_name, shape, seed)
    if format_name == "nvfp4":
        scale = bytes_of(n, k // 16, below=127).view(torch.float8_e4m3fn)
        return {"weight_packed": bytes_of(n, k // 2), "weight_scale": scale}
    if format_name == "mxfp4":
        return {"weight_packed": bytes_of(n, k // 2), "weight_scale": bytes_of(n, k // 32, below=253)}
    return {"weight": bytes_of(n * k // 2, 1), "absmax": torch.rand(n * k // 64, generator=generator) * 3}


def _check(format_name: str, packed: Packed, shape: tuple[int, int], device: str) -> None:
    weight = repack(format_name, packed, shape).to(device)
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)  # whatever is compared was written
    assert dequantize(weight, out) is out
    assert torch.equal(out.cpu(), _wanted(format_name, packed, shape))
    again = dequantize(weight)
    assert torch.equal(again.view(torch.int16), out.view(torch.int16))
    assert again.data_ptr() == scratch((1,), torch.uint8, out.device).data_ptr()


@pytest.mark.parametrize("format_name", BLOCK)
@pytest.mark.parametrize("shape", [(1, 64), (17, 320), (40, 512), (150, 256)])
def test_odd_shapes(device: str, format_name: str, shape: tuple[int, int]) -> None:
    n, k = shape
    shape = (n, max(k, 128) // 128 * 128) if BLOCK[format_name] == 128 else shape
    _check(format_name, _random(format_name, shape), shape, device)


def test_all_codes_under_all_nvfp4_scales(device: str) -> None:
    scales = torch.arange(128, dtype=torch.uint8)[:127].repeat_interleave(1)  # 0, subnormals, to 448
    packed = {"weight_packed": ALL_CODES.repeat(128, 4).view(128, 32), "weight_scale": torch.zeros(128, 4)}
    packed["weight_scale"] = torch.cat([scales, scales[:1]]).view(128, 1).repeat(1, 4).view(torch.float8_e4m3fn)
    _check("nvfp4", packed, (128, 64), device)
    exact = nvfp4.operand(packed["weight_packed"], packed["weight_scale"], torch.float32)
    assert torch.equal(exact.bfloat16().float(), exact)


def test_all_codes_under_all_mxfp4_scales(device: str) -> None:
    """Bytes 0 to 252: products from 2^-128, which bfloat16 holds as a subnormal, to 6 x 2^125."""
    scales = torch.arange(253, dtype=torch.uint8)[:, None].repeat(1, 2)
    packed = {"weight_packed": ALL_CODES.repeat(253, 4).view(253, 32), "weight_scale": scales}
    _check("mxfp4", packed, (253, 64), device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("format_name", ["fp8", "int8"])
def test_scales_of_rows_in_other_dtypes(device: str, format_name: str, dtype: torch.dtype) -> None:
    """And a width of no whole tiles."""
    _check(format_name, packed_symmetric(format_name, (37, 72), dtype=dtype), (37, 72), device)


@pytest.mark.parametrize("format_name", SPECS)
def test_all_symmetric_codes_under_all_exponents(device: str, format_name: str) -> None:
    """Scales in bfloat16 with subnormals, to products that are subnormal, and rounded to the even of two neighbours."""
    packed = packed_symmetric(format_name, (256, 256))
    bits = torch.arange(packed["weight_scale"].numel()) * 0x7F80 // packed["weight_scale"].numel()
    packed["weight_scale"] = bits.to(torch.int16).view(torch.bfloat16).view_as(packed["weight_scale"]) * 2.0**-10
    assert packed["weight_scale"].isfinite().all()
    _check(format_name, packed, (256, 256), device)


@pytest.mark.parametrize("format_name", ["nvfp4", "nf4"])
def test_zero_blocks(device: str, format_name: str) -> None:
    """Codes under a scale of 0 are zeros, whatever they are."""
    packed = _random(format_name, (16, 128))
    name = "weight_scale" if format_name == "nvfp4" else "absmax"
    packed[name] = torch.zeros_like(packed[name].view(torch.uint8)).view(packed[name].dtype)
    _check(format_name, packed, (16, 128), device)


def test_wrong_arguments_are_explained() -> None:
    weight = repack("nvfp4", _random("nvfp4", (16, 64)), (16, 64))
    with pytest.raises(ValueError, match="shape"):
        dequantize(weight, torch.empty(16, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="bfloat16"):
        dequantize(weight, torch.empty(16, 64))
    with pytest.raises(ValueError, match="contiguous"):
        dequantize(weight, torch.empty(64, 16, dtype=torch.bfloat16).t())
    with pytest.raises(ValueError, match="reference"):
        dequantize(weight, torch.empty(16, 64, dtype=torch.bfloat16))
