"""FP8, INT8 and INT4: bytes by hand, sizes, bounds on the error, and checkpoints of compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from qerl_bench.config import build, compose
from qerl_bench.model.byte_tokenizer import byte_tokenizer
from qerl_bench.model.load import load_packed
from qerl_bench.quant.export import export
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quant.packed_config import packing_of
from qerl_core.checks import ConfigError
from qerl_kernels.symmetric import CODES, nearest, swap_sign
from tests.models import builds
from tests.weight_formats import BLOCKS, symmetric

each = pytest.mark.parametrize(("name", "block"), BLOCKS)
CONVENTIONS = ("compressed-tensors", "torchao")


def _weights(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).mul_(0.02)


def _restored(spec: Any, weight: torch.Tensor) -> torch.Tensor:
    return spec.operand(spec.pack(weight), tuple(weight.shape), torch.float32)


def test_int4_bytes_by_hand() -> None:
    # The largest is 7.5, so the scale is 1: ties go to the even code, 7.5 saturates at 7 and -7.5 becomes -8.
    row = [7.5, -7.5, 0.5, 1.5, -0.5, -1.5, 2.4, -2.6, *[0.0] * 24]
    packed = symmetric("int4", 32).pack(torch.tensor([row]))
    assert packed["weight_scale"].tolist() == [[1.0]] and packed["weight_scale"].dtype == torch.bfloat16
    codes = [7, -8, 0, 2, 0, -2, 2, -3]
    word = sum((code + 8) << (4 * place) for place, code in enumerate(codes))
    zeros = sum(8 << (4 * place) for place in range(8))
    assert [value % 2**32 for value in packed["weight_packed"][0].tolist()] == [word, zeros, zeros, zeros]


def test_int8_and_fp8_bytes_by_hand() -> None:
    packed = symmetric("int8", "row").pack(torch.tensor([[127.5, -127.5, 0.5, -1.5], [0.0, 0.0, 0.0, 0.0]]))
    assert packed["weight"].tolist() == [[127, -128, 0, -2], [0, 0, 0, 0]]
    assert packed["weight_scale"].tolist() == [[1.0], [2.0**-7]]  # of zeros: BF16's epsilon
    words = swap_sign(packed["weight"]).view(torch.int32)
    assert [value % 2**32 for value in words.flatten().tolist()] == [0x7E8000FF, 0x80808080]
    packed = symmetric("fp8", "row").pack(torch.tensor([[448.0, -1.0, 17.0, 2.0**-10]]))
    assert packed["weight"].view(torch.uint8).tolist() == [[0x7E, 0xB8, 0x58, 0x00]]  # 17 is halfway: to the even 16


def test_squares_share_a_scale_and_the_last_may_be_cut() -> None:
    weight = torch.ones(200, 256)
    weight[:128, :128], weight[128:, 128:] = 2.0, 4.0
    packed = symmetric("fp8", "128x128", "float32").pack(weight)
    assert packed["weight_scale"].shape == (2, 2)
    assert (448 * packed["weight_scale"]).tolist() == [[2.0, 1.0], [1.0, 4.0]]
    assert torch.equal(_restored(symmetric("fp8", "128x128", "float32"), weight), weight)


@each
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_sizes_are_as_promised(name: str, block: int | str, convention: str) -> None:
    for dtype in ("bfloat16", "float32"):
        spec = symmetric(name, block, dtype, convention)
        size = 8 * sum(tensor.nbytes for tensor in spec.pack(_weights(256, 4096)).values()) / (256 * 4096)
        of_rows = 32 if dtype == "float32" or (convention == "torchao" and name != "int4") else 16
        assert size == spec.bits_per_weight + (of_rows / 4096 if block == "row" else 0)


@each
@settings(derandomize=True, deadline=None, max_examples=25)
@given(shape=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**16), st.integers(-3, 3)))
def test_errors_stay_within_half_a_step(name: str, block: int | str, shape: tuple[int, int, int, int]) -> None:
    n, blocks, seed, exponent = shape
    weight = _weights(n, 128 * blocks, seed) * 4.0**exponent
    for convention in CONVENTIONS:
        spec = symmetric(name, block, "float32", convention)
        packed = spec.pack(weight)
        unit = spec.unit(packed, tuple(weight.shape)).repeat_interleave(spec.block_of(weight.shape[1]), dim=1)
        error = (spec.operand(packed, tuple(weight.shape), torch.float32) - weight).abs() / unit
        most = 0.5001 if name != "fp8" else torch.maximum(weight.abs() / unit / 16, torch.tensor(2.0**-10)) * 1.0001
        assert bool((error <= most).all())


@each
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_codes_on_the_grid_stay(name: str, block: int | str, convention: str) -> None:
    spec = symmetric(name, block, "bfloat16", convention)
    once = _restored(spec, _weights(16, 256))
    scales = spec.scales(_weights(16, 256))
    again = spec.encode(once, scales)
    assert torch.equal(spec.operand(again, (16, 256), torch.float32), once)


@pytest.mark.parametrize("name", list(CODES))
def test_the_grid_is_what_its_codes_decode_to(name: str) -> None:
    codes = CODES[name]
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float() if name == "fp8" else None
    grid = torch.arange(-codes.least, codes.most + 1) if every is None else every[every.isfinite()]
    assert torch.equal(nearest(grid, codes), grid)
    assert nearest(torch.tensor([1e4, -1e4]), codes).tolist() == [codes.most, -codes.least]


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _load(folder: Path, *words: str) -> Any:
    chosen = ["model=hub", f"model.id={folder}", "model.dtype=bfloat16", "device=cpu", *words]
    experiment = build(compose(chosen))
    parts = experiment.model, experiment.quant, experiment.quantizer, experiment.task
    return load_packed(*parts, None, "cpu")[0], experiment.quant


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builds.build("llama", tmp_path_factory.mktemp("symmetric") / "llama")


@pytest.fixture(params=["fp8", "int8", "int4"])
def packed(request: pytest.FixtureRequest, plain: Path, tmp_path: Path) -> tuple[str, Path, Any]:
    model, quant = _load(plain, f"quant={request.param}")
    export(model, byte_tokenizer(), quant, tmp_path / "out")
    return request.param, tmp_path / "out", model


def _weights_entry(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def _configure(folder: Path, entry: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": entry}
    (folder / "config.json").write_text(json.dumps(config))


def _edit(folder: Path, name: str, tensor: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    layer = next(key for key in tensors if key.endswith(name))
    tensors[layer] = tensor(tensors[layer])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _same(left: Any, right: Any) -> bool:
    layers = {name: m for name, m in left.named_modules() if isinstance(m, PackedLinear)}
    assert len(layers) > 10
    return all(torch.equal(m.dequantized(), right.get_submodule(name).dequantized()) for name, m in layers.items())


def test_scales_in_fp32_are_read_too(packed: tuple[str, Path, Any]) -> None:
    name, folder, model = packed
    _edit(folder, "weight_scale", lambda scale: scale.float())
    assert _same(model, _load(folder, f"quant={name}")[0])


def test_w8a8_integers_are_read_as_their_weights(plain: Path, tmp_path: Path) -> None:
    """`int-quantized`: a byte per code, and the inputs in 8 bits, which are left out."""
    model, quant = _load(plain, "quant=int8")
    export(model, byte_tokenizer(), quant, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for key in [key for key in tensors if key.endswith("weight_packed")]:
        tensors[key.replace("weight_packed", "weight")] = swap_sign(tensors.pop(key).view(torch.int8))
        del tensors[key.replace("weight_packed", "weight_shape")]
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    entry = _weights_entry(tmp_path / "out")
    group = entry["config_groups"]["group_0"] | {"format": "int-quantized"}
    group["input_activations"] = {"num_bits": 8, "dynamic": True, "strategy": "token"}
    _configure(tmp_path / "out", entry | {"format": "int-quantized", "config_groups": {"group_0": group}})
    assert _same(model, _load(tmp_path / "out", "quant=int8")[0])


@pytest.mark.parametrize(
    ("quant", "other", "message"),
    [
        ("int4", ("int4", 128), r"another size; use quant\.block=32"),
        ("fp8", ("fp8", "128x128"), r"another size; use quant\.block=row"),
        ("int4", ("int8", "row"), r"packed as pack-quantized, .*quant=int8; use quant=int4"),
        ("int8", ("int4", 32), r"packed as pack-quantized, .*quant=int4; use quant=int8"),
        ("int8", ("fp8", "row"), r"packed as pack-quantized, .*quant=fp8; use quant=int8"),
    ],
)
def test_another_format_or_block_is_refused_with_the_right_one(
    quant: str, other: tuple[str, Any], message: str, plain: Path, tmp_path: Path
) -> None:
    model, spec = _load(plain, f"quant={quant}")
    export(model, byte_tokenizer(), spec, tmp_path / "out")
    with pytest.raises(ConfigError, match=message):
        packing_of(tmp_path / "out", symmetric(*other))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "tensor"}, "strategy=tensor.*give the unquantized model"),
        ({"symmetric": False}, "symmetric=False.*give the unquantized model"),
        ({"actorder": "group"}, "actorder=group.*give the unquantized model"),
    ],
)
def test_what_would_change_the_weights_is_refused(
    change: dict[str, Any], message: str, packed: tuple[str, Path, Any]
) -> None:
    name, folder, _ = packed
    entry = _weights_entry(folder)
    entry["config_groups"]["group_0"]["weights"] |= change
    _configure(folder, entry)
    with pytest.raises(ConfigError, match=message):
        _load(folder, f"quant={name}")


@pytest.mark.parametrize(
    ("leaf", "change", "message"),
    [
        ("weight_scale", lambda t: t.index_fill(0, torch.tensor([0]), torch.nan), "scale or weight that is infinite"),
        ("weight_scale", lambda t: t[:-1], "weight_scale has the shape"),
        ("weight_scale", lambda t: t.to(torch.int32), "scales of integers"),
    ],
)
def test_damaged_scales_are_refused(leaf: str, change: Any, message: str, packed: tuple[str, Path, Any]) -> None:
    name, folder, _ = packed
    _edit(folder, leaf, change)
    with pytest.raises(ConfigError, match=message):
        _load(folder, f"quant={name}")
