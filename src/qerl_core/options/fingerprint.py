"""Which configs are the same run: what of a config affects its numbers, and the name that follows from it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from omegaconf import DictConfig, OmegaConf

NO_EFFECT = frozenset(  # keys that do not affect what is trained, nor how it is evaluated in the end
    {
        "root",
        "name",
        "logger",
        "save_every",
        "save_on_term",
        "checkpoints",
        "hydra",
        "eval.every",
        "eval.every_questions",
        "train.kept_groups",
        "parallel",  # affects rounding, like the number of GPUs
    }
)
ADDED_LATER: dict[str, Any] = {  # with what earlier runs did; these keys have an effect at other values only
    "reward._target_": "qerl_bench.reward.task.TaskReward",
    "reward.name": "task",
    "algo.right_only": False,
    "engine.dequantized_gib": 0.0,
    "engine.tf32": False,
    "parallel.shard": False,
    "eval.quant": None,
    "eval.quantizer": None,
    "eval.kv": None,
    "eval.at": [],
    "eval.at_greedy": True,
    "eval.also": [],
    "rollout.quant": None,
    "rollout.activations": None,
    "rollout.kv": None,
    "rollout.merge": False,
    "rollout.lag": 0,
    "train.kv": "none",
    "train.merge": "none",
    "train.gradients": "bf16",
    "kl.every": 0,
    **{
        f"{group}.{key}": value
        for group in ("quant", "aqn.format")
        for key, value in {"keep_first": 0.0, "keep_last": 0.0, "activations": "none"}.items()
    },
    "noise.where": "norms",
    "optim.beta2": 0.99,
    "train.autocast": False,
    "model.dither": None,
    "model.dither_scale": 1.0,
    "model.warm_start_prompts": 2048,
    "model.warm_start_experiment": "pretrain",
    "task.solution": "terse",
    "task.pretrain_procedures": {"guess": 0.25, "hasty": 0.35, "careful": 0.4},
}


def added_later(axis: str) -> dict[str, Any]:
    """The keys of ADDED_LATER of one group of a config, without its name."""
    return {key.removeprefix(f"{axis}."): value for key, value in ADDED_LATER.items() if key.startswith(f"{axis}.")}


def with_effect(tree: dict[str, Any]) -> dict[str, Any]:
    """A config without the keys NO_EFFECT, and without those of ADDED_LATER at the value there."""

    def matters(key: str, value: Any) -> bool:
        return key not in NO_EFFECT and not (key in ADDED_LATER and ADDED_LATER[key] == value)

    def left(key: str, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: left(f"{key}.{name}", part) for name, part in value.items() if matters(f"{key}.{name}", part)}

    parts = {key: left(key, value) for key, value in tree.items() if key not in NO_EFFECT}
    return {key: part for key, part in parts.items() if part or not tree[key]}


def scientific(cfg: DictConfig | dict[str, Any]) -> dict[str, Any]:
    """The resolved part of the config that affects the numbers of a run, without its seed."""
    keys = [str(key) for key in cfg if key not in NO_EFFECT | {"seed"}]
    return with_effect({key: plain(cfg, key) for key in sorted(keys)})


def fingerprint(cfg: DictConfig | dict[str, Any]) -> str:
    """First 8 hex digits of the SHA-256 of the scientific config: the same for runs that differ only in their seed."""
    return hashlib.sha256(json.dumps(canonical(scientific(cfg)), sort_keys=True).encode()).hexdigest()[:8]


def canonical(value: Any) -> Any:
    """`value` with integers for whole floats, because temperature=1 and temperature=1.0 are the same run."""
    if isinstance(value, dict):
        return {key: canonical(part) for key, part in value.items()}
    if isinstance(value, list):
        return [canonical(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def plain(cfg: DictConfig | dict[str, Any], key: str) -> Any:
    value = cfg[key]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def as_dict(cfg: DictConfig | dict[str, Any]) -> dict[str, Any]:
    """`cfg` as plain containers without references."""
    return cfg if isinstance(cfg, dict) else OmegaConf.to_container(cfg, resolve=True)  # type: ignore[return-value]


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted keys."""
    items: dict[str, Any] = {}
    for key, value in tree.items():
        items |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return items
