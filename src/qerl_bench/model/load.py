"""From an experiment's specs to a packed model: read as packed, packed while reading or making, or after loading."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from qerl_bench.checks import require
from qerl_bench.model.shape import ShapeModel
from qerl_bench.quant.checkpoint import CheckpointReader, quantization_config, read_packed, skeleton
from qerl_bench.quant.error_decomposition import LayerReport, unpacked_report
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quantizer.apply import quantize_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from qerl_bench.config import Experiment

log = logging.getLogger(__name__)


def load_packed(
    experiment: Experiment, base: Path | None, device: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, LayerReport]]:
    """The experiment's model with its linear layers in the experiment's format, its tokenizer, and a report by layer.

    Random weights are packed block by block while they are made. A checkpoint folder whose tensors carry the model's
    own names is packed block by block while it is read, and one that is packed already is taken as it is; its layers
    have no report of errors, since nothing was rounded here.
    """
    import torch

    quant, quantizer, spec = experiment.quant, experiment.quantizer, experiment.model
    if isinstance(spec, ShapeModel):
        model, random, tokenizer = spec.streamed(device)
        sequences = _sequences(experiment, tokenizer)
        reports = quantize_model(model, quant, quantizer=quantizer, sequences=sequences, source=random)
        return model.to(device), tokenizer, reports
    folder = spec.folder()
    if folder is not None and quantization_config(folder) is not None:
        require(
            quantizer.name == "rtn",
            f"{folder} is packed already, so quantizer={quantizer.name} cannot choose its codes; leave quantizer=rtn, "
            "or give the unquantized model",
        )
        model = read_packed(folder, quant, getattr(torch, spec.dtype), device)
        packed = {name: m for name, m in model.named_modules() if isinstance(m, PackedLinear)}
        return model.to(device), spec.tokenizer(), {name: unpacked_report(layer) for name, layer in packed.items()}
    if folder is not None and quant.bits_per_weight is not None:
        weights, model = CheckpointReader(folder, device), skeleton(folder, getattr(torch, spec.dtype))
        if weights.covers(model):
            tokenizer = spec.tokenizer()
            reports = quantize_model(
                model, quant, quantizer=quantizer, sequences=_sequences(experiment, tokenizer), source=weights
            )
            return model.to(device), tokenizer, reports
        log.info("%s names its tensors otherwise than the model does: it is loaded whole before it is packed", folder)
    model, tokenizer = spec.load(base, device)
    reports = quantize_model(model, quant, quantizer=quantizer, sequences=_sequences(experiment, tokenizer))
    return model, tokenizer, reports


def _sequences(experiment: Experiment, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    calibration = experiment.quantizer.calibration
    if calibration is None or experiment.quant.bits_per_weight is None:
        return []
    return calibration.sequences(tokenizer, experiment.task)
