"""The weight formats against bytes computed by hand, bytes recorded from the reference libraries, and properties."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl_bench.quant.bf16 import BF16
from qerl_bench.quant.mxfp4 import MXFP4
from qerl_bench.quant.nf4 import NF4
from qerl_bench.quant.nvfp4 import NVFP4
from qerl_core.checks import ConfigError
from qerl_kernels import e2m1, mxfp4, nvfp4
from tests.weight_formats import FORMATS, PLAIN

NAMES = ("bf16", "nf4", "mxfp4", "mxfp8", "nvfp4")
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
NVFP4_SPEC = NVFP4(name="nvfp4", compute_dtype="bfloat16", convention="compressed-tensors", **PLAIN)
MXFP4_SPEC = MXFP4(name="mxfp4", scale_rule="even", **PLAIN)
NF4_SPEC = NF4(name="nf4", double_quant=False, backend="own", **PLAIN)
MXFP8_SPEC = FORMATS["mxfp8"]
SPECS: list[Any] = [NVFP4_SPEC, MXFP4_SPEC, NF4_SPEC, MXFP8_SPEC]
packing = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


def _weights(n: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).mul_(0.02).to(dtype)


def _restored(spec: Any, weight: torch.Tensor, tensor_amax: float | None = None) -> torch.Tensor:
    packed = spec.pack(weight, tensor_amax)
    shape = (weight.shape[0], weight.shape[1])
    return spec.operand(packed, shape, torch.float32) * spec.output_scale(packed)


def _hex(tensor: torch.Tensor) -> str:
    return bytes(tensor.view(torch.uint8).flatten().tolist()).hex()


# --- specs ------------------------------------------------------------------------------------------------------------


def test_specs_import_without_torch() -> None:
    modules = ", ".join(f"qerl_bench.quant.{name}" for name in NAMES)
    code = f"import {modules}; import sys; sys.exit('torch' in sys.modules or 'bitsandbytes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: NVFP4(name="nvfp4", compute_dtype="float64", convention="compressed-tensors", **PLAIN),
            "bfloat16, float16, float32, got 'float64'",
        ),
        (lambda: MXFP4(name="mxfp4", scale_rule="ceil", **PLAIN), "even, floor, rceil, got 'ceil'"),
        (
            lambda: NF4(name="nf4", double_quant=False, backend="marlin", **PLAIN),
            "quant.backend .* own, bitsandbytes.*'marlin'",
        ),
    ],
)
def test_bad_fields_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize(
    ("spec", "block", "bits"), list(zip(SPECS, (16, 32, 64, 32), (4.5, 4.25, 4.5, 8.25), strict=True))
)
def test_block_widths_and_bits(spec: Any, block: int, bits: float) -> None:
    spec.check_width("mlp.up_proj", 3 * block)
    with pytest.raises(ConfigError, match=f"mlp.up_proj.*blocks of {block} inputs.*width {3 * block + 8}"):
        spec.check_width("mlp.up_proj", 3 * block + 8)
    assert spec.bits_per_weight == bits
    assert spec.unsupported_reason("cpu") is None


@pytest.mark.usefixtures("no_packages")
def test_nf4_without_bitsandbytes_is_refused_in_words() -> None:
    reason = NF4_SPEC.unsupported_reason("cpu")
    assert reason is not None and "bitsandbytes" in reason
    with pytest.raises(ConfigError, match="bitsandbytes"):
        NF4_SPEC.pack(_weights(1, 64))


@packing
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(spec: Any, value: float) -> None:
    weight = _weights(2, 64)
    weight[1, 7] = value
    with pytest.raises(ConfigError, match="1 of 128 weights are NaN or infinite"):
        spec.pack(weight)


def test_weights_that_overflow_the_compute_dtype_are_refused() -> None:
    weight = torch.full((1, 16), 70000.0)
    with pytest.raises(ConfigError, match=r"16 of 16 .* as torch\.float16"):
        NVFP4(name="nvfp4", compute_dtype="float16", convention="compressed-tensors", **PLAIN).pack(weight)


def test_bf16_packs_nothing_and_fits_every_layer() -> None:
    spec = BF16(name="bf16")
    assert spec.bits_per_weight is None
    assert spec.unsupported_reason("cuda") is None
    spec.check_width("any", 7)


# --- NVFP4 ------------------------------------------------------------------------------------------------------------


def test_nvfp4_bytes_by_hand() -> None:
    # Largest 6: bf16(1/6) = 171/1024, times 2688 = 448.875, in bf16 448. Block maxima 6, 3 and 0 then give the scales
    # 448 * 6/6 = 448 (E4M3 0x7e), 448 * 3/6 = 224 (0x76) and 0, stored as 0.125 (0x20); real scales are 1 and 0.5.
    first = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, -0.1]
    second = [0.125, 0.375, 0.625, 0.875, 1.25, 1.75, 2.5, 3, -0.0, 0, 0, 0, 0, 0, 0, -2.75]
    packed = nvfp4.pack(torch.tensor([first + second + [0.0] * 16]), torch.bfloat16)
    assert packed["weight_packed"].dtype == torch.uint8
    assert _hex(packed["weight_packed"]) == "10325476a9cbed8f" + "20426476000000f0" + "00" * 8
    assert _hex(packed["weight_scale"]) == "7e7620"
    assert packed["weight_global_scale"].tolist() == [448.0]
    assert packed["weight_global_scale"].dtype == torch.float32


@pytest.mark.parametrize(
    ("amax", "dtype", "expected"),
    [
        (5.0, torch.bfloat16, 540.0),  # bf16(1/5) = 205/1024, times 2688 = 538.1; dividing once would give 536
        (5.0, torch.float16, 537.5),  # fp16(1/5) = 1638/8192 -> 537.469; spacing there 0.5
        (5.0, torch.float32, 537.6),
        (0.0, torch.bfloat16, 1.0),
        (0.0, torch.float32, 1.0),
        (0.03, torch.float16, 1.0),  # 2688 / 0.03 does not fit float16
    ],
)
def test_nvfp4_tensor_scale_is_made_by_a_rounded_reciprocal(amax: float, dtype: torch.dtype, expected: float) -> None:
    scale = nvfp4.tensor_scale(torch.tensor(amax, dtype=dtype))
    assert scale.dtype == torch.float32
    assert scale.tolist() == pytest.approx([expected], rel=1e-7)


def test_nvfp4_output_scale_is_the_fp32_reciprocal() -> None:
    spec = NVFP4_SPEC
    packed = spec.pack(torch.full((1, 16), 5.0))
    assert spec.output_scale(packed) == float(torch.tensor(1.0) / torch.tensor(540.0))


def test_nvfp4_scales_go_subnormal_under_an_outlier_and_then_to_an_eighth() -> None:
    # Largest 2688 makes the tensor scale 1, so a block's scale is its maximum over 6, here in steps of 2^-9.
    weight = torch.zeros(1, 64)
    weight[0, 0] = 2688.0
    weight[0, 16] = 6 * 3 * 2.0**-9  # subnormal scale 3 * 2^-9, byte 3
    weight[0, 32] = 6 * 2.0**-9  # the smallest scale, byte 1
    weight[0, 48] = 6 * 2.0**-11  # rounds to zero
    packed = nvfp4.pack(weight, torch.float32)
    assert packed["weight_global_scale"].tolist() == [1.0]
    assert _hex(packed["weight_scale"]) == "7e030120"
    restored = nvfp4.operand(packed["weight_packed"], packed["weight_scale"], torch.float32)
    assert restored[0, [0, 16, 32, 48]].tolist() == [2688.0, 18 * 2.0**-9, 6 * 2.0**-9, 0.0]


def test_nvfp4_shares_one_tensor_scale_when_asked() -> None:
    spec = NVFP4_SPEC
    small, large = _weights(4, 32), _weights(4, 32, seed=1) * 8
    amax = float(large.abs().amax())
    alone, shared = spec.pack(small), spec.pack(small, amax)
    assert shared["weight_global_scale"].tolist() == spec.pack(large)["weight_global_scale"].tolist()
    assert alone["weight_global_scale"].tolist() != shared["weight_global_scale"].tolist()
    assert float((_restored(spec, small, amax) - small).norm() / small.norm()) < 0.12


def test_nvfp4_compute_dtype_rounds_the_weight_first_and_changes_bytes() -> None:
    weight = _weights(64, 256, torch.float32)
    in_bf16 = NVFP4_SPEC.pack(weight)
    in_fp32 = NVFP4(name="nvfp4", compute_dtype="float32", convention="compressed-tensors", **PLAIN).pack(
        weight.bfloat16()
    )
    rounded_before = NVFP4_SPEC.pack(weight.bfloat16())
    assert all(torch.equal(in_bf16[name].view(torch.uint8), rounded_before[name].view(torch.uint8)) for name in in_bf16)
    differing = (in_bf16["weight_scale"].view(torch.uint8) != in_fp32["weight_scale"].view(torch.uint8)).float().mean()
    assert 0.002 < float(differing) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nvfp4_operand_is_exact_for_every_code_and_scale(dtype: torch.dtype) -> None:
    codes = torch.arange(16, dtype=torch.uint8).expand(256, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(256, 1)
    exact = torch.tensor(E2M1_VALUES, dtype=torch.float64) * scales.to(torch.float64)  # (256, 16)
    found = nvfp4.operand(e2m1.pack_pairs(codes), scales, dtype)
    assert found.dtype == dtype
    assert int(exact.isnan().sum()) == 2 * 16  # bytes 0x7f and 0xff are E4M3's NaN, which packing never writes
    torch.testing.assert_close(found.to(torch.float64), exact, rtol=0, atol=0, equal_nan=True)


# --- MXFP4 ------------------------------------------------------------------------------------------------------------

BELOW_175 = 1.7499998807907104  # the FP32 numbers next to the thresholds
ABOVE_15 = 1.5000001192092896


@pytest.mark.parametrize(
    ("amax", "even", "floor", "rceil"),
    [
        (1.0, 125, 125, 125),  # 1 = 4 * 2^-2
        (1.5, 125, 125, 125),  # 1.5 = 6 * 2^-2 still fits
        (ABOVE_15, 125, 125, 126),
        (BELOW_175, 125, 125, 126),
        (1.75, 126, 125, 126),
        (2.0, 126, 126, 126),
        (0.0, 0, 0, 0),
        (2.0**-126, 0, 0, 0),
        (2.0**-124, 1, 1, 1),
        (3.0e38, 252, 252, 252),  # 2^126 would decode 4 and 6 to infinity
    ],
)
def test_mxfp4_scale_bytes_by_hand(amax: float, even: int, floor: int, rceil: int) -> None:
    weight = torch.zeros(1, 32)
    weight[0, 5] = -amax
    found = {rule: mxfp4.pack(weight, rule)["weight_scale"].tolist() for rule in mxfp4.ROUND_UP}
    assert found == {"even": [[even]], "floor": [[floor]], "rceil": [[rceil]]}


def test_mxfp4_bytes_by_hand() -> None:
    # Largest 6 = 1.5 * 2^2: scale 2^(2-2) = 1, byte 127, so the weights are their own codes; then the same over 8.
    row = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, -0.1, 0.25, 0.75, -5, 5, *[0.0] * 12]
    packed = mxfp4.pack(torch.tensor([row + [value / 8 for value in row]]).bfloat16(), "even")
    assert _hex(packed["weight_packed"]) == ("10325476a9cbed8f" + "206e" + "00" * 6) * 2
    assert packed["weight_scale"].tolist() == [[127, 124]]
    assert packed["weight_scale"].dtype == torch.uint8


def test_mxfp4_floor_saturates_and_rceil_does_not() -> None:
    weight = torch.zeros(1, 32)
    weight[0, 0] = 7.9
    largest = {
        rule: float(_restored(MXFP4(name="m", scale_rule=rule, **PLAIN), weight)[0, 0]) for rule in mxfp4.ROUND_UP
    }
    assert largest == {"even": 8.0, "floor": 6.0, "rceil": 8.0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_mxfp4_operand_is_exact_for_every_code_and_scale(dtype: torch.dtype) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, 2)  # (256, 32)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1)
    power = torch.ldexp(torch.ones(256, 1, dtype=torch.float64), torch.arange(256).view(256, 1) - 127)
    power[255] = torch.nan
    exact = (torch.tensor(E2M1_VALUES, dtype=torch.float64) * power).repeat(1, 2)
    found = mxfp4.operand(e2m1.pack_pairs(codes), scales, dtype)
    torch.testing.assert_close(found, exact.to(dtype), rtol=0, atol=0, equal_nan=True)
    if dtype != torch.float16:  # whose range is too short for most scales
        usable = slice(0, 253)
        torch.testing.assert_close(found[usable].to(torch.float64), exact[usable], rtol=0, atol=0)


# --- NF4 --------------------------------------------------------------------------------------------------------------

# Normal quantiles of QLoRA (Dettmers et al. 2023, appendix E)
CODEBOOK = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]


def test_nf4_decodes_the_codebook_with_the_first_input_in_the_high_nibble() -> None:
    row = torch.tensor([CODEBOOK * 4])
    packed = NF4_SPEC.pack(torch.cat([row, 2 * row], dim=1))
    assert packed["weight"].shape == (64, 1)
    assert _hex(packed["weight"]) == "0123456789abcdef" * 8
    assert packed["absmax"].dtype == torch.float32
    assert packed["absmax"].tolist() == [1.0, 2.0]
    restored = NF4_SPEC.operand(packed, (1, 128), torch.float32)
    torch.testing.assert_close(restored, torch.cat([row, 2 * row], dim=1), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nf4_picks_the_nearest_entry_and_rounds_once(dtype: torch.dtype) -> None:
    spec, weight = NF4_SPEC, _weights(8, 128, dtype)
    packed = spec.pack(weight)
    blocks = weight.float().view(-1, 64)
    absmax = blocks.abs().amax(dim=1)
    code = torch.tensor(CODEBOOK)
    nearest = torch.bucketize(blocks * (1 / absmax).unsqueeze(1), (code[1:] + code[:-1]) / 2)
    expected = (code[nearest] * absmax.unsqueeze(1)).view(8, 128).to(dtype)
    assert packed["absmax"].tolist() == absmax.tolist()
    torch.testing.assert_close(spec.operand(packed, (8, 128), dtype), expected, rtol=0, atol=0)


def test_nf4_zero_block_stays_zero() -> None:
    spec = NF4_SPEC
    assert _restored(spec, torch.zeros(2, 64)).tolist() == torch.zeros(2, 64).tolist()


# --- all of them ------------------------------------------------------------------------------------------------------


def test_bytes_recorded_from_compressed_tensors() -> None:
    """Weights from integer arithmetic, with a zero block, a -0.0 and an outlying row, packed by version 0.20.0."""
    n = torch.arange(4 * 32)
    uniform = ((n * 2654435761) % 2**32).double() / 2**32 - 0.5
    weight = uniform.view(4, 32) * torch.tensor([[8.0], [0.05], [-1.0], [300.0]], dtype=torch.float64)
    weight[0, 16:] = 0
    weight[1, 3] = -0.0
    weight[1, 5] = -1e-7
    nv = nvfp4.pack(weight.bfloat16(), torch.bfloat16)
    assert _hex(nv["weight_packed"]) == (
        "3f6df9c5276efad40000000000000000a50f8de8c5276efad4065e7bd3964e7c"
        "692ec7e5604dafe6715c9fd6735b1ed67ce2a64f6de0b5376df9c4175efad386"
    )
    assert _hex(nv["weight_scale"]) == "54201a1a3c3c7e7e"
    assert nv["weight_global_scale"].tolist() == [18.5]
    assert _hex(nvfp4.pack(weight.float(), torch.float32)["weight_global_scale"]) == "e12d9441"  # 18.5224...
    mx = mxfp4.pack(weight.bfloat16(), "even")
    assert _hex(mx["weight_packed"]) == (
        "2e5cd8b3164de9c20000000000000000b60f8df8c5276efad4175e7bd3965f7c"
        "591ca6d4502c9ed4613b9dc5624a0db56bd1953e6cd0b4265de9c4165deac385"
    )
    assert _hex(mx["weight_scale"]) == "7f777c84"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (NF4_SPEC, 0.0085),
        (NVFP4_SPEC, 0.0090),
        (MXFP4_SPEC, 0.0126),
        (MXFP4(name="mxfp4", scale_rule="floor", **PLAIN), 0.0130),
        (MXFP4(name="mxfp4", scale_rule="rceil", **PLAIN), 0.0140),
        (MXFP8_SPEC, 0.00086),
    ],
    ids=lambda value: getattr(value, "scale_rule", getattr(value, "name", None)),
)
def test_squared_error_on_gaussian_weights(spec: Any, expected: float) -> None:
    weight = _weights(256, 1024)
    error = (_restored(spec, weight) - weight.float()).square().sum() / weight.float().square().sum()
    assert float(error) == pytest.approx(expected, rel=0.03)


@packing
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_zeros_and_huge_outliers(spec: Any, dtype: torch.dtype) -> None:
    assert _restored(spec, torch.zeros(2, 64, dtype=dtype)).tolist() == torch.zeros(2, 64).tolist()
    weight = _weights(4, 128, dtype)
    weight[2, 70] = -2000.0
    restored = _restored(spec, weight)
    assert float(restored[2, 70]) == pytest.approx(-2000.0, rel=0.15)
    assert bool(restored.isfinite().all())
    untouched = torch.cat([weight[:2], weight[3:]]).float()
    if spec.name != "nvfp4":  # whose tensor scale makes every block pay for an outlier 25000 times the maximum
        assert float((torch.cat([restored[:2], restored[3:]]) - untouched).norm() / untouched.norm()) < 0.13


shapes = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**16), st.integers(-3, 3))


@packing
@settings(derandomize=True, deadline=None, max_examples=25)
@given(shapes)
def test_tensors_have_the_promised_size_and_errors_stay_within_half_a_step(
    spec: Any, shape: tuple[int, int, int, int]
) -> None:
    n, blocks, seed, exponent = shape
    weight = _weights(n, 64 * blocks, seed=seed) * 4.0**exponent
    packed = spec.pack(weight)
    size = sum(tensor.nbytes for name, tensor in packed.items() if name != "weight_global_scale")
    assert 8 * size == spec.bits_per_weight * weight.numel()
    restored = _restored(spec, weight)
    block = {"nvfp4": 16, "mxfp4": 32, "nf4": 64, "mxfp8": 32}[spec.name]
    # The widest gap is 4 to 6 on a scale whose maximum is at least 3.5 (MXFP4) or about 6 (NVFP4), and -1 to -0.696.
    # MXFP8 is farthest off at maxima just below 512 times their scale, which become 448.
    half_gap = {"nvfp4": 1 / 5.6, "mxfp4": 1 / 3.5, "nf4": 0.152, "mxfp8": 1 / 8}[spec.name]
    error = (restored - weight.float()).view(-1, block).abs().amax(dim=1)
    assert bool((error <= half_gap * weight.float().view(-1, block).abs().amax(dim=1)).all())


@packing
@settings(derandomize=True, deadline=None, max_examples=25)
@given(shapes)
def test_packing_what_was_unpacked_changes_nothing(spec: Any, shape: tuple[int, int, int, int]) -> None:
    n, blocks, seed, exponent = shape
    if spec.name == "nvfp4":
        spec = NVFP4(
            name="nvfp4", compute_dtype="float32", convention="compressed-tensors", **PLAIN
        )  # a BF16 tensor scale moves by a step of its own
    weight = (_weights(n, 64 * blocks, seed=seed) * 4.0**exponent).float()
    once = _restored(spec, weight)
    torch.testing.assert_close(_restored(spec, once), once, rtol=1e-6, atol=0)
    again = spec.pack(once)
    twice = spec.pack(_restored(spec, once))
    scale = "absmax" if spec.name == "nf4" else "weight_scale"
    codes = "weight" if spec.name in ("nf4", "mxfp8") else "weight_packed"
    for name in (scale, codes):
        assert _hex(again[name]) == _hex(twice[name])
