"""Packed models as checkpoints of other programs, under the names that a format has there (`WeightFormat.foreign`).

Left out: experts that no checkpoint holds as linear layers (gpt-oss, Llama 4, Granite), and experts in nf4.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from qerl_bench.quant.base import WeightFormat
from qerl_bench.quant.checkpoint_mapping import in_checkpoint, rows_in_checkpoint
from qerl_bench.quant.foreign import COMPRESSED
from qerl_bench.quant.linear import TENSOR_SCALES, PackedLinear
from qerl_bench.quant.matrices import PackedMatrices
from qerl_bench.quant.packed_config import config_entry, foreign_of
from qerl_bench.quant.packed_share import persistent_buffers, unpacked_parameters
from qerl_core.checks import require
from qerl_core.rundir.durable import atomically, check_new_folder

SHARD_BYTES = 5 * 10**9


def export(model: Any, tokenizer: Any, weight_format: WeightFormat, out: Path) -> None:
    """Write a packed `model` and its tokenizer to the folder `out`. Raises ConfigError unless `out` is new or empty."""
    check_new_folder(out)
    with atomically(out) as partial:
        partial.mkdir(parents=True)
        tokenizer.save_pretrained(partial)
        entry = config_entry(weight_format, unpacked_modules(model), str(model.dtype).removeprefix("torch."))
        tensors = dict(checkpoint_tensors(model))
        write_model(model, tensors, entry, partial)


def write_model(
    model: Any, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None, folder: Path
) -> None:
    """Write config.json, with the entry `quantization`, and the weights `tensors` under their checkpoint names."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    if quantization is not None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = quantization
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_shards(tensors, folder)


def checkpoint_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the model under its checkpoint name; tied tensors once.

    Raises ConfigError if the model has packed experts that no checkpoint holds as linear layers.
    """
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    for name, layer in packed.items():
        if layer.bias is not None:
            yield f"{name}.bias", layer.bias.detach()
        stored = layer.weight_format.stored(layer.packed(), (layer.out_features, layer.in_features))
        yield from ((f"{name}.{leaf}", tensor) for leaf, tensor in stored.items())
    plain = {name: p.detach() for name, p in model.named_parameters() if name.rpartition(".")[0] not in packed}
    plain |= persistent_buffers(model)
    experts = {name: module for name, module in model.named_modules() if isinstance(module, PackedMatrices)}
    for name, matrices in experts.items():
        yield from _experts_tensors(model, name, matrices)
    yield from (in_checkpoint(model, plain) if experts else plain).items()


def unpacked_modules(model: torch.nn.Module) -> list[str]:
    """The linear layers that are not packed, and the routers that are no linear layers, as a checkpoint names them."""
    linears = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    names = [name for name in unpacked_parameters(model) if name.rpartition(".")[0] not in linears]
    routers = {name: parameter for name in names if (parameter := model.get_parameter(name)).dim() == 2}
    return linears + [name.removesuffix(".weight") for name in in_checkpoint(model, routers)]


def _experts_tensors(model: torch.nn.Module, name: str, matrices: PackedMatrices) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the linear layers that make up the packed experts parameter `name`."""
    weight_format = matrices.weight_format
    rows_of_layer = rows_in_checkpoint(model, name, (matrices.experts, matrices.out_features))
    require(
        bool(rows_of_layer) and foreign_of(weight_format).method == COMPRESSED and weight_format.block_rows == 1,
        f"the experts {name} of {type(model).__name__} cannot be exported as {weight_format.name}: "
        "checkpoints hold no linear layer for each of them that this format could pack. Use quant=nvfp4 or mxfp4, and "
        "a model such as Qwen3-MoE, Mixtral, OLMoE, DeepSeek-V3 or GLM-4-MoE",
    )
    for layer, rows in rows_of_layer.items():
        expert, own = int(rows[0]) // matrices.out_features, rows.to(matrices.device) % matrices.out_features
        packed = {
            key: tensor.clone() if key in TENSOR_SCALES else tensor.view(torch.uint8)[own].view(tensor.dtype)
            for key, tensor in matrices.packed(expert).items()
        }
        stored = weight_format.stored(packed, (len(rows), matrices.in_features))
        yield from ((f"{layer}.{leaf}", tensor) for leaf, tensor in stored.items())


def _write_shards(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name in sorted(tensors):
        if size + tensors[name].nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensors[name].cpu().contiguous()
        size += tensors[name].nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", {"format": "pt"})
        return
    file_of_tensor: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        file_of_tensor |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": file_of_tensor}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
