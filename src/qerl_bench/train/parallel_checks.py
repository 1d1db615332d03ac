"""What the options of a run on several GPUs cannot be combined with."""

from __future__ import annotations

from collections.abc import Sequence

from qerl_bench.lora.base import Adapter
from qerl_bench.parallel import ParallelSpec
from qerl_bench.train.spec import Specs
from qerl_core.checks import require


def check_exact(parallel: ParallelSpec, engine: str, lora: Adapter) -> None:
    """Bits can be equal on any number of GPUs only if nothing but the draws is random."""
    require(
        not parallel.exact or (engine != "vllm" and lora.dropout == 0),
        "parallel.exact=true makes a run on several GPUs equal to the bit to one on a single GPU, which vLLM and "
        f"dropout prevent: use engine=hf and lora.dropout=0, got engine={engine}, lora.dropout={lora.dropout}; or "
        "leave parallel.exact=false",
    )


def check_shard(specs: Specs, engine: str, kernel: str, others: Sequence[str]) -> None:
    """Raise ConfigError if something reads a sharded base other than block by block in a pass.

    `others` are the keys that ask for a second base.
    """
    parallel, train, full = specs.parallel, specs.train, specs.lora.rank == 0
    reasons = {
        f"engine={engine} holds a whole base. Use engine=hf": engine != "hf",
        "FSDP2 adds up gradients in its own order. Use parallel.exact=false": full and parallel.exact,
        "adamw_8bit has states of whole weights. Use optim.optimizer=adamw": full and specs.optim.optimizer != "adamw",
        "train.autocast=true keeps copies of whole weights. Use train.autocast=false": train.autocast,
        "experts are not cut. Use lora.experts=false": getattr(specs.lora, "experts", False),
        "kernel=block joins weights. Use kernel=auto": kernel == "block",
        "noise.where=adapters measures whole weights. Use noise.where=norms": specs.noise.where == "adapters",
        "rollout.merge=true rounds whole weights. Use rollout.merge=false": specs.rollout.merge,
        f"{' and '.join(others)} makes a second base, whole. Leave it out, and evaluate the finished run without "
        "torchrun": bool(others),
    }
    for reason in [reason for reason, holds in reasons.items() if parallel.shard and holds]:
        require(
            False, f"parallel.shard=true leaves each process a part of the base, and {reason}; or parallel.shard=false"
        )
