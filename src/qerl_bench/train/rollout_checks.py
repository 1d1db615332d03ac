"""What the options of rollouts, and those of training that are about them, cannot be combined with."""

from __future__ import annotations

from qerl_bench.algo.base import Algorithm
from qerl_bench.lora.base import Adapter
from qerl_bench.quant.base import NOT_ROUNDED, WeightFormat
from qerl_bench.quantizer.base import Quantizer
from qerl_bench.train.spec import RolloutSpec, TrainSpec
from qerl_core.checks import require


def check_merging(
    rollout: RolloutSpec, train: TrainSpec, lora: Adapter, sampled: WeightFormat, quantizer: Quantizer, engine: str
) -> None:
    """Raise ConfigError unless base and adapter can be rounded together as asked, to the format `sampled`."""
    require(
        rollout.merge or train.merge == "none",
        f"train.merge={train.merge} trains on weights that are rounded with the adapter, and rollout.merge=false "
        "samples from others. Use rollout.merge=true, or train.merge=none",
    )
    if not rollout.merge:
        return
    require(
        engine == "hf",
        f"rollout.merge=true rounds base and adapter together before each step, which only engine=hf does, got "
        f"engine={engine}. Use engine=hf, or rollout.merge=false",
    )
    require(
        lora.rank > 0,
        f"rollout.merge=true rounds base and adapter together, and lora={lora.name} has no adapter. Use lora=default, "
        "or rollout.merge=false",
    )
    require(
        sampled.bits_per_weight is not None,
        f"rollout.merge=true rounds base and adapter together, and quant={sampled.name}, which samples, packs none. "
        "Sample from packed weights, such as rollout.quant=nvfp4, or use rollout.merge=false",
    )
    require(
        quantizer.calibration is None,
        f"rollout.merge=true rounds anew for each step, and quantizer={quantizer.name} would run its text through the "
        "model each time. Use quantizer=rtn or mse, or rollout.merge=false",
    )
    require(
        not getattr(lora, "experts", False),
        "rollout.merge=true rounds base and adapter of linear layers together, and lora.experts=true adapts experts. "
        "Use lora.experts=false, or rollout.merge=false",
    )
    require(
        train.merge == "none" or lora.dropout == 0,
        f"train.merge={train.merge} has the adapter in the weight, where lora.dropout={lora.dropout} cannot reach it. "
        "Use lora.dropout=0, or train.merge=none",
    )


def check_sampler(rollout: RolloutSpec, quant: WeightFormat, algo: Algorithm, engine: str, steps: int) -> None:
    """Raise ConfigError unless `engine` can round inputs as asked, `algo` samples, and the lag is part of the run."""
    for key, kind in {"quant.activations": quant.activations, "rollout.activations": rollout.activations}.items():
        require(
            kind in (None, NOT_ROUNDED) or engine == "hf",
            f"{key}={kind} rounds the inputs of layers, which only engine=hf does while sampling, got "
            f"engine={engine}. Use engine=hf, or {key}=none",
        )
    for key, neutral in {"quant": None, "activations": None, "kv": None, "merge": False, "lag": 0}.items():
        value = getattr(rollout, key)
        require(
            value == neutral or algo.on_policy,
            f"rollout.{key}={value} is of what samples, and algo={algo.name} trains on demonstrations. Leave "
            f"rollout.{key} out",
        )
    require(
        rollout.lag == 0 or rollout.lag < steps,
        f"rollout.lag={rollout.lag} is as long as the run, in which no step would sample with a trained adapter: it "
        f"must be below steps={steps}. Make it smaller, or train longer",
    )
