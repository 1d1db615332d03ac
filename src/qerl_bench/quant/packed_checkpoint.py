"""Reads checkpoints that are packed already, byte for byte: those of compressed-tensors, ModelOpt and bitsandbytes, and
of gpt-oss, DeepSeek and Qwen.

All names are looked at before the first layer is read. Scales of activations and of the KV cache are left out, and so
are modules that the model lacks as a whole, such as a vision tower; one line of the log names them. Any other tensor in
a block is refused, since it may change what the block computes. Layers that the checkpoint leaves in 16 bits stay so.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from qerl_bench.quant.base import BlockFormat, WeightFormat
from qerl_bench.quant.checkpoint import BLOCKS, SCALES, UNUSED, CheckpointReader, skeleton
from qerl_bench.quant.checkpoint_mapping import rows_in_checkpoint, sources_of
from qerl_bench.quant.experts import expert_modules, expert_parameters, is_transposed, matrix_shape, pack_experts
from qerl_bench.quant.foreign import BITSANDBYTES, MODELOPT, SQUARES
from qerl_bench.quant.linear import TENSOR_SCALES, PackedLinear
from qerl_bench.quant.matrices import PackedMatrices
from qerl_bench.quant.nf4 import NF4
from qerl_bench.quant.nf4_checkpoint import NF4_PARTS, STATE, UNPACKED, read_nf4
from qerl_bench.quant.packed_config import foreign_of, packing_of
from qerl_bench.quant.packed_share import is_linear
from qerl_bench.quant.weight_files import REMEDY
from qerl_core.checks import require

log = logging.getLogger(__name__)


def read_packed(
    folder: Path, weight_format: WeightFormat, dtype: torch.dtype, device: str, trust_remote_code: bool = False
) -> Any:
    """The model of a packed checkpoint: packed layers byte for byte, everything else in `dtype`.

    Raises ConfigError, naming the tensor, if the folder is damaged or does not fit the format.
    """
    packing = packing_of(folder, weight_format)
    assert isinstance(weight_format, BlockFormat)
    reader = CheckpointReader(folder, device)
    reader.use_text_names()
    model = skeleton(folder, dtype, trust_remote_code)
    source = _PackedSource(reader, weight_format, packing.method)
    experts_layers = _experts_layers(reader, model)
    if unused := [*packing.unused, *source.check_names(model, experts_layers)]:
        log.warning("%s: only its weights are used. Left out: %s", folder, ", ".join(unused))
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    require(
        not source.is_packed(head),
        f"{folder} has a packed head, {head}, and the loss needs one in 16 bits; give a checkpoint whose head is not "
        "packed, or the unquantized model",
    )
    for name, linear in list(model.named_modules()):
        if is_linear(linear) and source.is_packed(name):
            shape = (linear.out_features, linear.in_features)
            packed = source.read(name, shape)
            bias = None if linear.bias is None else reader.read(f"{name}.bias", linear.bias.shape).to(dtype)
            model.set_submodule(name, PackedLinear(weight_format, packed, shape, bias).eval())
    for path, experts in expert_modules(model).items():
        for leaf in expert_parameters(experts):
            name, shape = f"{path}.{leaf}", matrix_shape(experts, leaf)
            packed = _read_experts(source, name, shape, experts_layers.get(name, {}))
            if packed is not None:
                pack_experts(experts, {leaf: PackedMatrices(weight_format, packed, shape, is_transposed(experts))})
    reader.fill(model, [name for name, parameter in model.named_parameters() if parameter.is_meta])
    return model


def _experts_layers(reader: CheckpointReader, model: Any) -> dict[str, dict[str, torch.Tensor]]:
    """The linear layers in the checkpoint, each with its rows (n,), by the experts parameter that they make up."""
    shapes = {
        f"{path}.{leaf}": matrix_shape(experts, leaf)
        for path, experts in expert_modules(model).items()
        for leaf in expert_parameters(experts)
    }
    split = {name: shape for name, shape in shapes.items() if f"{name}{BLOCKS}" not in reader}
    return {name: rows_in_checkpoint(model, name, shape[:2]) for name, shape in split.items()}


@dataclass(frozen=True)
class _PackedSource:
    """The packed layers of a checkpoint. `method` is quant_method, which decides the names of their tensors."""

    reader: CheckpointReader
    weight_format: BlockFormat
    method: str

    @cached_property
    def stored_names(self) -> dict[str, str]:
        """The name in the checkpoint by the name here; `weight` holds codes if its dtype is `Foreign.codes`."""
        if self.method == MODELOPT:
            return {"weight_packed": "weight", "weight_scale": "weight_scale", "weight_scale_2": "weight_scale_2"}
        if self.method == SQUARES:
            return {"weight": "weight", "weight_scale": "weight_scale_inv"}  # a multiplier, whatever it is called
        names = {name: name for name in foreign_of(self.weight_format).leaves}
        if "weight" in names and any(name.endswith(".weight_packed") for name in self.reader.files):
            names["weight"] = "weight_packed"
        return names

    def is_packed(self, layer: str) -> bool:
        if self.method == BITSANDBYTES:
            return f"{layer}.weight{STATE}" in self.reader
        leaf = next(iter(self.stored_names.values()))
        codes = f"{layer}.{leaf}"
        return codes in self.reader and (
            leaf != "weight" or self.reader.headers[codes]["dtype"] == foreign_of(self.weight_format).codes
        )

    def check_names(self, model: Any, experts_layers: Mapping[str, Mapping[str, torch.Tensor]]) -> list[str]:
        """How many tensors of which name, or of which module that `model` lacks, are unused.

        Raises ConfigError at one in a layer or block of `model` that is not known to have it.
        """
        own = {name: {*module._parameters, *module._buffers} for name, module in model.named_modules()}
        own |= {layer: {"weight"} for rows_of_layer in experts_layers.values() for layer in rows_of_layer}
        unused: Counter[str] = Counter()
        blocks = tuple(
            f"{name}.{number}."
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.ModuleList)
            for number in range(len(module))
        )
        known_parts = {name for name in self.reader.files if self._is_part(name, own)}
        foreign = [name for name in sorted(self.reader.files) if name.rpartition(".")[0] not in own]
        foreign = [name for name in foreign if name not in known_parts]
        for there, source in sources_of(model, foreign).items():
            if there != source.name or there.rpartition(".")[0] in own:
                continue  # counted already, or known to transformers by another name
            for name in (name for names in source.keys.values() for name in names):
                leaf = name.rpartition(".")[2]
                if UNUSED.fullmatch(leaf):
                    unused[leaf] += 1
                    continue
                require(
                    not there.startswith(blocks),
                    f"{self.reader.files[name]}: tensor {name} belongs to no layer of this {type(model).__name__}, and "
                    f"may change what its block computes; {UNPACKED}",
                )
                parts = there.split(".")
                outside = (".".join(parts[: end + 1]) for end in range(len(parts)))
                unused[f"of {next(module for module in outside if module not in own)}"] += 1
        for name in sorted(self.reader.files.keys() - set(foreign) - known_parts):
            owner, _, leaf = name.rpartition(".")
            if leaf in own[owner] and not self.is_packed(owner):
                if leaf == "weight":
                    self.reader.require_float(name)
                continue
            if UNUSED.fullmatch(leaf):
                unused[leaf] += 1
                continue
            stored = {*self.stored_names.values(), "weight_shape"}
            packed = {"weight"} if self.method == BITSANDBYTES else stored
            known = {*packed, "bias"} if self.is_packed(owner) else own[owner]
            require(
                leaf in known,
                f"{self.reader.files[name]}: tensor {name} is nothing that {owner} is known to have, and may change "
                f"what it computes; {UNPACKED}",
            )
        return [f"{count} tensors {leaf}" for leaf, count in unused.items()]

    def _is_part(self, name: str, own: Mapping[str, set[str]]) -> bool:
        """Whether `name` is a part of a packed weight, in NF4 or of gpt-oss's experts, and begins with its name."""
        weight, _, part = name.partition(".weight.")
        if part in NF4_PARTS and self.method == BITSANDBYTES:
            return self.is_packed(weight)
        owner, _, leaf = name.rpartition(".")
        return any(leaf.removesuffix(end) in own.get(owner, ()) for end in (BLOCKS, SCALES) if leaf.endswith(end))

    def read(self, layer: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        """The packed tensors of a layer of `shape` (N, K), by their names here."""
        self.weight_format.check_width(layer, shape[1])
        if isinstance(self.weight_format, NF4):
            return read_nf4(self.reader, layer, shape, self.weight_format)
        parts = self.weight_format.parts(shape, in_words=self.stored_names.get("weight") == "weight_packed")
        tensors = {}
        for name, stored in self.stored_names.items():
            tensor, part = self.reader.read(f"{layer}.{stored}"), parts[name]
            tensors[name] = tensor.reshape(1) if tensor.dim() == 0 else tensor  # ModelOpt's tensor scale is a scalar
            self.reader.check_shape(f"{layer}.{stored}", tensors[name].shape, part.shape)
            require(
                part.dtype in (None, tensor.dtype),
                f"{layer}.{stored} is stored as {tensor.dtype}, not as {part.dtype}; {REMEDY}",
            )
        return self.weight_format.restored(layer, tensors)


def _read_experts(
    source: _PackedSource, name: str, shape: tuple[int, int, int], layers: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor] | None:
    """The packed tensors (E, ...) of the experts parameter `name`, None if it is not packed."""
    if f"{name}{BLOCKS}" in source.reader:
        source.weight_format.check_width(name, shape[2])
        return source.reader.released_experts(name, shape)
    packed = [layer for layer in layers if source.is_packed(layer)]
    if not packed:
        return None
    rows = source.weight_format.block_rows
    whole = all(_is_run(of_layer, rows) for of_layer in layers.values())
    require(
        rows == 1 or whole,
        f"{source.reader.folder}: the layers of {name} have scales for squares of {rows} rows, which cross from one "
        f"matrix of an expert into the next; {UNPACKED}",
    )
    plain = next((layer for layer in layers if layer not in packed), None)
    require(plain is None, f"{source.reader.folder}: {plain} is not packed, unlike other experts; {REMEDY}")
    parts = [(rows, source.read(layer, (len(rows), shape[2]))) for layer, rows in layers.items()]
    return _joined(source.reader.folder, name, parts, shape)


def _is_run(rows: torch.Tensor, size: int) -> bool:
    """Whether `rows` (n,) follow each other, and pieces of `size` rows begin and end with them."""
    first = int(rows[0])
    return first % size == 0 and len(rows) % size == 0 and torch.equal(rows, torch.arange(first, first + len(rows)))


def _joined(
    folder: Path, name: str, parts: list[tuple[torch.Tensor, dict[str, torch.Tensor]]], shape: tuple[int, int, int]
) -> dict[str, torch.Tensor]:
    """The packed tensors (E, ...) of an experts parameter from those of its layers, each with its rows (n,)."""
    joined = {}
    for key, like in parts[0][1].items():
        if key in TENSOR_SCALES:  # one for each expert, which its layers share
            joined[key] = torch.stack([like] * shape[0])
            for rows, part in parts:
                joined[key][int(rows[0]) // shape[1]] = part[key]
            shared = all(torch.equal(joined[key][int(rows[0]) // shape[1]], part[key]) for rows, part in parts)
            require(
                shared,
                f"{folder}: the layers of an expert in {name} have different tensor scales, which one matrix cannot "
                "keep; give the unquantized model, which is packed with one",
            )
        else:
            rows_of_each = len(parts[0][0]) // len(like)  # 1, or those of a square
            flat = like.new_empty(shape[0] * shape[1] // rows_of_each, like.shape[1]).view(torch.uint8)
            for rows, part in parts:
                flat[rows[::rows_of_each].to(flat.device) // rows_of_each] = part[key].view(torch.uint8)
            joined[key] = flat.view(like.dtype).unflatten(0, (shape[0], -1))
    return joined
