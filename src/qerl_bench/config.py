"""From command-line words to validated specs: compose the YAML, build the frozen dataclasses, name the run.

Nothing here imports torch, so every combination of options can be composed and checked in seconds on any machine.
Building weights, engines and tasks is a later step that takes the specs as they are.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hydra import __version__ as hydra_version
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, open_dict

from qerl_bench.algo.importance_sampling import ImportanceSampling
from qerl_bench.algo.kl import KLPenalty
from qerl_bench.aqn.base import Schedule
from qerl_bench.aqn.spec import NoiseSpec
from qerl_bench.checks import (
    MAX_STEPS,
    ConfigError,
    is_folder_name,
    require,
    require_count,
    require_readable,
)
from qerl_bench.installation import CONF_DIR
from qerl_bench.option_names import check_class, check_option_names, make_option
from qerl_bench.quant.base import WeightFormat
from qerl_bench.renamed_keys import outdated
from qerl_bench.task.base import Task
from qerl_bench.train.spec import OptimSpec, RolloutSpec, TrainSpec

# Hydra 1.4, which comes with OmegaConf 2.4, warns of the names of 1.3.
HYDRA_1_3 = hydra_version.startswith("1.3")
HYDRA_DEFAULTS: dict[str, Any] = {"version_base": "1.3"} if HYDRA_1_3 else {}
REGISTER = "register_new_resolver" if HYDRA_1_3 else "register_resolver"
# What may differ between two runs of the same science. The seed stands in the run's name instead.
UNSCIENTIFIC = frozenset({"root", "name", "logger", "save_every", "seed", "hydra"})


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One run: the specs of every axis and the scalars they share. Combinations that cannot work are refused here."""

    name: str
    root: str
    steps: int
    seed: int
    device: str
    kernel: str
    save_every: int
    rollout: RolloutSpec
    optim: OptimSpec
    train: TrainSpec
    kl: KLPenalty
    importance_sampling: ImportanceSampling
    quant: WeightFormat
    quantizer: Any
    aqn: Schedule
    noise: NoiseSpec
    algo: Any
    lora: Any
    model: Any
    engine: Any
    task: Task
    eval: Any
    logger: Any

    def __post_init__(self) -> None:
        require_count("steps", self.steps, most=MAX_STEPS)
        require_count("save_every", self.save_every)
        require_count("seed", self.seed, least=0)
        require(
            isinstance(self.root, str) and is_folder_name(self.name),
            f"name must be a folder name below root/runs and root a path, got name={self.name!r}, root={self.root!r}",
        )
        require(self.device in ("auto", "cpu", "cuda"), f"device must be auto, cpu or cuda, got {self.device!r}")
        require(self.kernel in ("auto", "torch"), f"kernel must be auto or torch, got {self.kernel!r}")
        require(
            self.lora.rank > 0 or self.quant.bits_per_weight is None,
            f"lora=none trains every weight, but quant={self.quant.name} keeps them packed in 4 bits, where no "
            "gradient step fits. Use lora=default, or quant=bf16.",
        )
        require(
            self.lora.rank > 0 or self.model.dtype == "float32",
            f"lora=none trains the weights themselves, and steps of RL are lost in {self.model.dtype}'s rounding. Use "
            "model.dtype=float32, or lora=default, whose adapter is kept in FP32",
        )
        require(
            self.kl.coef == 0 or (self.lora.rank > 0 and self.algo.on_policy),
            "kl.coef > 0 compares a sampled completion with the base model, which is the policy with its adapter "
            "switched off. It needs lora=default and an on-policy algorithm, got "
            f"lora={self.lora.name}, algo={self.algo.name}",
        )
        require(
            self.importance_sampling.mode == "none" or self.algo.on_policy,
            f"importance_sampling.mode={self.importance_sampling.mode} weighs completions by who sampled them, and "
            f"algo={self.algo.name} reads demonstrations. Use importance_sampling.mode=none",
        )
        require(
            self.train.updates_per_batch == 1 or self.lora.rank == 0 or self.lora.dropout == 0,
            f"train.updates_per_batch={self.train.updates_per_batch} compares log-probabilities between updates, and lora.dropout="
            f"{self.lora.dropout} would change them at random; set lora.dropout=0",
        )
        require(
            self.quantizer.name == "rtn" or self.quant.bits_per_weight is not None,
            f"quantizer={self.quantizer.name} chooses 4-bit codes, and quant={self.quant.name} stores none. Leave "
            "quantizer=rtn, or use quant=nvfp4, mxfp4 or nf4.",
        )
        require(
            self.optim.warmup_steps < self.steps,
            f"optim.warmup_steps={self.optim.warmup_steps} leaves nothing of steps={self.steps}; make it smaller",
        )
        require(
            not self.algo.on_policy or self.rollout.group_size > 1,
            f"algo={self.algo.name} compares the completions of one prompt with each other: rollout.group_size must be "
            f"at least 2, got {self.rollout.group_size}",
        )
        require(
            self.algo.on_policy or self.aqn.name == "none",
            f"algo={self.algo.name} reads demonstrations and samples nothing that aqn={self.aqn.name} could perturb; "
            "use aqn=none",
        )
        shape = self.model.config() or {}
        reads = shape.get("max_position_embeddings")
        require_readable("task.max_completion_tokens", self.task.max_completion_tokens, reads, self.model.name)
        require_readable("eval.max_tokens", getattr(self.eval, "max_tokens", None), reads, self.model.name)
        for key in ("hidden_size", "intermediate_size"):
            if key in shape:
                self.quant.check_width(f"model={self.model.name}, {key}", shape[key])
        self.aqn.check_with(self.quant, self.noise)
        self.engine.check_with(self)
        self.task.check_with(self)
        self.lora.check_with(f"model={self.model.name}", shape)

    @property
    def run_dir(self) -> Path:
        return Path(self.root) / "runs" / self.name


def register_resolvers() -> None:
    """Make `${fingerprint:}` known to OmegaConf; may be called any number of times."""
    getattr(OmegaConf, REGISTER)("fingerprint", lambda *, _root_: fingerprint(_root_), replace=True)


def scientific(cfg: DictConfig | dict[str, Any]) -> dict[str, Any]:
    """The resolved part of the config that decides the numbers of a run, its seed left out."""
    keys = [str(key) for key in cfg if key not in UNSCIENTIFIC]
    return {key: plain(cfg, key) for key in sorted(keys)}


def plain(cfg: DictConfig | dict[str, Any], key: str) -> Any:
    value = cfg[key]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def fingerprint(cfg: DictConfig | dict[str, Any]) -> str:
    """First 8 hex digits of the SHA-256 of the scientific config: equal for runs that differ in the seed alone."""
    return hashlib.sha256(json.dumps(canonical(scientific(cfg)), sort_keys=True).encode()).hexdigest()[:8]


def canonical(value: Any) -> Any:
    """`value` with whole floats as integers: temperature=1 and temperature=1.0 are the same run."""
    if isinstance(value, dict):
        return {key: canonical(part) for key, part in value.items()}
    if isinstance(value, list):
        return [canonical(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def compose(overrides: list[str] | None = None) -> DictConfig:
    """The config that `python src/run.py OVERRIDES` would run, resolved; for preflight checks, notebooks and tests."""
    register_resolvers()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF_DIR), **HYDRA_DEFAULTS, job_name="run"):
        cfg = hydra_compose("run", overrides=list(overrides or []), return_hydra_config=True)
    with open_dict(cfg):
        hydra = cfg.pop("hydra")
    check_option_names(cfg, hydra.runtime)
    return resolved(cfg)


def resolved(cfg: DictConfig) -> DictConfig:
    """A copy of `cfg` without interpolations, as config.yaml stores it."""
    return OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))  # type: ignore[return-value]


def build(cfg: DictConfig) -> Experiment:
    """Turn a composed config into validated specs.

    Raises ConfigError with the reason if a value or a combination of options cannot work.
    """
    old = outdated(cfg)  # type: ignore[arg-type]  # a DictConfig is a mapping
    require(not old, "; ".join(old))
    nodes = {str(key): spec(cfg, str(key)) for key in cfg}
    known = {field.name for field in fields(Experiment)}
    unknown, missing = nodes.keys() - known, known - nodes.keys()
    require(not unknown, f"there is no option {', '.join(sorted(unknown))}. All options: python src/run.py --cfg job")
    require(not missing, f"the config lacks {', '.join(sorted(missing))}, which every run needs; leave ~ overrides out")
    return Experiment(**nodes)


def spec(cfg: DictConfig, key: str) -> Any:
    """The spec under `key`, or its plain value where the node names no `_target_`."""
    node = cfg[key]
    if not (OmegaConf.is_dict(node) and "_target_" in node):
        return plain(cfg, key)
    check_class(CONF_DIR, key, node)
    try:
        return make_option(key, plain(cfg, key))
    except ConfigError:
        raise
    except Exception as error:  # of a class that does not check its fields itself
        given = {name: value for name, value in plain(cfg, key).items() if name != "_target_"}
        if foreign := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            reason = f"{key}={given.get('name')} has no option {key}.{foreign[1]}"
            raise ConfigError(f"{reason}; leave it out, or the experiment that sets it") from error
        raise ConfigError(f"{key} does not work with {given}: {error}") from error
