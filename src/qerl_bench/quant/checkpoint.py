"""Reads checkpoint folders of safetensors, tensor by tensor: plain ones block by block, packed ones as they are.

All headers are read first. A file that is cut short or does not fit the model is refused, with the name of a tensor,
before anything is returned. Tensors are copied out of the file, so that its pages do not stay in memory. Left out:
checkpoints whose tensor names differ from the model's (fused experts); those are loaded whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from qerl_bench.checks import ConfigError, require
from qerl_bench.quant.base import BlockFormat, WeightFormat
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quant.mxfp4 import MXFP4
from qerl_bench.quant.nf4 import NESTED_BLOCK, NF4
from qerl_bench.quant.nvfp4 import NVFP4

PACK_FORMATS = {"nvfp4-pack-quantized": NVFP4, "mxfp4-pack-quantized": MXFP4}  # of compressed-tensors
_STATE = ".quant_state.bitsandbytes__nf4"
_REMEDY = "download or write the checkpoint again"


class CheckpointReader:
    """The tensors of a checkpoint folder by name; `read` puts them on `device`."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        self.headers: dict[str, dict[str, Any]] = {}  # tensor name -> its entry in the file's header
        self.files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            for name, entry in _header(path).items():
                require(name not in self.files, f"{folder}: tensor {name} is in two files; {_REMEDY}")
                self.headers[name], self.files[name] = entry, path
        for name in self._names_in_index():
            require(name in self.files, f"{folder}: the index lists the tensor {name}, which is in no file; {_REMEDY}")

    def _names_in_index(self) -> list[str]:
        path = self.folder / "model.safetensors.index.json"
        if not path.is_file():
            return []
        try:
            return list(json.loads(path.read_text())["weight_map"])
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ConfigError(f"{path} is not an index of tensors; {_REMEDY}") from None

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def read(self, name: str, shape: Sequence[int] | None = None) -> torch.Tensor:
        """A copy of the tensor on the device. Raises ConfigError if it is missing, unreadable or not of `shape`."""
        require(name in self.files, f"{self.folder} has no tensor {name}; it is not a checkpoint of this model")
        try:
            with safe_open(self.files[name], framework="pt") as file:
                tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise ConfigError(f"{self.files[name]}: tensor {name} cannot be read ({error}); {_REMEDY}") from None
        require(
            shape is None or tuple(tensor.shape) == tuple(shape),
            f"{self.files[name]}: tensor {name} has the shape {tuple(tensor.shape)}, and the model needs "
            f"{tuple(shape or ())}; config.json and the weights belong to different models",
        )
        return tensor.to(self.device, copy=True)

    def covers(self, model: torch.nn.Module) -> bool:
        """Whether the checkpoint has every parameter of `model`, under the name that the model uses."""
        return all(name in self for name, _ in model.named_parameters())

    def fill(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        """Load those of the parameters `names` that are on the meta device, in the dtype that they have there."""
        for name in names:
            parent, _, leaf = name.rpartition(".")
            module = model.get_submodule(parent)
            empty = getattr(module, leaf)
            if empty.is_meta:
                values = self.read(name, empty.shape).to(empty.dtype)
                setattr(module, leaf, torch.nn.Parameter(values, requires_grad=empty.requires_grad))
        model.tie_weights()  # type: ignore[operator]


def _header(path: Path) -> dict[str, dict[str, Any]]:
    """dtype, shape and data_offsets of each tensor in a safetensors file, checked against the size of the file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ConfigError(f"{path} is cut short inside its header, before its first tensor; {_REMEDY}")
        try:
            header = json.loads(file.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ConfigError(f"{path} has no readable safetensors header; {_REMEDY}") from None
    header.pop("__metadata__", None)
    for name, entry in header.items():
        end = 8 + length + entry["data_offsets"][1]
        require(end <= size, f"{path} is cut short: tensor {name} ends at byte {end}, the file at {size}; {_REMEDY}")
    return header


def skeleton(folder: Path, dtype: torch.dtype) -> Any:
    """The model that config.json describes: parameters on the meta device, real buffers."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.tie_weights()
    return model.eval()


def quantization_config(folder: Path) -> dict[str, Any] | None:
    """`quantization_config` of config.json, None for a plain checkpoint."""
    try:
        return json.loads((folder / "config.json").read_text()).get("quantization_config")
    except (OSError, json.JSONDecodeError):
        raise ConfigError(f"{folder} has no readable config.json; {_REMEDY}") from None


def check_format(folder: Path, requested: WeightFormat) -> None:
    """Raise ConfigError unless the packed checkpoint in `folder` holds weights of the format `requested`."""
    config = quantization_config(folder) or {}
    method = config.get("quant_method")
    group = next(iter(config.get("config_groups", {}).values()), {})
    if method == "compressed-tensors":
        name = config.get("format") or group.get("format")
        stored = PACK_FORMATS.get(str(name))
        require(
            not group.get("input_activations"),
            f"{folder} quantizes activations too, which this harness does not; use a weight-only checkpoint (W4A16)",
        )
    else:
        name = config.get("bnb_4bit_quant_type")
        stored = NF4 if method == "bitsandbytes" and config.get("load_in_4bit") and name == "nf4" else None
    if stored is None:
        raise ConfigError(
            f"{folder} is packed as {name} by {method}; readable are {', '.join(PACK_FORMATS)} of compressed-tensors "
            "and nf4 of bitsandbytes"
        )
    require(
        isinstance(requested, stored),
        f"{folder} is packed as {name}, and the run asks for quant={requested.name}; "
        f"use quant={stored.__name__.lower()}",
    )
    if isinstance(requested, NF4):
        double = bool(config.get("bnb_4bit_use_double_quant"))
        require(
            requested.double_quant == double,
            f"{folder} has bnb_4bit_use_double_quant={double}; use quant.double_quant={str(double).lower()}",
        )


def read_packed(folder: Path, weight_format: WeightFormat, dtype: torch.dtype, device: str) -> Any:
    """The model of a packed checkpoint: packed layers byte for byte, everything else in `dtype`.

    Raises ConfigError, naming the tensor, if the folder is damaged or does not fit the format.
    """
    check_format(folder, weight_format)
    assert isinstance(weight_format, BlockFormat)
    reader = CheckpointReader(folder, device)
    model = skeleton(folder, dtype)
    for name, linear in list(model.named_modules()):
        if not isinstance(linear, torch.nn.Linear):
            continue
        if isinstance(weight_format, NF4):
            packed = _read_nf4(reader, name, linear, weight_format)
        else:
            packed = _read_fp4(reader, name, linear, weight_format)
        if packed is not None:
            bias = None if linear.bias is None else reader.read(f"{name}.bias", linear.bias.shape).to(dtype)
            shape = (linear.out_features, linear.in_features)
            model.set_submodule(name, PackedLinear(weight_format, packed, shape, bias).eval())
    reader.fill(model, [name for name, parameter in model.named_parameters() if parameter.is_meta])
    return model


def _read_fp4(
    reader: CheckpointReader, name: str, linear: torch.nn.Linear, weight_format: BlockFormat
) -> dict[str, torch.Tensor] | None:
    """The packed tensors of a layer in NVFP4 or MXFP4, None if it is not packed."""
    if f"{name}.weight_packed" not in reader:
        return None
    weight_format.check_width(name, linear.in_features)
    rows, width = linear.out_features, linear.in_features
    nvfp4 = isinstance(weight_format, NVFP4)
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "weight_packed": ((rows, width // 2), torch.uint8),
        "weight_scale": ((rows, width // weight_format.block), torch.float8_e4m3fn if nvfp4 else torch.uint8),
    }
    if nvfp4:
        expected["weight_global_scale"] = ((1,), torch.float32)
    packed = {}
    for key, (shape, dtype) in expected.items():
        packed[key] = reader.read(f"{name}.{key}", shape)
        require(packed[key].dtype == dtype, f"{name}.{key} is stored as {packed[key].dtype}, not as {dtype}; {_REMEDY}")
    if nvfp4:
        scale = float(packed["weight_global_scale"])
        ok = 0 < scale < float("inf") and not bool(packed["weight_scale"].to(torch.float32).isnan().any())
        require(ok, f"{name} has a scale that is zero, infinite or not a number; {_REMEDY}")
    return packed


def _read_nf4(
    reader: CheckpointReader, name: str, linear: torch.nn.Linear, weight_format: NF4
) -> dict[str, torch.Tensor] | None:
    """The packed tensors of a layer in NF4, None if it is not packed."""
    key = f"{name}.weight"
    if key + _STATE not in reader:
        return None
    weight_format.check_width(name, linear.in_features)
    shape = (linear.out_features, linear.in_features)
    try:
        state = json.loads(bytes(reader.read(key + _STATE).cpu().tolist()))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ConfigError(f"{reader.folder}: {key + _STATE} is not readable; {_REMEDY}") from None
    double = "nested_offset" in state
    require(
        state.get("blocksize") == NF4.block
        and tuple(state.get("shape", ())) == shape
        and state.get("nested_blocksize", NESTED_BLOCK) == NESTED_BLOCK
        and double == weight_format.double_quant,
        f"{key} is packed with {state}; readable are blocks of {NF4.block}, nested blocks of {NESTED_BLOCK}, and the "
        f"shape {shape}",
    )
    blocks = shape[0] * shape[1] // NF4.block
    packed = {
        "weight": reader.read(key, (shape[0] * shape[1] // 2, 1)),
        "absmax": reader.read(f"{key}.absmax", (blocks,)),
    }
    if double:
        packed["nested_absmax"] = reader.read(f"{key}.nested_absmax", (-(-blocks // NESTED_BLOCK),))
        packed["nested_offset"] = torch.tensor([state["nested_offset"]], device=packed["absmax"].device)
    dtype = torch.uint8 if double else torch.float32
    require(packed["absmax"].dtype == dtype, f"{key}.absmax is stored as {packed['absmax'].dtype}, not as {dtype}")
    return packed
