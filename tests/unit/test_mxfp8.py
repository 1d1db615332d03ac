"""MXFP8: bytes by hand, every code under every scale, the ends of E8M0, checkpoints, and quantizers in runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl_bench.config import build, compose
from qerl_bench.model.byte_tokenizer import byte_tokenizer
from qerl_bench.model.load import load_packed
from qerl_bench.quant.export import export
from qerl_bench.quant.packed_config import packing_of
from qerl_core.checks import ConfigError
from qerl_kernels import mxfp8
from tests.models import builds
from tests.short_runs import steps_of
from tests.weight_formats import FORMATS, symmetric

SPEC: Any = FORMATS["mxfp8"]
LARGEST = torch.finfo(torch.float32).max


def _block(*values: float) -> torch.Tensor:
    """(1, 32): `values`, then zeros."""
    return torch.nn.functional.pad(torch.tensor([values]), (0, 32 - len(values)))


def _codes(packed: dict[str, torch.Tensor]) -> str:
    return bytes(packed["weight"].view(torch.uint8).flatten().tolist()).hex()


def _exact(packed: dict[str, torch.Tensor]) -> torch.Tensor:
    """code x 2^(byte - 127), FP64 (N, K)."""
    powers = torch.exp2(packed["weight_scale"].double() - 127)
    return packed["weight"].double() * powers.repeat_interleave(32, dim=1)


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (1.0, 119),  # 1 = 256 * 2^-8
        (1.75, 119),  # 448 * 2^-8
        (1.9999, 119),  # saturates
        (2.0, 120),
        (256.0, 127),
        (2.0**-118, 1),
        (2.0**-119, 0),  # 256 * 2^-127, the smallest scale
        (2.0**-120, 0),  # would need 2^-128, which E8M0 lacks
        (2.0**-149, 0),
        (0.0, 0),
        (LARGEST, 246),
    ],
)
def test_scale_bytes_by_hand(amax: float, byte: int) -> None:
    scale = mxfp8.pack(_block(0.0, -amax))["weight_scale"]
    assert scale.tolist() == [[byte]] and scale.dtype == torch.uint8


def test_codes_by_hand() -> None:
    # The largest, 500, has the scale 1: ties go to the even code, 500 saturates at 448, and -0.0 keeps its sign.
    row = [500.0, -448.0, 256.0, 1.0, -1.0, 17.0, 19.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, -(2.0**-11), -0.0]
    packed = mxfp8.pack(torch.cat([_block(*row), _block(*row) / 8], dim=1))
    assert packed["weight"].dtype == torch.float8_e4m3fn
    assert _codes(packed) == ("7efe7838b8585a0100028080" + "00" * 20) * 2
    assert packed["weight_scale"].tolist() == [[127, 124]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_code_under_every_scale(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(255, 1)
    packed = {"weight": codes, "weight_scale": torch.arange(255, dtype=torch.uint8).view(-1, 1).repeat(1, 8)}
    exact, found = _exact(packed), mxfp8.operand(packed, dtype)
    assert torch.equal(found.nan_to_num(), exact.float().to(dtype).nan_to_num())
    assert torch.equal(found.isnan(), exact.isnan()) and int(exact.isnan().sum()) == 2 * 255
    if dtype != torch.float16:
        held = (exact.abs() >= (2.0**-130 if dtype == torch.bfloat16 else 0)) & (exact.abs() <= 448 * 2.0**119)
        assert torch.equal(found.double()[held], exact[held]) and bool(held[:247, 1:127].float().mean() > 0.97)


def test_byte_255_is_nan() -> None:
    packed = {"weight": torch.ones(1, 32).to(torch.float8_e4m3fn), "weight_scale": torch.tensor([[255]]).byte()}
    assert bool(mxfp8.operand(packed, torch.float32).isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_below_the_smallest_scale_codes_become_smaller_and_at_the_other_end_they_saturate(dtype: torch.dtype) -> None:
    grid = torch.tensor([1.0, 1.125, 1.75, -1.875, 0.0]).to(dtype)
    for power in range(-130 if dtype == torch.bfloat16 else -133, -119):  # -133: code 2^-6, the smallest normal one
        packed = mxfp8.pack(_block(*(grid.double() * 2.0**power).tolist()).to(dtype))
        assert packed["weight_scale"].item() == 0
        restored = mxfp8.operand(packed, torch.float32)[0, :5].double()
        wanted = torch.tensor([1.0, 1.125, 1.75, -1.875, 0.0], dtype=torch.float64) * 2.0**power
        assert torch.equal(restored, wanted)
    assert mxfp8.operand(mxfp8.pack(_block(2.0**-136, 2.0**-137, 3 * 2.0**-138)), torch.float32)[0, :3].tolist() == [
        2.0**-136,  # the smallest number there is
        0.0,  # a tie, to the even code
        2.0**-136,
    ]
    most = torch.tensor([[torch.finfo(dtype).max, -torch.finfo(dtype).max, *[0.0] * 30]]).to(dtype)
    restored = mxfp8.operand(mxfp8.pack(most), dtype)
    assert restored[0, :2].double().tolist() == [448 * 2.0**119, -448 * 2.0**119]


def test_multipliers_beyond_the_largest_number_stay_finite() -> None:
    weight = _block(LARGEST, 1e38)
    packed = SPEC.encode(weight, SPEC.scales(weight, stretch=4.0))
    assert packed["weight_scale"].item() == 246
    assert bool(SPEC.operand(packed, (1, 32), torch.float32).isfinite().all())


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _load(folder: Path) -> Any:
    experiment = build(
        compose(["model=hub", f"model.id={folder}", "model.dtype=bfloat16", "device=cpu", "quant=mxfp8"])
    )
    parts = experiment.model, experiment.quant, experiment.quantizer, experiment.task
    return load_packed(*parts, None, "cpu")[0]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp8")
    export(_load(builds.build("llama", folder / "llama")), byte_tokenizer(), SPEC, folder / "out")
    return folder / "out"


@pytest.fixture
def copied(stored: Path, tmp_path: Path) -> Path:
    for file in stored.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_an_export_says_what_compressed_tensors_calls_it(copied: Path) -> None:
    entry = json.loads((copied / "config.json").read_text())["quantization_config"]
    weights = entry["config_groups"]["group_0"]["weights"]
    assert entry["format"] == "mxfp8-quantized" and weights["group_size"] == 32 and weights["num_bits"] == 8
    with pytest.raises(ConfigError, match=r"packed as mxfp8-quantized, .*quant=fp8; use quant=mxfp8"):
        packing_of(copied, symmetric("fp8", "row"))
    weights["group_size"] = 64
    config = json.loads((copied / "config.json").read_text()) | {"quantization_config": entry}
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"group_size=64.*give the unquantized model"):
        _load(copied)


@pytest.mark.parametrize(
    ("leaf", "change", "message"),
    [
        ("weight_scale", lambda t: t.index_fill(0, torch.tensor([0]), 255), "infinite or not a number"),
        ("weight_scale", lambda t: t.index_fill(0, torch.tensor([0]), 254), "infinite or not a number"),
        ("weight_scale", lambda t: t.float(), "weight_scale is stored as torch.float32, not as torch.uint8"),
        ("weight_scale", lambda t: t[:-1], "weight_scale has the shape"),
        ("weight", lambda t: t.view(torch.uint8).fill_(0x7F).view(t.dtype), "infinite or not a number"),
    ],
)
def test_damaged_tensors_are_refused(leaf: str, change: Any, message: str, copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    name = next(key for key in tensors if key.endswith(f"down_proj.{leaf}"))
    tensors[name] = change(tensors[name])
    save_file(tensors, copied / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=f"down_proj.*{message}"):
        _load(copied)


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantizer", ["rtn", "mse", "gptq", "awq"])
def test_it_trains_under_every_quantizer(
    quantizer: str, make_config: Callable[..., Any], tmp_path: Path, no_figures: None
) -> None:
    words = ("quant=mxfp8", f"quantizer={quantizer}", "model.hidden_size=64", "steps=2", "aqn=constant")
    if quantizer in ("gptq", "awq"):
        (tmp_path / "text.txt").write_text("12 + 30 = 42. " * 400)
        words += (f"quantizer.calibration.file={tmp_path / 'text.txt'}", "quantizer.calibration.samples=2")
    records = steps_of(make_config, tmp_path, "run", "eval=none", "task=even_characters", *words)
    assert len(records) == 2
    for record in records:
        assert record["packed_share"] == 1.0 and record["grad_norm"] > 0 and record["mismatch/kernel_kl"] < 1e-3
