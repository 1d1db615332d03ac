"""Which part of the next weight each program of a matmul brings to the L2 cache."""

from __future__ import annotations

import pytest
import torch

from qerl_kernels import ahead
from qerl_kernels.layout import KernelWeight, shapes


def _weight(format_name: str, shape: tuple[int, int]) -> KernelWeight:
    words, scales = shapes(format_name, shape)
    dtype = torch.bfloat16 if format_name.startswith("int4") else torch.uint8
    return KernelWeight(format_name, shape, torch.empty(words, dtype=torch.int32), torch.empty(scales, dtype=dtype), 0)


@pytest.mark.parametrize("programs", [1, 7, 252, 592])
@pytest.mark.parametrize("mib", [0, 1, 16])
@pytest.mark.parametrize("format_name", ["nvfp4", "int4-128"])
def test_programs_share_the_beginning(
    format_name: str, mib: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a small weight, as many bytes as are allowed of a large one, in whole lines and none of them twice."""
    monkeypatch.setattr(ahead, "AHEAD_BYTES", mib << 20)
    for shape in ((100, 128), (4608, 3584)):
        weight = _weight(format_name, shape)
        words, scales, *each = ahead.shares(weight, programs)
        allowed = min(weight.nbytes, mib << 20)
        assert allowed - 32 < words + scales <= allowed or allowed == 0 == words + scales
        assert words * weight.scales.nbytes == pytest.approx(scales * weight.words.nbytes, rel=1e-3, abs=1e7)
        for total, share in zip((words, scales), each, strict=True):
            assert total % 16 == 0 == share % 128 and total <= share * programs < total + 128 * programs


def test_rows_with_a_scale_have_no_scales_to_bring() -> None:
    weight = _weight("int8", (64, 256))
    assert ahead.shares(weight, 2) == (weight.words.nbytes, 0, weight.words.nbytes // 2, 0)
    assert ahead.shares(None, 2) == (0, 0, 0, 0)


def test_the_weight_behind_is_known_inside_of_the_context() -> None:
    first, second, third, last = (_weight("nvfp4", (16, 64)) for _ in range(4))
    with ahead.reading_in_order([first, second, None, third, last]):
        assert ahead.behind(first) is second and ahead.behind(third) is last
        assert ahead.behind(second) is ahead.behind(last) is None
        with ahead.reading_in_order([last, first]):
            assert ahead.behind(last) is first and ahead.behind(first) is None
        assert ahead.behind(first) is second
    assert ahead.behind(first) is None
