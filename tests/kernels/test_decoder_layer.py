"""The small operations of a decoding step: kernels compute what plain PyTorch does, and that what transformers does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, Qwen2RotaryEmbedding, apply_rotary_pos_emb

from qerl_kernels import decoder_layer, decoder_layer_reference, rows
from qerl_kernels.decoder_layer import PAGE


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


def _cache(pages: int, heads: int, size: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    return [_random(pages, heads, PAGE, size, dtype=dtype, device=device, seed=seed) for seed in (2, 3)]


def _tables(width: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    config = Qwen2Config(hidden_size=size, num_attention_heads=1, num_key_value_heads=1)
    cos, sin = Qwen2RotaryEmbedding(config)(torch.zeros(1), torch.arange(width)[None])
    return cos[0], sin[0]


def _int32(rows: list[list[int]], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device)


@pytest.mark.parametrize("size", [6, 16])
def test_rotate_store(device: str, size: int) -> None:
    """Rows at positions of their own, in pages in any order; nothing else in the cache changes."""
    positions = torch.tensor([9, 64, 130], device=device)
    table = _int32([[4, 1, 1], [3, 2, 1], [1, 1, 6]], device)
    for dtype in _dtypes(device):
        q, k, v = _random(3, 10 * size, dtype=dtype, device=device).split([6 * size, 2 * size, 2 * size], dim=-1)
        cos, sin = (angles.to(dtype).to(device) for angles in _tables(3 * PAGE, size))
        found, wanted = (_cache(7, 2, size, dtype, device) for _ in range(2))
        turned = decoder_layer.rotate_store(q, k, v, cos, sin, positions, table, *found)
        _close(turned, decoder_layer_reference.rotate_store(q, k, v, cos, sin, positions, table, *wanted))
        assert turned.shape == (3, 6, size)
        for one, other, old in zip(found, wanted, _cache(7, 2, size, dtype, device), strict=True):
            _close(one, other)
            assert torch.equal(one != old, other != old)


def test_the_reference_rotation_is_that_of_transformers() -> None:
    (cos, sin), (keys, values) = _tables(3 * PAGE, 16), _cache(4, 2, 16, torch.float32, "cpu")
    positions, table = torch.tensor([9, 64, 130]), _int32([[3, 0, 0], [0, 2, 0], [0, 0, 1]])
    q, k, v = (_random(3, n * 16, seed=n) for n in (6, 2, 2))
    turned = decoder_layer_reference.rotate_store(q, k, v, cos, sin, positions, table, keys, values)
    angles = cos[positions][:, None], sin[positions][:, None]
    wanted = apply_rotary_pos_emb(q.view(3, 6, 1, 16), k.view(3, 2, 1, 16), *angles)
    assert torch.allclose(turned, wanted[0][:, :, 0], atol=1e-6)
    for row, (page, slot) in enumerate([(3, 9), (2, 0), (1, 2)]):
        assert torch.allclose(keys[page, :, slot], wanted[1][row, :, 0], atol=1e-6)
        assert torch.equal(values[page, :, slot], v[row].view(2, 16))


def _paged(group: int, device: str) -> dict[str, Any]:
    """Rows with prefixes of six, one and no pages, of which some share them; 7 is a row without a request."""
    shared, members = [1, 2, 3, 4, 5, 6], decoder_layer.cluster_size(group)
    table = [[*shared, 7, 8], [*shared, 9, 10], [11, 12, 13, 0, 0, 0, 0, 0], [14, 0, 0, 0, 0, 0, 0, 0],
             [11, 15, 0, 0, 0, 0, 0, 0], [0] * 8, [*shared, 16, 0]]  # fmt: skip
    clusters = torch.full((7, members), -1, dtype=torch.int32)
    for index, who in enumerate([[6, 0, 1][:members], [4, 2][:members], *([[0], [1], [2]] if members == 1 else [])]):
        clusters[index, : len(who)] = torch.tensor(who)
    positions = torch.tensor([511, 448, 150, 63, 64, 0, 400], device=device)
    prefixes = torch.tensor([384, 384, 64, 0, 64, 0, 384], device=device)
    return {
        "table": _int32(table, device), "positions": positions, "prefixes": prefixes, "clusters": clusters.to(device),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "group", "size", "window"),
    [(2, 1, 16, None), (1, 3, 12, 1000), (2, 7, 16, None), (2, 7, 16, 70), (1, 2, 16, 300), (1, 70, 8, 100)],
)
def test_attend(device: str, heads: int, group: int, size: int, window: int | None) -> None:
    """Grouped heads, from one visible key to all, with a prefix or without; what is hidden is poison.

    Against the same in FP64, within what rounding allows: of each score and its exponential in FP32, of the weights
    and of the result in the dtype.
    """
    where = _paged(group, device)
    for dtype in _dtypes(device):
        q = 2 * _random(7, heads * group, size, dtype=dtype, device=device)
        keys, values = _cache(17, heads, size, dtype, device)
        exact = [x.double() for x in (q, keys, values)]
        wanted = decoder_layer_reference.attend(*exact, **where, scaling=0.3, window=window)
        spread = decoder_layer_reference.attend(*exact[:2], exact[2].abs(), **where, scaling=0.3, window=window)
        largest = float(q.double().abs().sum(-1).max() * keys.double().abs().max())
        bound = 2**-24 * 4 * (2 + 0.3 * largest) + (2**-7 if dtype == torch.bfloat16 else 0)
        seen = torch.zeros(17, PAGE, dtype=torch.bool)
        for row, pages in enumerate(where["table"].tolist()):
            end = int(where["positions"][row]) + 1
            for at in range(max(0, end - (window or end)), end):
                seen[pages[at // PAGE], at % PAGE] = True
        for cache in (keys, values):
            cache.transpose(1, 2)[~seen.to(device)] = torch.nan
        found = decoder_layer.attend(q, keys, values, **where, scaling=0.3, window=window)
        assert found.dtype == dtype and ((found - wanted).abs() <= bound * spread).all()
        if device == "cuda":  # where programs run in any order
            assert torch.equal(found, decoder_layer.attend(q, keys, values, **where, scaling=0.3, window=window))


def test_attention_of_a_row_does_not_depend_on_the_batch(device: str) -> None:
    """The same bits alone, among others, at another place of the batch and of its cluster, in other pages."""
    where = _paged(7, device)
    for dtype in _dtypes(device):
        q, (keys, values) = 2 * _random(7, 14, 16, dtype=dtype, device=device), _cache(17, 2, 16, dtype, device)
        together = decoder_layer.attend(q, keys, values, **where, scaling=0.3)
        order = torch.tensor([3, 1, 5, 6, 0, 2, 4], device=device)
        moved = torch.randperm(17, generator=torch.Generator().manual_seed(0)).to(device)
        clusters = where["clusters"].clone().fill_(-1)
        clusters[0, :1], clusters[3, :2], clusters[6, :2] = (
            torch.tensor(rows, dtype=torch.int32) for rows in ([4], [1, 3], [5, 6])
        )
        elsewhere = [cache[moved.argsort()] for cache in (keys, values)]
        shuffled = {name: where[name][order] for name in ("positions", "prefixes")}
        shuffled |= {"table": moved[where["table"][order].long()].int(), "clusters": clusters}
        assert torch.equal(decoder_layer.attend(q[order], *elsewhere, **shuffled, scaling=0.3), together[order])
        for row in (1, 2, 5):
            alone = {name: where[name][row : row + 1] for name in ("table", "positions", "prefixes")}
            alone["clusters"] = torch.full_like(clusters[:1], -1)
            alone["clusters"][0, 0] = 0
            found = decoder_layer.attend(q[row : row + 1], keys, values, **alone, scaling=0.3)
            assert torch.equal(found[0], together[row])


@pytest.mark.parametrize("window", [None, 3])
def test_the_reference_attention_by_hand(window: int | None) -> None:
    """Two query heads for each of two key heads, as repeating the keys for each query head computes it."""
    q, (keys, values) = _random(3, 4, 16), _cache(5, 2, 16, torch.float32, "cpu")
    table, positions = _int32([[1, 0], [4, 2], [3, 0]]), torch.tensor([6, 65, 0])
    found = decoder_layer_reference.attend(q, keys, values, table, positions, positions, None, 0.3, window)
    for row in range(3):
        end = int(positions[row]) + 1
        places = [(int(table[row, at // PAGE]), at % PAGE) for at in range(max(0, end - (window or end)), end)]
        for head in range(4):
            k, v = (torch.stack([cache[page, head // 2, slot] for page, slot in places]) for cache in (keys, values))
            wanted = (k @ q[row, head] * 0.3).softmax(0) @ v
            assert torch.allclose(found[row].view(4, 16)[head], wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"positions": torch.zeros(3, dtype=torch.int32)}, "int64"),
        ({"table": torch.zeros(2, 2, dtype=torch.int32)}, "table"),
        ({"q": torch.zeros(5, 4, 8)}, "positions"),
        ({"clusters": torch.zeros(3, 5, dtype=torch.int32)}, "clusters"),
        ({"keys": torch.zeros(2, 2, 9, 8), "values": torch.zeros(2, 2, 9, 8)}, "keys"),
        ({"values": torch.zeros(3, 2, PAGE, 6)}, "values"),
        ({}, "reference"),  # a CPU without the interpreter
    ],
)
def test_wrong_arguments_are_explained(changed: dict, message: str) -> None:
    arguments = {
        "q": torch.zeros(3, 4, 8), "keys": torch.zeros(3, 2, PAGE, 8), "values": torch.zeros(3, 2, PAGE, 8),
        "table": torch.zeros(3, 2, dtype=torch.int32), "positions": torch.zeros(3, dtype=torch.int64),
        "prefixes": torch.zeros(3, dtype=torch.int64), "clusters": None, "scaling": 1.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        decoder_layer.attend(**(arguments | changed))


def test_advance(device: str) -> None:
    """Rows that go on, end at a stop token or at the limit, ignore stop tokens, and were done before."""
    fields = {
        "token": [9] * 6, "length": [5, 6, 7, 8, 9, 0], "drawn": [1, 2, 3, 1, 1, 0], "done": [0, 0, 0, 0, 1, 1],
        "limit": [4, 9, 4, 9, 9, 0], "stops": [1, 1, 0, 0, 1, 0], "place": [3, 1, 0, 2, 4, 5], "prefix": [0] * 6,
        "key": [1] * 6,
    }  # fmt: skip
    start = torch.tensor([fields[name] for name in rows.FIELDS], device=device)
    drawn = (torch.tensor([8, 7, 5, 7, 7, 8], device=device), *torch.rand(2, 6, device=device))
    stop_ids = torch.tensor([2, 7, 4], device=device)
    for move in (rows.advance, rows.advance_reference):
        state = start.clone()
        found = torch.zeros(6, 5, dtype=torch.int64, device=device), *torch.zeros(2, 6, 5, device=device)
        move(state, drawn, stop_ids, found)
        after = dict(zip(rows.FIELDS, state.tolist(), strict=True))
        assert after | {name: fields[name] for name in ("token", "length", "drawn", "done")} == fields
        assert after["token"] == [8, 7, 5, 7, 9, 9] and after["length"] == [6, 7, 8, 9, 9, 0]
        assert after["drawn"] == [2, 3, 4, 2, 1, 0] and after["done"] == [0, 1, 1, 0, 1, 1]
        for result, one in zip(found, drawn, strict=True):
            wanted = torch.zeros_like(result)
            wanted[[3, 1, 0, 2, 4, 5], [1, 2, 3, 1, 4, 4]] = one
            assert torch.equal(result, wanted)
