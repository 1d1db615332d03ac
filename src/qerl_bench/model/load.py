"""Loads a base model with its linear layers packed: already packed, packed while reading, or packed after loading."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_bench.checks import require
from qerl_bench.model.shape import RandomWeights, ShapeModel
from qerl_bench.quant.checkpoint import CheckpointReader, quantization_config, read_packed, skeleton
from qerl_bench.quant.error_decomposition import LayerReport, unpacked_report
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quantizer.apply import quantize_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from qerl_bench.model.base import Model
    from qerl_bench.quant.base import WeightFormat
    from qerl_bench.quantizer.base import Quantizer
    from qerl_bench.task.base import Task

log = logging.getLogger(__name__)


def load_packed(
    spec: Model, quant: WeightFormat, quantizer: Quantizer, task: Task, base: Path | None, device: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, LayerReport]]:
    """The model with its linear layers in the format `quant`, its tokenizer, and a report by layer.

    Random weights and checkpoints are packed block by block while they are made or read, if the checkpoint's tensors
    have the model's own names. A packed checkpoint is taken as it is; its layers have no error to report, since nothing
    was rounded here. `task` is what a quantizer may calibrate on, `base` the checkpoint of the warm start.
    """
    import torch

    folder = spec.folder()
    packs = quant.bits_per_weight is not None
    if folder is not None and quantization_config(folder) is not None:
        require(
            quantizer.name == "rtn",
            f"{folder} is packed already, so quantizer={quantizer.name} cannot choose its codes; leave quantizer=rtn, "
            "or give the unquantized model",
        )
        model = read_packed(folder, quant, getattr(torch, spec.dtype), device)
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}
        reports = {name: unpacked_report(layer) for name, layer in layers.items()}
        return model.to(device), spec.tokenizer(), reports

    model: Any
    source = None
    if isinstance(spec, ShapeModel):
        model, source = spec.without_weights(), RandomWeights(spec.seed, device)
    elif folder is not None and packs:
        checkpoint, model = CheckpointReader(folder, device), skeleton(folder, getattr(torch, spec.dtype))
        if checkpoint.covers(model):
            source = checkpoint
        else:
            log.info("%s has tensors with other names than the model: it is loaded whole before packing", folder)
    if source is not None:
        tokenizer = spec.tokenizer()
    else:
        model, tokenizer = spec.load(base, device)
    calibration = quantizer.calibration if packs else None
    sequences = calibration.sequences(tokenizer, task) if calibration is not None else []
    reports = quantize_model(model, quant, quantizer=quantizer, sequences=sequences, source=source)
    return model if source is None else model.to(device), tokenizer, reports
