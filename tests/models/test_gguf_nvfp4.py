"""GGUF files in NVFP4: blocks of 16 under E4M3 scales, and a factor of the whole tensor beside it. Needs gguf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from qerl_core.checks import ConfigError

gguf = pytest.importorskip("gguf", reason="extra gguf")

from qerl_bench.model.gguf.convert import converted, describe  # noqa: E402
from qerl_bench.model.gguf.weights import Dither  # noqa: E402
from tests.models import gguf_files  # noqa: E402

QUERY, FACTOR = "blk.0.attn_q", np.float32(0.0123)
MODEL = "model.layers.0.self_attn.q_proj.weight"
WIDTH = 256


def blocks_of(rows: int, scales: list[int], codes: int) -> np.ndarray:
    """(rows, bytes of a row): four scales and 32 bytes of two codes each, for 64 weights."""
    block = [*scales, *[codes] * 32]
    return np.tile(np.array(block, dtype=np.uint8), (rows, WIDTH // 64))


def write(folder: Path, raw: np.ndarray | None = None, **beside: np.ndarray) -> Path:
    """A qwen2 whose first query is in NVFP4, of codes and scales of any kind, with tensors `beside` it."""
    model = gguf_files.model_of("qwen2")
    random = np.random.default_rng(0)
    raw = random.integers(0, 256, (WIDTH, WIDTH // 64 * 36), dtype=np.uint8) if raw is None else raw
    for start in range(0, raw.shape[1], 36):
        raw[:, start : start + 4] &= 0x7F  # no sign
    named = {f"{QUERY}.{leaf}": tensor for leaf, tensor in beside.items()}
    query = (f"{QUERY}.weight", raw)
    return gguf_files.write(folder / "nv.gguf", model, extra=named, drop=[query[0]], packed={query[0]: (raw, "NVFP4")})


def weights(file: Path, folder: Path) -> torch.Tensor:
    return load_file(converted(file, None, "float32", folder / "cache") / "model.safetensors")[MODEL]


def test_values_are_codes_times_scales_times_the_factor(tmp_path: Path) -> None:
    """By hand: byte 0x7A is the codes -1 and 6; scales 0x38, 0x40, 0x08 and 0x01 are 1, 2, 2^-6 and 2^-9."""
    raw = blocks_of(WIDTH, [0x38, 0x40, 0x08, 0x01], 0x7A)
    found = weights(write(tmp_path, raw, scale=np.array([0.5], np.float32)), tmp_path)
    for number, scale in enumerate((1.0, 2.0, 2.0**-6, 2.0**-9)):
        block = found[3, 16 * number : 16 * number + 16]
        assert block.tolist() == [-1 * scale * 0.5] * 8 + [6 * scale * 0.5] * 8  # low halves of bytes first


def test_every_weight_is_the_package_s_times_the_factor(tmp_path: Path) -> None:
    file = write(tmp_path, scale=np.array([FACTOR]), input_scale=np.array([0.3], np.float32))
    raw = next(t for t in gguf.GGUFReader(file).tensors if t.name == f"{QUERY}.weight").data
    theirs = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType.NVFP4))
    found = weights(file, tmp_path)
    assert found.shape == (WIDTH, WIDTH) and torch.equal(found, theirs * FACTOR)
    assert len(theirs.unique()) > 400 and bool((theirs < 0).any())
    alone = tmp_path / "alone"
    alone.mkdir()
    assert torch.equal(weights(write(alone), alone), theirs)


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({"scale": np.array([0.0], np.float32)}, r"attn_q\.scale=0\.0, .*no number above 0"),
        ({"scale": np.array([np.nan], np.float32)}, r"attn_q\.scale=nan"),
        ({"scale": np.ones(2, np.float32)}, r"attn_q\.scale is F32 of the shape \(2,\)"),
        ({"scale": np.ones(1, np.float16)}, r"attn_q\.scale is F16"),
        ({"other": np.ones(1, np.float32)}, r"qwen2 is not known to have, such as blk\.0\.attn_q\.other"),
    ],
)
def test_what_is_no_factor_is_refused_by_name(tmp_path: Path, beside: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe(write(tmp_path, **beside), None, tmp_path)


def test_a_factor_beside_another_type_is_refused(tmp_path: Path) -> None:
    model = gguf_files.model_of("qwen2")
    extra = {"blk.0.attn_k.scale": np.ones(1, np.float32)}
    file = gguf_files.write(tmp_path / "q8.gguf", model, "Q8_0", extra=extra)
    with pytest.raises(ConfigError, match=r"not known to have, such as blk\.0\.attn_k\.scale"):
        describe(file, None, tmp_path)


def test_no_original_is_drawn_within_its_cells(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.dither is not known for NVFP4"):
        describe(write(tmp_path), Dither(0, 1.0), tmp_path)
