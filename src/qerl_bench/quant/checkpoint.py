"""Reading checkpoint folders tensor by tensor: plain ones block by block, packed ones without unpacking anything.

Only safetensors. Every header is read first, and a file that is cut short or does not fit the model is refused with the
name of a tensor, before the caller has got anything. Tensors are copied out of the file, so that its pages do not stay
resident. Left out: checkpoints whose tensor names differ from the model's (fused experts); those are loaded whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from qerl_bench.checks import ConfigError, require
from qerl_bench.quant.base import WeightFormat
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quant.mxfp4 import MXFP4
from qerl_bench.quant.nf4 import BLOCK as NF4_BLOCK
from qerl_bench.quant.nf4 import NESTED_BLOCK, NF4
from qerl_bench.quant.nvfp4 import NVFP4

PACK_FORMATS = {"nvfp4-pack-quantized": NVFP4, "mxfp4-pack-quantized": MXFP4}  # of compressed-tensors
_STATE = ".quant_state.bitsandbytes__nf4"
_REMEDY = "download or write the checkpoint again"


class Weights:
    """The tensors of a checkpoint folder, by name. `device` is where `read` puts them."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        self.headers: dict[str, dict[str, Any]] = {}  # tensor -> its entry in the file's header
        self.files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            for name, entry in _header(path).items():
                require(name not in self.files, f"{folder}: tensor {name} stands in two files; {_REMEDY}")
                self.headers[name], self.files[name] = entry, path
        for name in self._indexed():
            require(name in self.files, f"{folder}: the index names a tensor {name} that is in no file; {_REMEDY}")

    def _indexed(self) -> list[str]:
        path = self.folder / "model.safetensors.index.json"
        if not path.is_file():
            return []
        try:
            return list(json.loads(path.read_text())["weight_map"])
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ConfigError(f"{path} is no index of tensors; {_REMEDY}") from None

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
        """Whether every parameter of `model` is here under its own name."""
        return all(name in self for name, _ in model.named_parameters())

    def fill(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        """Give the parameters `names` of a model on the meta device their values, in the dtype that they have there."""
        for name in names:
            parent, _, leaf = name.rpartition(".")
            module = model.get_submodule(parent)
            empty = getattr(module, leaf)
            if empty.is_meta:
                values = self.read(name, empty.shape).to(empty.dtype)
                setattr(module, leaf, torch.nn.Parameter(values, requires_grad=empty.requires_grad))
        model.tie_weights()  # type: ignore[operator]


def _header(path: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a safetensors file: dtype, shape and data_offsets by name, all checked against the file's size."""
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
        require(end <= size, f"{path} is cut short: tensor {name} ends at byte {end} and the file at {size}; {_REMEDY}")
    return header


def skeleton(folder: Path, dtype: torch.dtype) -> Any:
    """The model that config.json describes, its parameters on the meta device and its buffers real."""
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
    """What config.json says about packed weights, None for a plain checkpoint."""
    try:
        return json.loads((folder / "config.json").read_text()).get("quantization_config")
    except (OSError, json.JSONDecodeError):
        raise ConfigError(f"{folder} has no readable config.json; {_REMEDY}") from None


def check_format(folder: Path, wanted: WeightFormat) -> None:
    """Raise ConfigError unless the packed checkpoint in `folder` holds weights of the format `wanted`."""
    config = quantization_config(folder) or {}
    method = config.get("quant_method")
    group = next(iter(config.get("config_groups", {}).values()), {})
    if method == "compressed-tensors":
        name = config.get("format") or group.get("format")
        found = PACK_FORMATS.get(str(name))
        require(
            not group.get("input_activations"),
            f"{folder} quantizes activations too, which this harness does not; use a weight-only checkpoint (W4A16)",
        )
    else:
        name = config.get("bnb_4bit_quant_type")
        found = NF4 if method == "bitsandbytes" and config.get("load_in_4bit") and name == "nf4" else None
    require(
        found is not None,
        f"{folder} is packed as {name} by {method}; readable are {', '.join(PACK_FORMATS)} of compressed-tensors "
        "and nf4 of bitsandbytes",
    )
    assert found is not None
    require(
        isinstance(wanted, found),
        f"{folder} is packed as {name}, and the run asks for quant={wanted.name}; use quant={found.__name__.lower()}",
    )
    if isinstance(wanted, NF4):
        double = bool(config.get("bnb_4bit_use_double_quant"))
        require(
            wanted.double_quant == double,
            f"{folder} has bnb_4bit_use_double_quant={double}; use quant.double_quant={str(double).lower()}",
        )


def read_packed(folder: Path, weight_format: WeightFormat, dtype: torch.dtype, device: str) -> Any:
    """The model of a packed checkpoint: its packed layers byte for byte, everything else in `dtype`.

    Raises ConfigError, naming the tensor, if the folder is damaged or does not fit the format; nothing is returned then.
    """
    check_format(folder, weight_format)
    weights = Weights(folder, device)
    model = skeleton(folder, dtype)
    read = _read_nf4 if isinstance(weight_format, NF4) else _read_fp4
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            packed = read(weights, name, module, weight_format)
            if packed is not None:
                bias = None
                if module.bias is not None:
                    bias = weights.read(f"{name}.bias", module.bias.shape).to(dtype)
                shape = (module.out_features, module.in_features)
                model.set_submodule(name, PackedLinear(weight_format, packed, shape, bias).eval())
    weights.fill(model, [name for name, parameter in model.named_parameters() if parameter.is_meta])
    return model


def _read_fp4(
    weights: Weights, name: str, linear: torch.nn.Linear, weight_format: WeightFormat
) -> dict[str, torch.Tensor] | None:
    if f"{name}.weight_packed" not in weights:
        return None
    weight_format.check_width(name, linear.in_features)
    rows, width = linear.out_features, linear.in_features
    nvfp4 = isinstance(weight_format, NVFP4)
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "weight_packed": ((rows, width // 2), torch.uint8),
        "weight_scale": ((rows, width // weight_format.block), torch.float8_e4m3fn if nvfp4 else torch.uint8),
    }
    if nvfp4:
        wanted["weight_global_scale"] = ((1,), torch.float32)
    packed = {key: weights.read(f"{name}.{key}", shape) for key, (shape, _) in wanted.items()}
    for key, (_, dtype) in wanted.items():
        require(packed[key].dtype == dtype, f"{name}.{key} is stored as {packed[key].dtype}, not as {dtype}; {_REMEDY}")
    if nvfp4:
        scale = float(packed["weight_global_scale"])
        ok = 0 < scale < float("inf") and not bool(packed["weight_scale"].to(torch.float32).isnan().any())
        require(ok, f"{name} has a scale that is zero, infinite or not a number; {_REMEDY}")
    return packed


def _read_nf4(
    weights: Weights, name: str, linear: torch.nn.Linear, weight_format: WeightFormat
) -> dict[str, torch.Tensor] | None:
    key = f"{name}.weight"
    if key + _STATE not in weights:
        return None
    weight_format.check_width(name, linear.in_features)
    count = linear.out_features * linear.in_features
    try:
        state = json.loads(bytes(weights.read(key + _STATE).cpu().tolist()))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ConfigError(f"{weights.folder}: {key + _STATE} is not readable; {_REMEDY}") from None
    double = "nested_offset" in state
    require(
        state.get("blocksize") == NF4_BLOCK
        and tuple(state.get("shape", ())) == (linear.out_features, linear.in_features)
        and state.get("nested_blocksize", NESTED_BLOCK) == NESTED_BLOCK
        and double == getattr(weight_format, "double_quant", False),
        f"{key} is packed with {state}; readable are blocks of {NF4_BLOCK}, nested blocks of {NESTED_BLOCK}, and a "
        f"shape of ({linear.out_features}, {linear.in_features})",
    )
    packed = {
        "weight": weights.read(key, (count // 2, 1)),
        "absmax": weights.read(f"{key}.absmax", (count // NF4_BLOCK,)),
    }
    if double:
        nested = -(-(count // NF4_BLOCK) // NESTED_BLOCK)
        packed["nested_absmax"] = weights.read(f"{key}.nested_absmax", (nested,))
        packed["nested_offset"] = torch.tensor([state["nested_offset"]], device=packed["absmax"].device)
    expected = torch.uint8 if double else torch.float32
    require(
        packed["absmax"].dtype == expected, f"{key}.absmax is stored as {packed['absmax'].dtype}, not as {expected}"
    )
    return packed
