"""Reads checkpoint folders of safetensors, tensor by tensor, and plain ones block by block.

All headers are read first. A file that is cut short or does not fit the model is refused, with the name of a tensor,
before anything is returned. Tensors are copied out of the file, so that its pages do not stay in memory. Names that
differ from the model's, such as those of experts one by one, are converted as transformers does. The experts of gpt-oss
are published in MXFP4: they are taken as they are, or dequantized for another format.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from qerl_bench.quant.architecture import TEXT_PART, causal_lm_config, kept_in_float32, read_errors
from qerl_bench.quant.checkpoint_mapping import Source, sources_of
from qerl_bench.quant.experts import is_transposed, matrix_shape
from qerl_bench.quant.foreign_config import generation_config
from qerl_bench.quant.mxfp4 import MXFP4
from qerl_bench.quant.packed_config import quantization_config
from qerl_bench.quant.packed_share import persistent_buffers
from qerl_bench.quant.weight_files import REMEDY, indexed, weight_files
from qerl_core.checks import ConfigError, require
from qerl_core.process.out_of_memory import shortage
from qerl_kernels import mxfp4

log = logging.getLogger(__name__)

BLOCKS, SCALES = "_blocks", "_scales"  # gpt-oss: codes (E, N, K/32, 16) and scale bytes (E, N, K/32) of its experts
UNUSED = re.compile(
    r"(input|output|q|k|v)_((global_)?scale|zero_point)|[kv]_bias|inv_freq"
)  # tensors of activations and KV cache; angles that config.json gives
_FLOATS = ("BF16", "F16", "F32", "F64")


class CheckpointReader:
    """The tensors of a checkpoint folder by name; `read` puts them on `device`."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        self.headers: dict[str, dict[str, Any]] = {}  # tensor name -> its entry in the file's header
        self.files: dict[str, Path] = {}
        self.stored_names: dict[str, str] = {}  # where the file has another name
        self.sources: dict[str, Source] = {}  # tensor name of the model -> what it is made of
        for path in weight_files(folder):
            for name, entry in _header(path).items():
                require(name not in self.files, f"{folder}: tensor {name} is in two files; {REMEDY}")
                self.headers[name], self.files[name] = entry, path
        for name in indexed(folder):
            require(name in self.files, f"{folder}: the index lists the tensor {name}, which is in no file; {REMEDY}")

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def use_text_names(self) -> None:
        """Give the tensors of a multimodal checkpoint the names that its text part has alone."""
        for stored in list(self.files):
            name = stored
            for pattern, replacement in TEXT_PART.items():
                name = re.sub(pattern, replacement, name)
            if name != stored:
                self.headers[name], self.files[name] = self.headers.pop(stored), self.files.pop(stored)
                self.stored_names[name] = stored

    def require_float(self, name: str) -> None:
        """Raise ConfigError if the tensor is stored in fewer than 16 bits, which mean nothing without scales."""
        dtype = self.headers[name]["dtype"]
        require(
            dtype in _FLOATS,
            f"{self.files[name]}: tensor {name} is stored as {dtype}, and only layers in 16 or 32 bits are read beside "
            "packed ones; give the unquantized model, which is packed while it is read",
        )

    def read(self, name: str, shape: Sequence[int] | None = None) -> torch.Tensor:
        """A copy of the tensor on the device. Raises ConfigError if it is missing, unreadable or not of `shape`."""
        require(name in self.files, f"{self.folder} has no tensor {name}; it is not a checkpoint of this model")
        try:
            with safe_open(self.files[name], framework="pt") as file:
                tensor = file.get_tensor(self.stored_names.get(name, name))
        except SafetensorError as error:
            raise ConfigError(f"{self.files[name]}: tensor {name} cannot be read ({error}); {REMEDY}") from None
        if shape is not None:
            self.check_shape(name, tensor.shape, shape)
        return tensor.to(self.device, copy=True)

    def fill(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        """Load those of the parameters `names` that are on the meta device, in the dtype that they have there.

        The first call checks that the checkpoint has every parameter that `model` still lacks, and loads its buffers.
        Raises ConfigError, too, if a value is NaN or infinite there.
        """
        if not self.sources:
            self._look_at(model)
        for name in names:
            parent, _, leaf = name.rpartition(".")
            module = model.get_submodule(parent)
            empty = getattr(module, leaf)
            if empty.is_meta:
                if f"{name}{BLOCKS}" in self:
                    values = self.dequantized_experts(name, module)
                else:
                    values = self._make(model, name, empty.shape)
                values = values.to(empty.dtype)
                require_finite(self.files.get(name, self.folder), name, values)
                setattr(module, leaf, torch.nn.Parameter(values, requires_grad=empty.requires_grad))
        model.tie_weights()  # type: ignore[operator]

    def _look_at(self, model: torch.nn.Module) -> None:
        self.sources = sources_of(model, self.files)
        state = model.state_dict()
        parameters = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        buffers = persistent_buffers(model)
        wanted = [name for name in (*parameters, *buffers) if f"{name}{BLOCKS}" not in self]
        missing = [name for name in wanted if name not in self.sources]
        require(
            not missing,
            f"{self.folder} lacks {len(missing)} of the {len(wanted)} tensors of this {type(model).__name__}, such as "
            f"{', '.join(missing[:3])}; {REMEDY}, or correct config.json if it describes another model",
        )
        for name in wanted:
            source = self.sources[name]
            if name not in buffers:
                for key in (key for keys in source.keys.values() for key in keys):
                    self.require_float(key)
            if source.converter is None:
                self.check_shape(source.key, self.headers[source.key]["shape"], state[name].shape)
        if quantization_config(self.folder) is None:
            self._check_others(model, [name for name in self.sources if name not in state])
        for name, buffer in buffers.items():
            buffer.copy_(self._make(model, name, buffer.shape))

    def _check_others(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        """Name the tensors that no part of `model` takes. Raises ConfigError at one below a layer of its own, such as a
        bias or an adapter: without it the layer computes something else."""
        passed_over = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        others = [name for name in names if not any(re.search(pattern, name) for pattern in passed_over)]
        modules = dict(model.named_modules())
        layers = {path for path, module in modules.items() if path and not any(module.children())}
        for name in others:
            parts = name.split(".")
            owner = next((".".join(parts[:end]) for end in range(len(parts)) if ".".join(parts[:end]) in layers), None)
            short = _too_short(modules, parts)
            require(
                short is None,
                f"{self.folder} has the tensor {name}, and {short} of this {type(model).__name__} ends before it. "
                "Correct config.json (such as num_hidden_layers), or remove the tensor",
            )
            require(
                owner is None or UNUSED.fullmatch(parts[-1]) is not None,
                f"{self.folder} has the tensor {name}, which {owner} of this {type(model).__name__} has no place for, "
                "and may change what it computes. Correct config.json if it leaves that out (such as attention_bias), "
                "merge an adapter into its weights, or remove the tensor",
            )
        if others:
            shown = ", ".join(others[:3])
            log.warning("%s: %d tensors belong to no part of the model, such as %s", self.folder, len(others), shown)

    def _make(self, model: torch.nn.Module, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor `name` of the model. Raises ConfigError unless it has the given shape."""
        try:
            values = self.sources[name].make(name, model, self.read)
        except (RuntimeError, KeyError, ValueError) as error:  # tensors that do not fit together
            if shortage(error):
                raise
            raise ConfigError(f"{self.folder}: {name} cannot be made of its tensors ({error}); {REMEDY}") from None
        self.check_shape(name, values.shape, shape)
        return values

    def check_shape(self, name: str, shape: Sequence[int], wanted: Sequence[int]) -> None:
        """Raise ConfigError unless the tensor `name` has the shape that the model needs."""
        require(
            tuple(shape) == tuple(wanted),
            f"{self.files.get(name, self.folder)}: tensor {name} has the shape {tuple(shape)}, and the model needs "
            f"{tuple(wanted)}; config.json and the weights belong to different models",
        )

    def released_experts(self, name: str, shape: tuple[int, int, int]) -> dict[str, torch.Tensor]:
        """The experts parameter `name` as gpt-oss publishes it, in the bytes of `quant=mxfp4`; `shape` is (E, N, K)."""
        experts, n, k = shape
        blocks = self.read(f"{name}{BLOCKS}", (experts, n, k // MXFP4.block, MXFP4.block // 2))
        scales = self.read(f"{name}{SCALES}", (experts, n, k // MXFP4.block))
        for key, tensor in ((BLOCKS, blocks), (SCALES, scales)):
            stored = tensor.dtype
            require(stored == torch.uint8, f"{name}{key} is stored as {stored}, not as torch.uint8; {REMEDY}")
        return {"weight_packed": blocks.flatten(-2), "weight_scale": scales}

    def dequantized_experts(self, name: str, experts: torch.nn.Module) -> torch.Tensor:
        """The experts parameter `name` of a gpt-oss as published, in BF16, which holds every value of MXFP4."""
        packed = self.released_experts(name, matrix_shape(experts, name.rpartition(".")[2]))
        rows = {key: tensor.flatten(0, 1) for key, tensor in packed.items()}
        values = mxfp4.operand(rows["weight_packed"], rows["weight_scale"], torch.bfloat16)
        values = values.view(len(packed["weight_scale"]), -1, values.shape[1])
        return values.mT.contiguous() if is_transposed(experts) else values


def require_finite(file: str | Path, name: str, values: torch.Tensor) -> None:
    """Raise ConfigError if a value of the parameter `name`, which `file` has, is NaN or infinite in its dtype."""
    low, high = values.aminmax()  # several times faster than isfinite; NaN if any value is NaN
    if not (math.isfinite(float(low)) and math.isfinite(float(high))):
        count = values.numel() - int(values.isfinite().sum())
        raise ConfigError(
            f"{file}: {count:,} of the {values.numel():,} values of tensor {name} are NaN or infinite as "
            f"{values.dtype}; {REMEDY}, or choose a model.dtype of wider range if they overflowed"
        )


def _header(path: Path) -> dict[str, dict[str, Any]]:
    """dtype, shape and data_offsets of each tensor in a safetensors file, checked against the size of the file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ConfigError(f"{path} is cut short inside its header, before its first tensor; {REMEDY}")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            ends = {name: 8 + length + entry["data_offsets"][1] for name, entry in header.items()}
        except (ValueError, AttributeError, KeyError, TypeError, IndexError):
            raise ConfigError(f"{path} has no readable safetensors header; {REMEDY}") from None
    for name, end in ends.items():
        require(end <= size, f"{path} is cut short: tensor {name} ends at byte {end}, the file at {size}; {REMEDY}")
    return header


def skeleton(folder: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """The model that config.json describes, in `dtype` and what stays in FP32: parameters on the meta device, real
    buffers."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config = causal_lm_config(folder, None, trust_remote_code)
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    words: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    with read_errors(folder, "the model that config.json describes"), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, **words)
    if apart := _tied_but_different(folder, model):
        log.warning("%s: config.json says that %s is the embedding, and the two differ: both are kept", folder, apart)
        config.tie_word_embeddings = False
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, **words)
    if (ends := generation_config(folder)) is not None:
        model.generation_config = ends
    for path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and kept_in_float32(model, f"{path}.{name}"):
                    tensor.data = tensor.data.float()
    model.tie_weights()
    return model.eval()


def _too_short(modules: Mapping[str, torch.nn.Module], parts: Sequence[str]) -> str | None:
    """The list of blocks that ends before the one of the tensor whose name has these parts; None if none does."""
    for end, number in enumerate(parts):
        blocks = modules.get(path := ".".join(parts[:end]))
        if number.isdecimal() and isinstance(blocks, torch.nn.ModuleList) and int(number) >= len(blocks):
            return path
    return None


def _tied_but_different(folder: Path, model: Any) -> str | None:
    """A parameter that `model` takes for another, though the files have both, with other numbers; None without one."""
    tied = getattr(model, "all_tied_weights_keys", {})
    reader = CheckpointReader(folder, "cpu") if tied else None
    sources = {} if reader is None else sources_of(model, reader.files)
    for name, like in tied.items():
        both = [sources[key] for key in (name, like) if key in sources]
        if reader is not None and len(both) == 2 and not any(source.converter for source in both):
            first, second = (reader.read(source.key) for source in both)
            if not torch.equal(first, second):
                return str(name)
    return None
