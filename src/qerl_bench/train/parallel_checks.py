"""What the options of a run on several GPUs cannot be combined with."""

from __future__ import annotations

from collections.abc import Sequence

from qerl_bench.lora.base import Adapter
from qerl_bench.parallel import ParallelSpec
from qerl_bench.train.spec import RolloutSpec, TrainSpec
from qerl_core.checks import require


def check_exact(parallel: ParallelSpec, engine: str, lora: Adapter) -> None:
    """Bits can be equal on any number of GPUs only if nothing but the draws is random."""
    require(
        not parallel.exact or (engine != "vllm" and lora.dropout == 0),
        "parallel.exact=true makes a run on several GPUs equal to the bit to one on a single GPU, which vLLM and "
        f"dropout prevent: use engine=hf and lora.dropout=0, got engine={engine}, lora.dropout={lora.dropout}; or "
        "leave parallel.exact=false",
    )


def check_shard(
    parallel: ParallelSpec,
    engine: str,
    lora: Adapter,
    kernel: str,
    noise_on: str,
    optimizer: str,
    train: TrainSpec,
    rollout: RolloutSpec,
    others: Sequence[str],
) -> None:
    """Raise ConfigError if something reads the base other than block by block in a pass.

    `noise_on` is noise.where; `others` are the keys that ask for a second base.
    """
    if not parallel.shard:
        return
    reasons = {
        f"engine={engine} holds a base of its own, whole. Use engine=hf": engine != "hf",
        "parallel.exact=true wants one order of sums, and FSDP2 has its own. Use parallel.exact=false": (
            parallel.exact and lora.rank == 0
        ),
        "optim.optimizer=adamw_8bit has states of whole weights. Use optim.optimizer=adamw": (
            lora.rank == 0 and optimizer != "adamw"
        ),
        "train.autocast=true keeps rounded copies of whole weights. Use train.autocast=false": train.autocast,
        "lora.experts=true adapts experts, which are not cut. Use lora.experts=false": getattr(lora, "experts", False),
        "kernel=block joins weights of a block to one. Use kernel=auto": kernel == "block",
        "noise.where=adapters measures the weights of the base. Use noise.where=norms": noise_on == "adapters",
        "rollout.merge=true rounds the weights of the base again. Use rollout.merge=false": rollout.merge,
        f"{' and '.join(others)} would make a second base, whole. Leave out what differs from training, and evaluate "
        "the finished run without torchrun": bool(others),
    }
    for reason, holds in reasons.items():
        require(
            not holds,
            f"parallel.shard=true leaves a part of the base to each process, and {reason}, or parallel.shard=false",
        )
