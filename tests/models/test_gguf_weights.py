"""The numbers of a GGUF file and the cells of their rounding, against plain definitions; draws lie within the cells."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, dequantize, quantize

from qerl_bench.model.gguf import weights
from qerl_bench.model.gguf.header import read_header
from qerl_bench.model.gguf.weights import CODES, Dither, cell_widths, chunks, dequantized, values
from tests.models.gguf_files import random_blocks

ROWS, WIDTH = 48, 512
KINDS = [*CODES]


def written(tmp_path: Path, kind: str, seed: int = 0, name: str = "blk.0.attn_q.weight") -> tuple[Path, np.ndarray]:
    """A file of one matrix in random blocks, and the bytes."""
    raw = random_blocks(kind, ROWS, WIDTH, seed)
    path = tmp_path / f"{kind}{seed}.gguf"
    writer = GGUFWriter(path, "qwen2")
    for called in (name, "blk.0.other.weight"):
        writer.add_tensor(called, raw, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, raw


def drawn(path: Path, dither: Dither | None, name: str = "blk.0.attn_q.weight") -> np.ndarray:
    return np.concatenate(parts_of(path, dither, name))


def parts_of(path: Path, dither: Dither | None, name: str) -> list[np.ndarray]:
    header = read_header(path)
    return [dequantized(header, name, dither, rows) for rows in chunks(header.tensors[name])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_is_as_wide_as_the_step_from_a_code_to_the_next(kind: str) -> None:
    """Each code is moved by one where all others stay: its weight moves by the width of the cell."""
    raw = random_blocks(kind, 4, 256)
    widths = cell_widths(raw, kind)
    assert widths.shape == (4, 256) and (widths > 0).mean() > 0.95
    found = np.zeros_like(widths)
    flat = raw.reshape(-1)
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    low, end = CODES[kind][2:4]
    before = values(raw, kind)
    for byte in range(flat.size):
        if not low <= byte % size < end:
            continue
        for bit in (0, 4) if kind != "Q8_0" else (0,):
            moved = flat.copy()
            moved[byte] ^= 1 << bit  # the lowest bit of a code
            found = np.maximum(found, np.abs(values(moved.reshape(raw.shape), kind) - before))
    np.testing.assert_allclose(found, widths, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_was_rounded_lay_in_its_cell(kind: str) -> None:
    original = np.random.default_rng(0).normal(0, 0.05, (64, 512)).astype(np.float32)
    raw = quantize(original, GGMLQuantizationType[kind])
    inside = np.abs(original - values(raw, kind)) <= 0.502 * cell_widths(raw, kind)
    assert inside.mean() > 0.97  # the largest of a block of Q4_0 and Q5_0 may lie beyond the last code


@pytest.mark.parametrize("kind", KINDS)
def test_every_drawn_weight_lies_in_its_cell(kind: str, tmp_path: Path) -> None:
    path, raw = written(tmp_path, kind)
    center, width = dequantize(raw, GGMLQuantizationType[kind]), cell_widths(raw, kind)
    copy = drawn(path, Dither(1, 1.0))
    last_bit = 2.0**-23 * (np.abs(copy) + np.abs(center))
    assert (np.abs(copy - center) <= width / 2 + last_bit).all()
    rounded = torch.from_numpy(copy).to(torch.bfloat16).float().numpy()
    assert (np.abs(rounded - center) <= width / 2 + last_bit + np.abs(copy) * 2.0**-8).all()
    place = (copy - center)[width > 0] / width[width > 0]  # uniform over the cell
    assert abs(place.mean()) < 0.01 and abs(place.var() * 12 - 1) < 0.03
    assert np.histogram(place, bins=10, range=(-0.5, 0.5))[0].min() > 0.09 * place.size


@pytest.mark.parametrize("scale", [0.5, 2.0, 4.0])
def test_the_size_of_a_draw_is_a_variance_in_those_of_the_cell(scale: float, tmp_path: Path) -> None:
    path, raw = written(tmp_path, "Q4_K")
    center, width = drawn(path, None), cell_widths(raw, "Q4_K")
    assert np.array_equal(center, dequantize(raw, GGMLQuantizationType.Q4_K))
    one, other = (drawn(path, Dither(1, size)) - center for size in (1.0, scale))
    np.testing.assert_allclose(other, np.sqrt(scale) * one, rtol=0, atol=1e-6)
    assert abs((other[width > 0] / width[width > 0]).var() * 12 / scale - 1) < 0.03


def test_draws_depend_on_seed_and_tensor_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = written(tmp_path, "Q5_0")
    first, again = drawn(path, Dither(1, 1.0)), drawn(path, Dither(1, 1.0))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, drawn(path, Dither(2, 1.0)))
    assert not np.array_equal(first, drawn(path, Dither(1, 1.0), "blk.0.other.weight"))
    monkeypatch.setattr(weights, "CHUNK", 5 * WIDTH)
    parts = parts_of(path, Dither(1, 1.0), "blk.0.attn_q.weight")
    assert len(parts) == 10 and np.array_equal(np.concatenate(parts), first)
