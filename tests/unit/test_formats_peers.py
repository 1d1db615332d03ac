"""Packed bytes against the libraries that define them: compressed-tensors and torchao. Needs the extra `peers`."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch

from qerl_bench.quant.nf4 import NF4
from qerl_kernels import e2m1, mxfp4, mxfp8, nvfp4
from qerl_kernels import symmetric as kernel
from qerl_kernels.activations import round_blocks
from tests.weight_formats import BLOCKS, PLAIN, symmetric

pytestmark = pytest.mark.peers

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _peer(name: str) -> Any:
    """The module `name`, whatever it warns about when imported, or a skipped test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(name.partition(".")[0])
        return importlib.import_module(name)


def _adversarial(dtype: torch.dtype, scale: float, seed: int) -> torch.Tensor:
    """(48, 256): Gaussian rows, and rows of zeros, of -0.0, of ties, of one outlier and of very small numbers."""
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(seed)) * scale
    weight[0] = 0
    weight[1, :64] = -0.0
    weight[2, :32] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 4) * scale
    weight[3, :32] = -weight[2, :32]
    weight[4, 3] = 1000 * scale
    weight[5] *= 2.0**-12
    weight[6, :128] = 1.75 * scale
    weight[7] = weight[7].sign() * scale
    return weight.to(dtype)


def _compress(kind: str, weight: torch.Tensor, amax: torch.Tensor) -> dict[str, torch.Tensor]:
    quantization = _peer("compressed_tensors.quantization")
    helpers = _peer("compressed_tensors.quantization.utils.helpers")
    base = _peer(f"compressed_tensors.compressors.{kind}.base")
    block = {"nvfp4": nvfp4.BLOCK, "mxfp4": mxfp4.BLOCK}[kind]
    arguments = quantization.QuantizationArgs(
        num_bits=4,
        type="float",
        symmetric=True,
        dynamic=False,
        group_size=block,
        strategy="tensor_group" if kind == "nvfp4" else "group",
        scale_dtype=torch.float8_e4m3fn if kind == "nvfp4" else torch.uint8,
    )
    state = {"weight": weight}
    if kind == "nvfp4":
        state["weight_global_scale"] = helpers.generate_gparam(-amax, amax)
    blocks = weight.unflatten(-1, (-1, block))
    low, high = blocks.amin(-1), blocks.amax(-1)
    state["weight_scale"], _ = helpers.calculate_qparams(low, high, arguments, state.get("weight_global_scale"))
    compressor = {"nvfp4": "NVFP4PackedCompressor", "mxfp4": "MXFP4PackedCompressor"}[kind]
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    return getattr(base, compressor).compress(state, scheme)


def _assert_same_bytes(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and tensor.shape == theirs[name].shape, name
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-5, 0.02, 1.0, 30.0])
def test_nvfp4_bytes_are_those_of_compressed_tensors(dtype: torch.dtype, scale: float) -> None:
    for seed in range(5):
        weight = _adversarial(dtype, scale, seed)
        for factor in (1.0, 3.0):  # 3: another matrix of its fusion group has the larger maximum
            amax = weight.abs().amax() * factor
            _assert_same_bytes(nvfp4.pack(weight, dtype, float(amax)), _compress("nvfp4", weight, amax))
        _assert_same_bytes(nvfp4.pack(weight, dtype), _compress("nvfp4", weight, weight.abs().amax()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-5, 0.02, 1.0, 30.0, 1e30])
def test_mxfp4_bytes_are_those_of_compressed_tensors(dtype: torch.dtype, scale: float) -> None:
    for seed in range(5):
        weight = _adversarial(dtype, scale, seed)
        _assert_same_bytes(mxfp4.pack(weight, "even"), _compress("mxfp4", weight, weight.abs().amax()))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_operands_are_the_codes_that_compressed_tensors_unpacks_times_their_scales(kind: str) -> None:
    """Its unpacked codes times the stored scales, before it divides by the tensor scale and rounds to BF16."""
    unpack = _peer("compressed_tensors.compressors.nvfp4.helpers").unpack_fp4_from_uint8
    weight = _adversarial(torch.bfloat16, 0.02, 0)
    packed = nvfp4.pack(weight, torch.bfloat16) if kind == "nvfp4" else mxfp4.pack(weight, "even")
    codes = unpack(packed["weight_packed"], *weight.shape, dtype=torch.float32)
    assert torch.equal(e2m1.decode(packed["weight_packed"], torch.float32), codes)
    scale = packed["weight_scale"].float() if kind == "nvfp4" else torch.exp2(packed["weight_scale"].float() - 127)
    theirs = codes * scale.repeat_interleave(weight.shape[1] // scale.shape[1], dim=1)
    operand = nvfp4.operand if kind == "nvfp4" else mxfp4.operand
    ours = operand(packed["weight_packed"], packed["weight_scale"], torch.bfloat16)
    assert torch.equal(ours.float(), theirs)


@pytest.mark.parametrize("rule", list(mxfp4.ROUND_UP))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mxfp4_bytes_are_those_of_torchao(rule: str, dtype: torch.dtype) -> None:
    mx_tensor = _peer("torchao.prototype.mx_formats.mx_tensor")
    modes = _peer("torchao.prototype.mx_formats.config").ScaleCalculationMode
    for seed in range(5):
        weight = _adversarial(dtype, 0.02, seed) + 0.0  # torchao stores -0.0 with its sign
        scale, codes = mx_tensor.to_mx(weight, torch.float4_e2m1fn_x2, mxfp4.BLOCK, modes[rule.upper()])
        ours = mxfp4.pack(weight, rule)
        assert torch.equal(ours["weight_scale"], scale.view(torch.uint8))
        assert torch.equal(ours["weight_packed"], codes.view(torch.uint8))


def _of_mxfp8(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """(48, 256) each: usual, tiny and huge weights, zeros, and neighbors of very different size."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(-105, 120, (48, 8), generator=generator).repeat_interleave(32, dim=1)
    within = torch.randint(-12, 1, (48, 256), generator=generator)
    mixed = torch.ldexp(torch.randn(48, 256, generator=generator), blocks + within)
    mixed[::3, 64:128] = 0
    plain = {f"{scale:g}": _adversarial(torch.float32, scale, 1) for scale in (1e-30, 1e-5, 0.02, 1.0, 30.0, 1e34)}
    largest = torch.full((48, 256), torch.finfo(dtype).max, dtype=dtype)
    least = torch.full((48, 256), 2.0**-118)
    weights = plain | {"zeros": torch.zeros(48, 256), "mixed": mixed, "largest": largest, "least": least}
    return {name: weight.to(dtype) for name, weight in weights.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mxfp8_bytes_are_those_of_torchao(dtype: torch.dtype) -> None:
    module = _peer("torchao.prototype.mx_formats.mx_tensor")
    floor = _peer("torchao.prototype.mx_formats.config").ScaleCalculationMode.FLOOR
    seen = set()
    for name, weight in _of_mxfp8(dtype).items():
        theirs = module.MXTensor.to_mx(weight, torch.float8_e4m3fn, mxfp8.BLOCK, floor)
        ours = mxfp8.pack(weight)
        assert torch.equal(ours["weight_scale"], theirs.scale.view(torch.uint8)), name
        assert torch.equal(ours["weight"].view(torch.uint8), theirs.qdata.view(torch.uint8)), name
        assert torch.equal(mxfp8.operand(ours, torch.float32), theirs.dequantize(torch.float32)), name
        seen |= {*ours["weight_scale"].flatten().tolist()}
    assert {0, 1, 246} <= seen and len(seen) > 180


def test_torchao_halves_mxfp8_weights_whose_scale_is_the_smallest() -> None:
    """It divides by 2^-126 where the byte, 0, means 2^-127 to itself too: its codes are those of half the weights."""
    module = _peer("torchao.prototype.mx_formats.mx_tensor")
    floor = _peer("torchao.prototype.mx_formats.config").ScaleCalculationMode.FLOOR
    weight = torch.ldexp(_adversarial(torch.bfloat16, 1.0, 0).float().clamp(-4, 4), torch.tensor(-121))
    scale, codes = module.to_mx(weight, torch.float8_e4m3fn, mxfp8.BLOCK, floor)
    ours = mxfp8.pack(weight)
    assert not bool(scale.view(torch.uint8).any()) and not bool(ours["weight_scale"].any())
    of_half = mxfp8.encode(weight / 2, {"weight_scale": ours["weight_scale"]})
    assert torch.equal(of_half["weight"].view(torch.uint8), codes.view(torch.uint8))
    theirs = module.to_dtype(codes, scale, torch.float8_e4m3fn, mxfp8.BLOCK, torch.float32)
    exact, found = weight.double(), mxfp8.operand(ours, torch.float32).double()
    assert float((found - exact).norm() / exact.norm()) < 0.03
    assert float((theirs.double() - exact / 2).norm() / exact.norm()) < 0.03


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compressed_tensors_has_our_mxfp8_but_for_its_scale_rule(dtype: torch.dtype) -> None:
    """Under our scales its codes and weights are ours; its own scales are twice as large from 1.75 x 2^k on."""
    compressor = _peer("compressed_tensors.compressors.mxfp8.base").MXFP8QuantizationCompressor
    rule = _peer("compressed_tensors.quantization.utils.mxfp_utils").generate_mx_scales
    quantization = _peer("compressed_tensors.quantization")
    weights = quantization.QuantizationArgs(
        num_bits=8, type="float", symmetric=True, strategy="group", group_size=32, scale_dtype=torch.uint8
    )
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    weight = _adversarial(dtype, 0.02, 0)
    weight[:2] = 0.01  # scales of zeros are NaN there
    ours = mxfp8.pack(weight)
    given = {"weight": weight, "weight_scale": mxfp8.unit(ours).to(dtype)}
    _assert_same_bytes(ours, compressor.compress(given, scheme))
    theirs = compressor.decompress(dict(ours), scheme)["weight"]
    assert torch.equal(mxfp8.operand(ours, torch.float32), theirs.float())
    maxima = torch.tensor([1.0, 1.5, 1.7421875, 1.75, 1.9921875]).to(dtype)
    up = rule(maxima, 8).int() - mxfp8.scales(maxima[:, None].repeat(1, 32))["weight_scale"].flatten().int()
    assert up.tolist() == [0, 0, 0, 1, 1]


def test_e2m1_rounds_as_torchao_does() -> None:
    kernels = _peer("torchao.prototype.mx_formats.kernels")
    grid = torch.arange(-(2**12), 2**12).float() / 512  # every tie and much between, in [-8, 8)
    around = torch.cat([grid, torch.nextafter(grid, torch.tensor(9.0)), torch.nextafter(grid, torch.tensor(-9.0))])
    assert torch.equal(e2m1.encode(around), kernels.f32_to_f4_unpacked(around))
    codes = e2m1.encode(around).view(-1, 2)
    assert torch.equal(e2m1.pack_pairs(codes), kernels.pack_uint4(codes))


def test_torchao_nvfp4_differs_in_about_one_per_cent_of_the_scales() -> None:
    """Two NVFP4 conventions exist: this is the distance between them, so that neither is taken for the other."""
    nvfp4_tensor = _peer("torchao.prototype.mx_formats.nvfp4_tensor")
    weight = (torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    tensor_scale = nvfp4_tensor.per_tensor_amax_to_scale(weight.abs().amax())
    scale, codes = nvfp4_tensor.nvfp4_quantize(weight, per_tensor_scale=tensor_scale)
    ours = nvfp4.pack(weight, torch.bfloat16)
    differing = (ours["weight_scale"].view(torch.uint8) != scale.view(torch.uint8)).float().mean()
    assert 0.001 < float(differing) < 0.05
    assert float((ours["weight_packed"] != codes.view(torch.uint8)).float().mean()) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1e-5, 0.02, 1.0, 30.0])
def test_nvfp4_bytes_of_the_other_convention_are_those_of_torchao(dtype: torch.dtype, scale: float) -> None:
    nvfp4_tensor = _peer("torchao.prototype.mx_formats.nvfp4_tensor")
    for seed in range(5):
        weight = _adversarial(dtype, scale, seed) + 0.0  # torchao stores -0.0 with its sign
        for factor in (1.0, 3.0):
            amax = weight.abs().amax().float() * factor
            tensor_scale = nvfp4_tensor.per_tensor_amax_to_scale(amax)
            scales, codes = nvfp4_tensor.nvfp4_quantize(weight, per_tensor_scale=tensor_scale)
            ours = nvfp4.pack(weight, torch.float32, float(amax), "torchao")
            assert torch.equal(ours["weight_scale_2"], tensor_scale.reshape(1))
            assert torch.equal(ours["weight_scale"].view(torch.uint8), scales.view(torch.uint8))
            assert torch.equal(ours["weight_packed"], codes.view(torch.uint8))


def test_torchao_decodes_its_convention_to_our_weights() -> None:
    nvfp4_tensor = _peer("torchao.prototype.mx_formats.nvfp4_tensor")
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    scale = nvfp4_tensor.per_tensor_amax_to_scale(weight.abs().amax())
    theirs = nvfp4_tensor.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale).dequantize(torch.float32)
    ours = nvfp4.pack(weight, torch.float32, None, "torchao")
    restored = nvfp4.operand(ours["weight_packed"], ours["weight_scale"], torch.float32) * ours["weight_scale_2"]
    torch.testing.assert_close(restored, theirs, rtol=3e-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("double", [False, True])
def test_nf4_bytes_are_those_of_bitsandbytes(dtype: torch.dtype, double: bool) -> None:
    functional = _peer("bitsandbytes.functional")
    spec = NF4(name="nf4", double_quant=double, backend="own", **PLAIN)
    for seed in range(5):
        for scale in (1e-4, 0.02, 30.0):
            weight = _adversarial(dtype, scale, seed)
            codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=double, quant_type="nf4")
            ours = spec.pack(weight)
            assert torch.equal(ours["weight"], codes)
            assert torch.equal(ours["absmax"], state.absmax)
            if double:
                assert torch.equal(ours["nested_absmax"], state.state2.absmax)
                assert float(ours["nested_offset"]) == float(state.offset)
            theirs = functional.dequantize_4bit(codes, state)
            assert torch.equal(spec.operand(ours, (48, 256), dtype), theirs)


# --- symmetric formats ------------------------------------------------------------------------------------------------


def _scheme(name: str, block: int | str) -> Any:
    quantization = _peer("compressed_tensors.quantization")
    size: dict[str, Any] = {"group_size": block} if isinstance(block, int) else {}
    if block == "128x128":
        size = {"block_structure": [128, 128]}
    arguments = quantization.QuantizationArgs(
        num_bits=4 if name == "int4" else 8,
        type="float" if name == "fp8" else "int",
        symmetric=True,
        dynamic=False,
        strategy={"row": "channel", "128x128": "block"}.get(str(block), "group"),
        **size,
    )
    return quantization.QuantizationScheme(targets=["Linear"], weights=arguments)


def _compressed(name: str, block: int | str, weight: torch.Tensor, in_float32: bool) -> dict[str, torch.Tensor]:
    """With scales in the dtype of the weight; `in_float32` divides in FP32, as the library's kernel for GPUs does."""
    helpers = _peer("compressed_tensors.quantization.utils.helpers")
    kind = "naive_quantized" if name == "fp8" else "pack_quantized"
    base = _peer(f"compressed_tensors.compressors.{kind}.base")
    scheme = _scheme(name, block)
    if block == "128x128":
        rows = -(-len(weight) // 128)
        padded = torch.nn.functional.pad(weight, (0, 0, 0, 128 * rows - len(weight)))
        blocks = padded.view(rows, 128, -1, 128).transpose(1, 2).flatten(2)
    else:
        blocks = weight.unflatten(-1, (-1, block if isinstance(block, int) else weight.shape[1]))
    scale, _ = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
    if in_float32:
        weight, used = weight.float(), scale.float()
    else:
        used = scale
    compressor = "FloatQuantizationCompressor" if name == "fp8" else "PackedQuantizationCompressor"
    state = getattr(base, compressor).compress({"weight": weight, "weight_scale": used}, scheme)
    return state | {"weight_scale": scale}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-3, 0.02, 30.0])
@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_symmetric_bytes_are_those_of_compressed_tensors(
    name: str, block: int | str, scale: float, dtype: torch.dtype
) -> None:
    spec = symmetric(name, block, str(dtype).removeprefix("torch."))
    for seed in range(5):
        weight = _adversarial(dtype, scale, seed)
        if dtype == torch.float16 and scale == 30.0:
            weight[4] = 0  # beyond its range
        _assert_same_bytes(spec.stored(spec.pack(weight), (48, 256)), _compressed(name, block, weight, True))
        if dtype == torch.float32:
            assert all(
                torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))
                for tensor, other in zip(
                    _compressed(name, block, weight, True).values(),
                    _compressed(name, block, weight, False).values(),
                    strict=True,
                )
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_symmetric_weights_are_those_that_compressed_tensors_restores(
    name: str, block: int | str, dtype: torch.dtype
) -> None:
    base = _peer(f"compressed_tensors.compressors.{'naive_quantized' if name == 'fp8' else 'pack_quantized'}.base")
    compressor = "FloatQuantizationCompressor" if name == "fp8" else "PackedQuantizationCompressor"
    spec, weight = symmetric(name, block, str(dtype).removeprefix("torch.")), _adversarial(dtype, 0.02, 0)
    packed = spec.pack(weight)
    theirs = getattr(base, compressor).decompress(dict(spec.stored(packed, (48, 256))), _scheme(name, block))["weight"]
    assert theirs.dtype == dtype
    assert torch.equal(spec.operand(packed, (48, 256), dtype), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_symmetric_bytes_are_those_of_torchao(name: str, block: int | str, dtype: torch.dtype) -> None:
    spec = symmetric(name, block, str(dtype).removeprefix("torch."), "torchao")
    granularity = _peer("torchao.quantization.granularity")
    workflows = "torchao.quantization.quantize_.workflows"
    for seed in range(5):
        weight = _adversarial(dtype, 0.02, seed).repeat(8, 1)[:256]
        if name == "fp8":
            weight[(weight == 0).all(1)] = 0.01  # NaN there
            kind = granularity.PerBlock([128, 128]) if block == "128x128" else granularity.PerRow()
            theirs = _peer(f"{workflows}.float8.float8_tensor").Float8Tensor.from_hp(weight, granularity=kind)
        elif name == "int8":
            kind = granularity.PerRow() if block == "row" else granularity.PerGroup(block)
            theirs = _peer(f"{workflows}.int8.int8_tensor").Int8Tensor.from_hp(weight, kind)
        else:
            module = _peer(f"{workflows}.intx.intx_unpacked_to_int8_tensor")
            theirs = module.IntxUnpackedToInt8Tensor.from_hp(weight, (1, block), torch.int4)
        packed = spec.pack(weight)
        codes = kernel.values(packed, spec.codes, torch.float32)
        assert torch.equal(codes, theirs.qdata.float())
        assert packed["weight_scale"].dtype == theirs.scale.dtype
        assert torch.equal(packed["weight_scale"], theirs.scale.view(packed["weight_scale"].shape))
        if name == "fp8":
            assert torch.equal(spec.operand(packed, (256, 256), dtype), theirs.dequantize())


# --- rounded activations ----------------------------------------------------------------------------------------------


def _activations(dtype: torch.dtype) -> torch.Tensor:
    """(32, 256): tokens of very different size, one with an outlier."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 256, generator=generator) * torch.logspace(-3, 2, 32)[:, None]
    x[7, 9] = 500.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nvfp4_activations_are_torchao_s_of_each_token(dtype: torch.dtype) -> None:
    module = _peer("torchao.prototype.mx_formats.nvfp4_tensor")
    x = _activations(dtype)
    for row, found in zip(x, round_blocks(x, "nvfp4"), strict=True):
        of_token = module.per_tensor_amax_to_scale(row.abs().max())
        theirs = module.NVFP4Tensor.to_nvfp4(row[None], per_tensor_scale=of_token)
        torch.testing.assert_close(found[None], theirs.dequantize(dtype), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mxfp4_activations_are_those_of_torchao(dtype: torch.dtype) -> None:
    module = _peer("torchao.prototype.mx_formats.mx_tensor")
    even = _peer("torchao.prototype.mx_formats.config").ScaleCalculationMode.EVEN
    x = _activations(dtype)
    theirs = module.MXTensor.to_mx(x, torch.float4_e2m1fn_x2, mxfp4.BLOCK, even)
    assert torch.equal(round_blocks(x, "mxfp4"), theirs.dequantize(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_activations_in_8_bits_are_those_of_torchao(kind: str, dtype: torch.dtype) -> None:
    row, x = _peer("torchao.quantization.granularity").PerRow(), _activations(dtype)
    workflows = "torchao.quantization.quantize_.workflows"
    if kind == "fp8":
        theirs = _peer(f"{workflows}.float8.float8_tensor").Float8Tensor.from_hp(x, granularity=row)
    else:
        theirs = _peer(f"{workflows}.int8.int8_tensor").Int8Tensor.from_hp(x, row)
    assert torch.equal(round_blocks(x, kind), theirs.dequantize())
