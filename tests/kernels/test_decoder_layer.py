"""The small operations of a decoding step: kernels compute what plain PyTorch does, and that what transformers does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, Qwen2RotaryEmbedding, apply_rotary_pos_emb

from qerl_kernels import decoder_layer, decoder_layer_reference


def _dtypes(device: str) -> tuple[torch.dtype, ...]:
    return (torch.float32,) if device == "cpu" else (torch.float32, torch.bfloat16)


def _random(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype).to(device)


def _close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Up to the last bit of the 16 that a result has, or FP32 rounding."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    rounding = 2**-7 if found.dtype == torch.bfloat16 else 2e-6
    assert torch.allclose(found.float(), wanted.float(), rtol=rounding, atol=rounding / 4)


@pytest.mark.parametrize("width", [24, 300])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_add_norm(device: str, width: int, added: bool, unit_offset: bool) -> None:
    """With a scale more precise than the activations, as noise makes it; the sum is exact."""
    for dtype in _dtypes(device):
        x, delta = (_random(3, width, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
        weight = _random(width, device=device)
        total, normed = decoder_layer.add_norm(x, delta if added else None, weight, 1e-5, unit_offset)
        sums, wanted = decoder_layer_reference.add_norm(x, delta if added else None, weight, 1e-5, unit_offset)
        assert torch.equal(total, sums) and (total is x) == (not added)
        _close(normed, wanted)


@pytest.mark.parametrize(("kind", "unit_offset"), [(Qwen2RMSNorm, False), (Gemma3RMSNorm, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_norm_is_that_of_transformers(kind: Any, unit_offset: bool, dtype: torch.dtype) -> None:
    norm = kind(24, eps=1e-5).requires_grad_(False).to(dtype)
    norm.weight.copy_(_random(24))
    x, delta = _random(3, 24, dtype=dtype), _random(3, 24, dtype=dtype, seed=1)
    found = decoder_layer_reference.add_norm(x, delta, norm.weight, 1e-5, unit_offset)[1]
    assert torch.equal(found, norm(x + delta))


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_gated_activations(device: str, name: str) -> None:
    """Against the reference in FP64: its GELU in FP32 subtracts numbers that are almost equal."""
    kernel, reference = getattr(decoder_layer, name), getattr(decoder_layer_reference, name)
    for dtype in _dtypes(device):
        gate, up = (4 * _random(3, 1400, dtype=dtype, device=device)).split([700, 700], dim=-1)
        wanted = reference(gate.double(), up.double()).to(dtype)
        _close(kernel(gate, up), wanted)
        _close(kernel(gate.contiguous(), up), wanted)


def _cache(rows: int, heads: int, width: int, size: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    return [_random(rows, heads, width, size, dtype=dtype, device=device, seed=seed) for seed in (2, 3)]


def _tables(width: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    config = Qwen2Config(hidden_size=size, num_attention_heads=1, num_key_value_heads=1)
    cos, sin = Qwen2RotaryEmbedding(config)(torch.zeros(1), torch.arange(width)[None])
    return cos[0], sin[0]


@pytest.mark.parametrize("size", [6, 16])
def test_rotate_store(device: str, size: int) -> None:
    """Fewer rows than the cache has, each with a start of its own; nothing else in the cache changes."""
    starts, slot = torch.tensor([0, 4, 9], device=device), torch.tensor([9], device=device)
    for dtype in _dtypes(device):
        q, k, v = _random(3, 10 * size, dtype=dtype, device=device).split([6 * size, 2 * size, 2 * size], dim=-1)
        cos, sin = (table.to(dtype).to(device) for table in _tables(12, size))
        found, wanted = (_cache(4, 2, 12, size, dtype, device) for _ in range(2))
        turned = decoder_layer.rotate_store(q, k, v, cos, sin, starts, slot, *found)
        _close(turned, decoder_layer_reference.rotate_store(q, k, v, cos, sin, starts, slot, *wanted))
        assert turned.shape == (3, 6, size)
        before = _cache(4, 2, 12, size, dtype, device)
        for one, other, old in zip(found, wanted, before, strict=True):
            _close(one, other)
            assert torch.equal(one != old, other != old)


def test_the_reference_rotation_is_that_of_transformers() -> None:
    (cos, sin), (keys, values) = _tables(12, 16), _cache(3, 2, 12, 16, torch.float32, "cpu")
    starts, slot = torch.tensor([0, 4, 9]), torch.tensor([9])
    q, k, v = (_random(3, n * 16, seed=n) for n in (6, 2, 2))
    turned = decoder_layer_reference.rotate_store(q, k, v, cos, sin, starts, slot, keys, values)
    places = slot - starts
    wanted = apply_rotary_pos_emb(q.view(3, 6, 1, 16), k.view(3, 2, 1, 16), cos[places][:, None], sin[places][:, None])
    assert torch.allclose(turned, wanted[0][:, :, 0], atol=1e-6)
    assert torch.allclose(keys[:, :, 9], wanted[1][:, :, 0], atol=1e-6)
    assert torch.equal(values[:, :, 9], v.view(3, 2, 16))


@pytest.mark.parametrize(
    ("heads", "group", "width", "size", "window"),
    [
        (2, 1, 20, 16, None),
        (2, 1, 20, 16, 7),
        (1, 3, 150, 12, 1000),
        (2, 7, 300, 16, None),
        (2, 7, 300, 16, 70),
        (128, 4, 70, 8, None),
    ],
)
def test_attend(device: str, heads: int, group: int, width: int, size: int, window: int | None) -> None:
    """Grouped heads, from one visible key to all, ranges that lie in one split or none; what is hidden is poison.

    Against the same in FP64, within what rounding allows: of each score and its exponential in FP32, of the weights
    and of the result in the dtype.
    """
    if device == "cpu" and heads * group * width > 5000:
        heads = 3
    starts = torch.tensor([0, width - 2, 5], device=device)
    slot = torch.tensor([width - 2], device=device)
    for dtype in _dtypes(device):
        q = 2 * _random(3, heads * group, size, dtype=dtype, device=device)
        keys, values = _cache(4, heads, width, size, dtype, device)
        exact = [x.double() for x in (q, keys, values)]
        wanted = decoder_layer_reference.attend(*exact, starts, slot, 0.3, window)
        spread = decoder_layer_reference.attend(*exact[:2], exact[2].abs(), starts, slot, 0.3, window)
        largest = float((q[:, :, None].double().abs() @ keys[:3].double().abs().amax((1, 2))[:, None, :, None]).max())
        bound = 2**-24 * 4 * (2 + 0.3 * largest) + (2**-7 if dtype == torch.bfloat16 else 0)
        for cache in (keys, values):
            cache[:, :, width - 1 :], cache[2, :, :5], cache[1, :, : width - 2] = (torch.nan,) * 3
            cache[:, :, : max(0, width - 1 - (window or width))] = torch.nan
        found = decoder_layer.attend(q, keys, values, starts, slot, 0.3, window)
        assert found.dtype == dtype and ((found - wanted).abs() <= bound * spread).all()
        assert torch.equal(found, decoder_layer.attend(q, keys, values, starts, slot, 0.3, window))


@pytest.mark.parametrize("window", [None, 3])
def test_the_reference_attention_by_hand(window: int | None) -> None:
    """Two query heads for each of two key heads, as repeating the keys for each query head computes it."""
    q, (keys, values) = _random(3, 4, 16), _cache(3, 2, 9, 16, torch.float32, "cpu")
    starts, slot = torch.tensor([0, 2, 6]), torch.tensor([6])
    found = decoder_layer_reference.attend(q, keys, values, starts, slot, 0.3, window)
    for row, start in enumerate((0, 2, 6) if window is None else (4, 4, 6)):
        for head in range(4):
            k, v = keys[row, head // 2, start:7], values[row, head // 2, start:7]
            wanted = (k @ q[row, head] * 0.3).softmax(0) @ v
            assert torch.allclose(found[row].view(4, 16)[head], wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"starts": torch.zeros(3, dtype=torch.int32)}, "int64"),
        ({"slot": torch.zeros(2, dtype=torch.int64)}, "slot"),
        ({"q": torch.zeros(5, 4, 8)}, "starts"),
        ({"keys": torch.zeros(2, 2, 9, 8), "values": torch.zeros(2, 2, 9, 8)}, "at least 3 rows"),
        ({"values": torch.zeros(3, 2, 9, 6)}, "values"),
        ({}, "reference"),  # a CPU without the interpreter
    ],
)
def test_wrong_arguments_are_explained(changed: dict, message: str) -> None:
    arguments = {
        "q": torch.zeros(3, 4, 8), "keys": torch.zeros(3, 2, 9, 8), "values": torch.zeros(3, 2, 9, 8),
        "starts": torch.zeros(3, dtype=torch.int64), "slot": torch.zeros(1, dtype=torch.int64), "scaling": 1.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        decoder_layer.attend(**(arguments | changed))
