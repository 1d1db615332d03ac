"""Loads a base model with its linear layers packed: already packed, packed while reading, or packed after loading.

gpt-oss is published with its experts in MXFP4 and the rest in BF16: `quant=mxfp4` takes that as it is, attention in 16
bits, and other formats dequantize the experts and pack every layer. A checkpoint without safetensors is loaded whole.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qerl_bench.model.hub import HubModel
from qerl_bench.model.shape import RandomModel, RandomWeights
from qerl_bench.model.token_ids import require_rows
from qerl_bench.quant.base import BlockFormat
from qerl_bench.quant.checkpoint import CheckpointReader, skeleton
from qerl_bench.quant.error_decomposition import LayerReport, unpacked_report
from qerl_bench.quant.linear import PackedLinear, resident_bytes
from qerl_bench.quant.matrices import PackedMatrices
from qerl_bench.quant.mxfp4 import MXFP4
from qerl_bench.quant.packed_checkpoint import read_packed
from qerl_bench.quant.packed_config import RELEASED, quantization_config
from qerl_bench.quant.packed_share import weights_of
from qerl_bench.quant.weight_files import left_out, weight_files
from qerl_bench.quantizer.apply import quantize_model
from qerl_bench.quantizer.rescaling import Rescaling
from qerl_core.checks import require

log = logging.getLogger(__name__)
ADAPTER = "adapter_config.json"  # of PEFT
LOST = 0.3  # relative_error; Gaussian weights have 0.08 to 0.13 in 4 bits

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from qerl_bench.model.base import Model
    from qerl_bench.quant.base import WeightFormat
    from qerl_bench.quantizer.base import Quantizer
    from qerl_bench.task.base import Task


class Loaded(NamedTuple):
    """A packed model, its tokenizer, a report by layer, and what a calibrated quantizer read and moved."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    layers: dict[str, LayerReport]
    rescaling: Rescaling
    calibration: dict[str, str | int] | None  # `CalibrationText.record`; None without a text


def load_packed(
    spec: Model, quant: WeightFormat, quantizer: Quantizer, task: Task, base: Path | None, device: str
) -> Loaded:
    """The model with its linear layers in the format `quant`.

    Random weights and checkpoints are packed block by block while they are made or read. A packed checkpoint is taken
    as it is; its layers have no error to report, since nothing was rounded here. `task` is what a quantizer may
    calibrate on, `base` the checkpoint of the warm start, or what a GGUF file was converted to.
    """
    import torch

    if isinstance(spec, HubModel) and base is not None:
        spec = spec.at(base)
    folder = spec.folder()
    if folder is not None:
        _say_what_is_left_out(folder)
    stored = None if folder is None else quantization_config(folder)
    released = stored is not None and stored.get("quant_method") == RELEASED
    if folder is not None and stored is not None and (not released or isinstance(quant, MXFP4)):
        require(
            quantizer.name == "rtn",
            f"{folder} is packed already, so quantizer={quantizer.name} cannot choose its codes; leave quantizer=rtn, "
            "or give the unquantized model",
        )
        require(
            not (isinstance(quant, BlockFormat) and (quant.keep_first or quant.keep_last)),
            f"{folder} is packed already, so quant.keep_first and quant.keep_last cannot keep blocks in 16 bits; leave "
            "both at 0, or give the unquantized model",
        )
        model = read_packed(folder, quant, getattr(torch, spec.dtype), device, spec.trust_remote_code)
        layers = {
            name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear | PackedMatrices)
        }
        reports = {name: unpacked_report(resident_bytes(layer), weights_of(layer)) for name, layer in layers.items()}
        return Loaded(model.to(device), spec.tokenizer(), reports, Rescaling(), None)

    calibration = quantizer.calibration if quant.bits_per_weight is not None else None
    text = None if calibration is None else calibration.text(spec.tokenizer(), task, spec.template)
    if text is not None:
        log.info("quantizer=%s runs %s through the model", quantizer.name, text)
    model: Any
    source = None
    if isinstance(spec, RandomModel):
        model, source = spec.without_weights(), RandomWeights(spec.seed, device)
    elif folder is not None:
        model = skeleton(folder, getattr(torch, spec.dtype), spec.trust_remote_code)
        source = CheckpointReader(folder, device)
    if source is not None:
        tokenizer = spec.tokenizer()
    else:
        model, tokenizer = spec.load(base, device)
    sequences = [] if text is None else text.sequences
    require_rows(tokenizer, sequences, len(model.get_input_embeddings().weight), "quantizer.calibration")
    reports, rescaling = quantize_model(model, quant, quantizer=quantizer, sequences=sequences, source=source)
    _warn_of_lost(reports, quant)
    record = None if text is None else text.record()
    return Loaded(model if source is None else model.to(device), tokenizer, reports, rescaling, record)


def _warn_of_lost(reports: Mapping[str, LayerReport], quant: WeightFormat) -> None:
    """Name the layers of which packing left little: an ordinary format loses a tenth or two of their size."""
    lost = {name: report.relative_error for name, report in reports.items() if report.relative_error > LOST}
    if not lost:
        return
    worst = max(lost, key=lost.__getitem__)
    half = getattr(quant, "compute_dtype", "") == "float16"
    log.warning(
        "%d of %d layers lost more than %.0f %% of their size in quant=%s, %s most: relative_error %.2f "
        "(layers.parquet of the run lists all)%s",
        *(len(lost), len(reports), 100 * LOST, quant.name, worst, lost[worst]),
        "; scales in float16 do not reach small weights: quant.compute_dtype=bfloat16 or float32" if half else "",
    )


def _say_what_is_left_out(folder: Path) -> None:
    if others := left_out(folder):
        names = ", ".join(path.name for path in weight_files(folder)[:3])
        log.warning("%s: its weights are those of %s; not read: %s", folder, names, ", ".join(others))
    if (folder / ADAPTER).is_file():
        log.warning(
            "%s has %s: its adapter is not used. Merge it into the weights if it belongs there", folder, ADAPTER
        )
