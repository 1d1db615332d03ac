"""E2M1 against tables written by hand from the OCP Microscaling specification."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl_kernels import e2m1

VALUE_OF_CODE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]

# midpoint between two neighbours -> the even code of the two
TIES = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}


def _code(value: float) -> int:
    return int(e2m1.encode(torch.tensor([value]))[0])


def _next(value: float, towards: float) -> float:
    return float(torch.nextafter(torch.tensor(value), torch.tensor(towards)))


@pytest.mark.parametrize("code", range(16))
def test_every_value_encodes_to_its_own_code(code: int) -> None:
    expected = 0 if code == 8 else code  # an exact -0.0 is stored as +0
    assert _code(VALUE_OF_CODE[code]) == expected


@pytest.mark.parametrize(("tie", "even_code"), list(TIES.items()))
def test_ties_go_to_the_even_code_and_their_neighbours_to_the_nearest(tie: float, even_code: int) -> None:
    lower = list(TIES).index(tie)
    assert _code(tie) == even_code
    assert _code(-tie) == even_code + 8
    assert _code(_next(tie, 0.0)) == lower
    assert _code(_next(tie, math.inf)) == lower + 1


@pytest.mark.parametrize("value", [5.001, 6.0, 7.0, 1e30, math.inf])
def test_large_values_saturate_at_six(value: float) -> None:
    assert _code(value) == 7
    assert _code(-value) == 15


def test_small_negatives_keep_their_sign_and_negative_zero_loses_it() -> None:
    assert _code(-0.1) == 8
    assert _code(-1e-45) == 8
    assert _code(-0.0) == 0
    assert _code(0.1) == 0


def test_the_even_index_lies_in_the_low_nibble() -> None:
    codes = torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8)
    assert e2m1.pack_pairs(codes).tolist() == [[0x21, 0x8F]]
    assert e2m1.unpack_pairs(torch.tensor([[0x21, 0x8F]], dtype=torch.uint8)).tolist() == codes.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_256_bytes_decode_to_their_two_values(dtype: torch.dtype) -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    values = e2m1.decode(packed, dtype)
    expected = [v for byte in range(256) for v in (VALUE_OF_CODE[byte & 15], VALUE_OF_CODE[byte >> 4])]
    assert values.dtype == dtype
    assert values.shape == (4, 128)
    assert values.flatten().tolist() == expected
    assert values.signbit().flatten().tolist() == [math.copysign(1.0, value) < 0 for value in expected]


def test_decoding_to_another_dtype_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"not to torch\.float64"):
        e2m1.decode(torch.zeros(1, 1, dtype=torch.uint8), torch.float64)


def test_tables_made_under_inference_mode_serve_training_afterwards() -> None:
    e2m1._pair_table.cache_clear()
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    with torch.inference_mode():
        e2m1.decode(packed, torch.float32)
    leaf = torch.ones(4, 128, requires_grad=True)
    (leaf * e2m1.decode(packed, torch.float32)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.flatten().tolist()[:4] == [0.0, 0.0, 0.5, 0.0]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.floats(-8.0, 8.0, width=32), min_size=2, max_size=2))
def test_rounding_picks_a_nearest_value(values: list[float]) -> None:
    decoded = e2m1.decode(e2m1.pack_pairs(e2m1.encode(torch.tensor([values]))), torch.float32)[0].tolist()
    for value, rounded in zip(values, decoded, strict=True):
        assert abs(value - rounded) == min(abs(value - candidate) for candidate in VALUE_OF_CODE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_cover_neighbours_along_the_input_axis(dtype: torch.dtype) -> None:
    values = torch.ones(2, 4, dtype=dtype)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype)
    assert e2m1.scale_blocks_(values, scales).tolist() == [[1, 1, 2, 2], [3, 3, 4, 4]]
