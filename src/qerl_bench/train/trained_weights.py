"""What is trained: an adapter on packed or unpacked weights, or the unpacked weights themselves."""

from __future__ import annotations

from qerl_bench.algo.base import Algorithm
from qerl_bench.algo.kl import KLPenalty
from qerl_bench.lora.base import Adapter
from qerl_bench.model.base import Model
from qerl_bench.quant.base import WeightFormat
from qerl_bench.quantizer.base import Quantizer
from qerl_bench.train.spec import TrainSpec
from qerl_core.checks import require


def check_trained_weights(
    quant: WeightFormat,
    quantizer: Quantizer,
    lora: Adapter,
    model: Model,
    train: TrainSpec,
    algo: Algorithm,
    kl: KLPenalty,
    noise_on: str,
) -> None:
    """Raise ConfigError unless these weights can be trained; `noise_on` is noise.where."""
    packed, full_training = quant.bits_per_weight is not None, lora.rank == 0
    require(
        not (full_training and packed),
        f"lora=none trains every weight, but the packed weights of quant={quant.name} cannot be trained. Use "
        "lora=default, or quant=bf16",
    )
    require(
        not (full_training and noise_on == "adapters"),
        "noise.where=adapters puts noise on the adapter, and lora=none has none. Use lora=default, or "
        "noise.where=norms",
    )
    require(
        not (full_training and model.dtype != "float32"),
        f"lora=none trains the weights themselves, and RL steps are too small for {model.dtype}. Use "
        "model.dtype=float32, or lora=default, whose adapter is kept in FP32",
    )
    require(
        full_training or not train.autocast,
        "train.autocast=true computes with rounded copies of weights that are trained in FP32, and beside an "
        "adapter none are. Use train.autocast=false, or lora=none",
    )
    in_fp8 = (quant.name, quant.activations, getattr(quant, "block", None)) == ("fp8", "fp8", "row")
    require(
        train.gradients == "bf16" or in_fp8,
        f"train.gradients={train.gradients} multiplies rounded gradients by weights in FP8 with a scale for each row, "
        f"and quant={quant.name} quant.activations={quant.activations} has others. Use quant=fp8 quant.block=row "
        "quant.activations=fp8, or train.gradients=bf16",
    )
    require(
        packed or quantizer.name == "rtn",
        f"quantizer={quantizer.name} chooses codes, but quant={quant.name} stores none. Leave "
        "quantizer=rtn, or use a format that packs, such as quant=nvfp4",
    )
    require(
        train.updates_per_batch == 1 or full_training or lora.dropout == 0,
        f"train.updates_per_batch={train.updates_per_batch} compares log-probabilities between updates, and "
        f"lora.dropout={lora.dropout} would change them at random. Use lora.dropout=0",
    )
    require(
        kl.coef == kl.every == 0 or (not full_training and algo.on_policy),
        "kl.coef > 0 or kl.every > 0 compares completions with the base, the policy without its adapter. It "
        f"needs lora=default and an on-policy algorithm, got lora={lora.name}, algo={algo.name}",
    )
