"""Config keys, options and values of earlier versions, and their names today: old commands and runs get an answer.

Nothing is translated silently: the user is told the new name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qerl_core.checks import require

RENAMED = {  # config keys, and groups whose other keys kept their names
    "offpolicy.weights": "importance_sampling.mode",
    "offpolicy.cap": "importance_sampling.clip_max",
    "offpolicy.floor": "importance_sampling.clip_min",
    "offpolicy.split": "importance_sampling.split_mismatch",
    "offpolicy": "importance_sampling",
    "optim.updates": "train.updates_per_batch",
    "optim.micro_batch": "train.micro_batch_tokens",
    "train.micro_batch_size": "train.micro_batch_tokens",
    "optim.packing": "train.packing",
    "optim.entropy_coef": "train.entropy_coef",
    "optim.gradient_checkpointing": "train.recompute",
    "train.gradient_checkpointing": "train.recompute",
    "optim.on_nonfinite": "train.on_nonfinite",
    "rollout.prompts": "rollout.prompts_per_step",
    "inject.batch_prompts": "noise.prompts_per_draw",
    "inject": "noise",
    "algo.when_degenerate": "algo.on_no_signal",
    "algo.max_refills": "algo.max_resampling_rounds",
    "engine.max_batch": "engine.max_num_seqs",
    "engine.max_sequences": "engine.max_num_seqs",
    "engine.eager": "engine.enforce_eager",
    "engine.tensor_parallel": "engine.tensor_parallel_size",
    "engine.score_batch": "engine.score_batch_size",
    "quantizer.stretches": "quantizer.scale_multipliers",
}
RENAMED_VALUES = {
    "recipe": {"shipped": "as_released"},
    "train.micro_batch_tokens": {"a number of completions": "one of tokens"},
    "train.recompute": {"true": "full", "false": "none"},
    "noise.site": {"sampler": "rollout", "old": "rollout_and_old_logprobs", "trainer": "rollout_and_training"},
}


def new_name(key: str) -> str | None:
    """The name of a config key today; None if it never had another."""
    group, _, rest = key.partition(".")
    if key in RENAMED:
        return RENAMED[key]
    return f"{RENAMED[group]}.{rest}" if group in RENAMED else None


def renamed(key: str) -> str | None:
    """A sentence on what `key` is called today, with the values that were renamed too; None if it kept its name."""
    new = new_name(key)
    if new is None:
        return None
    values = ", ".join(f"{old} is {value} now" for old, value in RENAMED_VALUES.get(new, {}).items())
    return f"{key} was renamed to {new}" + (f" ({values})" if values else "")


def renamed_value(key: str, value: object) -> str | None:
    """A sentence on what a value is called today; None if it kept its name."""
    new = RENAMED_VALUES.get(key, {}).get(str(value))
    return None if new is None else f"{key}={value} was renamed to {key}={new}"


def outdated(config: Mapping[str, Any]) -> list[str]:
    """A sentence for each key and value in `config`, nested dicts, that has another name today."""
    groups = {str(key): value for key, value in config.items() if isinstance(value, Mapping)}
    keys = [f"{group}.{key}" for group, values in groups.items() for key in values if key != "_target_"]
    values = {f"{group}.{key}": value for group, values in groups.items() for key, value in values.items()}
    sentences = [*(renamed(key) for key in keys), *(renamed_value(key, value) for key, value in values.items())]
    return [sentence for sentence in sentences if sentence]


def require_current(config: Mapping[str, Any], run_dir: Path) -> None:
    """Raise ConfigError if `config`, that of the run in `run_dir`, was written with keys of an earlier version."""
    old = outdated(config)
    require(
        not old,
        f"{run_dir} is a run of an earlier version of the code: {'; '.join(old[:4])}{'; ...' if len(old) > 4 else ''}. "
        "Continue or read it with that version (env.json names its commit), or run it again",
    )
