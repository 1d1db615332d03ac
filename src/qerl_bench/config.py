"""From command-line words to validated specs: compose the YAML, build the frozen dataclasses, name the run.

Nothing here imports torch, so every combination of options can be composed and checked in seconds on any machine.
Weights, engines and tasks are built later, from the specs.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from hydra import __version__ as hydra_version
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.conf import RuntimeConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf, open_dict

from qerl_bench import own_options
from qerl_bench.algo.base import Algorithm
from qerl_bench.algo.importance_sampling import ImportanceSampling
from qerl_bench.algo.kl import KLPenalty
from qerl_bench.aqn.base import Schedule
from qerl_bench.aqn.spec import NoiseSpec
from qerl_bench.checks import (
    MAX_STEPS,
    ConfigError,
    at_most,
    check_fields,
    count,
    flag,
    is_folder_name,
    one_of,
    require,
)
from qerl_bench.engine.base import EngineSpec
from qerl_bench.eval.base import Evaluator
from qerl_bench.installation import CONF_DIR
from qerl_bench.logger.base import LoggerSpec
from qerl_bench.lora.base import Adapter
from qerl_bench.model.base import Model, short_name
from qerl_bench.option_files import options_of
from qerl_bench.option_names import check_class, check_option_names, load_option, make_option, search_folders
from qerl_bench.parallel import ParallelSpec
from qerl_bench.quant.base import WeightFormat
from qerl_bench.quantizer.base import Quantizer
from qerl_bench.renamed_keys import outdated
from qerl_bench.reward.base import RewardSource
from qerl_bench.rundir import NO_EFFECT, flat, with_effect
from qerl_bench.task.base import Task
from qerl_bench.train.spec import CheckpointSpec, OptimSpec, RolloutSpec, TrainSpec
from qerl_bench.unknown_words import unknown_key, unknown_option, unread

# Hydra 1.4, which comes with OmegaConf 2.4, warns of the names of 1.3.
HYDRA_1_3 = hydra_version.startswith("1.3")
HYDRA_DEFAULTS: dict[str, Any] = {"version_base": "1.3"} if HYDRA_1_3 else {}
REGISTER = "register_new_resolver" if HYDRA_1_3 else "register_resolver"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One run: the specs of all axes and the values they share. Refuses combinations that cannot work."""

    name: str
    root: str
    steps: int
    seed: int
    device: str
    kernel: str
    save_every: int
    save_on_term: bool
    checkpoints: CheckpointSpec
    rollout: RolloutSpec
    optim: OptimSpec
    train: TrainSpec
    parallel: ParallelSpec
    kl: KLPenalty
    importance_sampling: ImportanceSampling
    quant: WeightFormat
    quantizer: Quantizer
    aqn: Schedule
    noise: NoiseSpec
    algo: Algorithm
    lora: Adapter
    model: Model
    engine: EngineSpec
    task: Task
    reward: RewardSource
    eval: Evaluator
    logger: LoggerSpec

    def __post_init__(self) -> None:
        check_fields(
            self,
            "",
            steps=at_most(MAX_STEPS, count()),
            save_every=count(),
            save_on_term=flag,
            seed=count(0),
            device=one_of("auto", "cpu", "cuda"),
            kernel=one_of("auto", "block", "torch"),
        )
        require(
            isinstance(self.root, str) and is_folder_name(self.name),
            "name must be a folder name below root/runs, of printable characters and up to 200 bytes between slashes, "
            f"and root a path, got name={self.name!r}, root={self.root!r}",
        )
        require(
            self.optim.warmup_steps < self.steps,
            f"optim.warmup_steps must be below steps={self.steps}, got {self.optim.warmup_steps}; make it smaller",
        )
        self._check_trained_weights()
        self._check_algorithm()
        self._check_parallel()
        self._check_other_formats()
        shape = self.model.config() or {}
        self._check_lengths(shape.get("max_position_embeddings"))
        for key in ("hidden_size", "intermediate_size"):
            if key in shape:
                self.quant.check_width(f"model={self.model.name}, {key}", shape[key])
        self.aqn.check_with(self.quant, self.noise)
        longest_completion = max(self.task.max_completion_tokens, getattr(self.eval, "max_tokens", None) or 0)
        self.engine.check_with(shape, self.model.dtype, self.lora.rank, longest_completion)
        self.task.check_with(self.algo, self.eval.name, self.rollout.group_size)
        self.reward.check_with(self.algo)
        self.lora.check_with(f"model={self.model.name}", shape)

    def _check_trained_weights(self) -> None:
        """What is trained: an adapter on packed or unpacked weights, or the unpacked weights themselves."""
        packed, full_training = self.quant.bits_per_weight is not None, self.lora.rank == 0
        require(
            not (full_training and packed),
            f"lora=none trains every weight, but the 4-bit weights of quant={self.quant.name} cannot be trained. Use "
            "lora=default, or quant=bf16",
        )
        require(
            not (full_training and self.noise.where == "adapters"),
            "noise.where=adapters puts noise on the adapter, and lora=none has none. Use lora=default, or "
            "noise.where=norms",
        )
        require(
            not (full_training and self.model.dtype != "float32"),
            f"lora=none trains the weights themselves, and RL steps are too small for {self.model.dtype}. Use "
            "model.dtype=float32, or lora=default, whose adapter is kept in FP32",
        )
        require(
            packed or self.quantizer.name == "rtn",
            f"quantizer={self.quantizer.name} chooses 4-bit codes, but quant={self.quant.name} stores none. Leave "
            "quantizer=rtn, or use quant=nvfp4, mxfp4 or nf4",
        )
        require(
            self.train.updates_per_batch == 1 or full_training or self.lora.dropout == 0,
            f"train.updates_per_batch={self.train.updates_per_batch} compares log-probabilities between updates, and "
            f"lora.dropout={self.lora.dropout} would change them at random. Use lora.dropout=0",
        )
        require(
            self.kl.coef == 0 or (not full_training and self.algo.on_policy),
            "kl.coef > 0 compares sampled completions with the base model, which is the policy without its adapter. It "
            f"needs lora=default and an on-policy algorithm, got lora={self.lora.name}, algo={self.algo.name}",
        )

    def _check_algorithm(self) -> None:
        """Options that only an algorithm with rollouts, or only one with demonstrations, can use."""
        if self.algo.on_policy:
            require(
                self.rollout.group_size > 1,
                f"rollout.group_size must be at least 2, got {self.rollout.group_size}: algo={self.algo.name} compares "
                "the completions of a prompt with each other",
            )
            tokens, longest = self.train.micro_batch_tokens, self.task.max_completion_tokens
            require(
                tokens is None or tokens > longest,
                f"train.micro_batch_tokens={tokens} cannot hold a completion of task.max_completion_tokens={longest} "
                f"and its prompt; set it to more than {longest} (it counts tokens, not completions), or to null",
            )
            return
        mode = self.importance_sampling.mode
        require(
            mode == "none",
            f"importance_sampling.mode={mode} corrects for the sampler, and algo={self.algo.name} trains on "
            "demonstrations. Use importance_sampling.mode=none",
        )
        require(
            self.aqn.name == "none",
            f"aqn={self.aqn.name} adds noise to the rollout, and algo={self.algo.name} trains on demonstrations. Use "
            "aqn=none",
        )

    def _check_parallel(self) -> None:
        """Bits can be equal on any number of GPUs only if nothing but the draws is random."""
        require(
            not self.parallel.exact or (self.engine.name != "vllm" and self.lora.dropout == 0),
            "parallel.exact=true makes a run on several GPUs equal to the bit to one on a single GPU, which vLLM and "
            f"dropout prevent: use engine=hf and lora.dropout=0, got engine={self.engine.name}, "
            f"lora.dropout={self.lora.dropout}; or leave parallel.exact=false",
        )

    def _check_other_formats(self) -> None:
        """Formats that evaluations or rollouts have of their own."""
        for key, name in {"eval.quant": self.served_in, "rollout.quant": self.rollout.quant}.items():
            require(
                self.in_format(key, name) is self or self.engine.name == "hf",
                f"{key}={name} samples from a copy of the policy with other weights, which only engine=hf makes, got "
                f"engine={self.engine.name}. Use engine=hf, or leave {key} out; a finished run can be evaluated in "
                f"another format with any engine: qerl-bench eval RUN eval.quant=nvfp4",
            )
        require(
            self.rollout.quant is None or self.algo.on_policy,
            f"rollout.quant={self.rollout.quant} is of what samples, and algo={self.algo.name} trains on "
            "demonstrations. Leave rollout.quant out",
        )

    @property
    def served_in(self) -> str | None:
        """The weight format that evaluations ask for; None for that of training."""
        return getattr(self.eval, "quant", None)

    def in_format(self, key: str, name: str | None) -> Experiment:
        """This experiment on a base in the weight format `name`, without noise; itself if that is its format.

        Raises ConfigError, naming `key`, if that cannot be.
        """
        if name in (None, self.quant.name):
            return self
        formats = options_of(own_options.folders(), "quant")
        require(name in formats, f"{key} must be null or one of {', '.join(sorted(formats))}, got {name!r}")
        require(
            not self.quantizer.rescales,
            f"{key}={name} puts the adapter on another base, and quantizer={self.quantizer.name} moves scales between "
            f"the layers that the adapter was trained on. Use quantizer=rtn, mse or gptq, or leave {key} out",
        )
        quant: WeightFormat = option("quant", str(name))
        quantizer = self.quantizer if quant.bits_per_weight is not None else option("quantizer", "rtn")
        own_eval = {} if self.served_in is None else {"eval": replace(self.eval, quant=None)}  # type: ignore[type-var]
        try:
            rollout = replace(self.rollout, quant=None)
            return replace(
                self, quant=quant, quantizer=quantizer, aqn=option("aqn", "none"), rollout=rollout, **own_eval
            )
        except ConfigError as error:
            raise ConfigError(f"{key}={name}: {error}") from error

    def _check_lengths(self, context: int | None) -> None:
        """Completions must fit the context of the model, as far as it is known."""
        limits = {
            "task.max_completion_tokens": self.task.max_completion_tokens,
            "eval.max_tokens": getattr(self.eval, "max_tokens", None),
        }
        for key, tokens in limits.items():
            require(
                tokens is None or context is None or tokens <= context,
                f"{key} must be at most {context}, the context of model={self.model.name}, got {tokens}; make it "
                "smaller, or choose a model with a longer context",
            )

    def check_model(self) -> None:
        """Raise ConfigError unless the model can be asked a question of the task, as far as no weights are needed."""
        self.model.check(self.task.train_prompts(1, 1, seed=0)[0].messages)

    @property
    def run_dir(self) -> Path:
        return Path(self.root) / "runs" / self.name


# Top-level keys without options.
VALUES = {field.name for field in fields(Experiment) if field.type in ("bool", "int", "str")}


def register_resolvers() -> None:
    """Register `${fingerprint:}`, `${model_name:ID}` and `${fitting:N,STEPS}`; may be called repeatedly."""
    register = getattr(OmegaConf, REGISTER)
    register("fingerprint", lambda *, _root_: fingerprint(_root_), replace=True)
    register("model_name", short_name, replace=True)
    register("fitting", fitting, replace=True)


def fitting(warmup: int, steps: object) -> int:
    """`warmup` steps, or as many as leave one of the `steps` of a shorter run; `Experiment` refuses other `steps`."""
    return max(0, min(warmup, steps - 1)) if isinstance(steps, int) else warmup


def scientific(cfg: DictConfig | dict[str, Any]) -> dict[str, Any]:
    """The resolved part of the config that affects the numbers of a run, without its seed."""
    keys = [str(key) for key in cfg if key not in NO_EFFECT | {"seed"}]
    return with_effect({key: plain(cfg, key) for key in sorted(keys)})


def plain(cfg: DictConfig | dict[str, Any], key: str) -> Any:
    value = cfg[key]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


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


def compose(overrides: list[str] | None = None) -> DictConfig:
    """The resolved config of `python src/run.py OVERRIDES`, for checks, notebooks and tests."""
    return OmegaConf.create(Composer().tree(overrides or []))


class ReadOnce(ConfigRepository):
    """Hydra's repository, which gives fresh copies of what is in `read` and adds to it what it reads, pickled."""

    def __init__(self, like: ConfigRepository, read: dict[Any, bytes]) -> None:
        self.sources, self.read = like.sources, read

    def __deepcopy__(self, memo: object) -> ReadOnce:
        return ReadOnce(self, self.read)  # Hydra copies it for each config, and gives the copy other sources

    def load_config(self, config_path: str) -> ConfigResult | None:
        key = (config_path, *(source.path for source in self.sources))
        if key not in self.read:
            self.read[key] = pickle.dumps(super().load_config(config_path))
        return pickle.loads(self.read[key])


class Composer:
    """Composes many configs, such as the points of a sweep, which differ mostly in values.

    Hydra takes a fifth of a second for a config, half of it to read files. Here each file is read once and each choice
    of options composed once, and values are set in copies of it, by Hydra's own function. The YAML files must not
    change meanwhile.
    """

    def __init__(self) -> None:
        register_resolvers()
        self._composed = lru_cache(maxsize=256)(partial(_composed, read={}))
        self._parsed = lru_cache(maxsize=1024)(lambda word: OverridesParser.create().parse_overrides([word])[0])

    def tree(self, overrides: Sequence[str]) -> dict[str, Any]:
        """The config of `compose` as plain containers. Raises ConfigError for a word that names no option."""
        return self.chosen(overrides)[0]

    def chosen(self, overrides: Sequence[str]) -> tuple[dict[str, Any], RuntimeConf]:
        """As `tree`, with Hydra's record of which option was chosen for each axis, and from which folders."""
        try:
            cfg, runtime = self._unresolved(overrides)
        except HydraException as error:
            raise ConfigError(self._in_words(error, overrides)) from error
        return plain_tree(cfg), runtime

    def _unresolved(self, overrides: Sequence[str]) -> tuple[DictConfig, RuntimeConf]:
        parsed = [self._parsed(word) for word in overrides]
        values = [override for override in parsed if _is_value(override)]
        if not all(override in values or _is_choice(override) for override in parsed):
            values = []  # ~optim or optim={lr: 1}, whose place among the values matters
        composed, runtime = self._composed(
            tuple(word for word, override in zip(overrides, parsed, strict=True) if override not in values)
        )
        cfg = pickle.loads(composed)
        ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
        if any(map(_may_rename, values)):
            check_option_names(cfg, runtime)
        return cfg, runtime

    def _in_words(self, error: HydraException, overrides: Sequence[str]) -> str:
        """What is said of Hydra's `error` over these words: the option that was probably meant."""
        if isinstance(error, OverrideParseException):
            return unread(error.override)
        text = " ".join(str(error).split("\nConfig search path:")[0].split())
        missing = re.search(r"Could not find '([^']+)/([^'/]+)'", text)
        unknown = re.search(r"Could not override '([^']+)'", text)
        if missing is None and unknown is None:
            several = re.match(r"Ambiguous value for argument '([^'=]+)=([^']+)'", text)
            if several is None:
                return text
            key, values = several.groups()
            first = values.partition(",")[0]
            if re.fullmatch(r"[\w./-]+", first):
                self.tree([f"{key}={first}" if word == f"{key}={values}" else word for word in overrides])
            return f"{key}={values} has several values: -m runs them all; a list is {key}=[{values}]"
        parsed = [self._parsed(word) for word in overrides]
        choices = [word for word, one in zip(overrides, parsed, strict=True) if _is_choice(one) and _is_axis(one)]
        try:
            composed, runtime = self._composed(tuple(choices if missing is None else ()))
        except (HydraException, ConfigError):
            composed, runtime = self._composed(())
        folders = search_folders(runtime)
        if missing is not None:
            return unknown_option(missing[1], missing[2], folders)
        assert unknown is not None
        tree = OmegaConf.to_container(pickle.loads(composed), resolve=False)
        assert isinstance(tree, dict)
        chosen = {str(axis): str(option) for axis, option in runtime.choices.items() if "/" not in str(axis)}
        return unknown_key(unknown[1], [*flat({str(key): value for key, value in tree.items()})], chosen, folders)


def _composed(choices: tuple[str, ...], read: dict[Any, bytes]) -> tuple[bytes, RuntimeConf]:
    """The config with these overrides and without the node `hydra`, pickled, and Hydra's record of what was chosen."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF_DIR), **HYDRA_DEFAULTS, job_name="run"):
        loader = GlobalHydra.instance().config_loader()
        loader.repository = ReadOnce(loader.repository, read)  # type: ignore[attr-defined]  # an IConfigLoader
        try:
            cfg = hydra_compose("run", overrides=list(choices), return_hydra_config=True)
        except ValueError as error:  # what Hydra raises for quant=5 and =5
            search_path, others = own_options.split_search_path(choices)
            folders = search_folders(hydra_compose("run", search_path, return_hydra_config=True).hydra.runtime)
            for axis, _, value in (word.partition("=") for word in others):
                if axis and (CONF_DIR / axis).is_dir() and value not in options_of(folders, axis):
                    raise ConfigError(unknown_option(axis, value, folders)) from error
            raise ConfigError(f"{' '.join(choices)}: {error}. An option is chosen by name: quant=nvfp4") from error
    with open_dict(cfg):
        hydra = cfg.pop("hydra")
    refuse_env_copy(hydra.job)
    own_options.use(search_folders(hydra.runtime))
    check_option_names(cfg, hydra.runtime)
    return pickle.dumps(cfg), hydra.runtime


def refuse_env_copy(job: Any) -> None:
    """Raise ConfigError if Hydra would copy variables of the environment, such as tokens, into files of the run."""
    require(
        not job.env_copy,
        f"hydra.job.env_copy={list(job.env_copy)} would write these variables to multirun.yaml; leave it out: a run "
        "inherits the environment as it is",
    )


def _is_value(override: Override) -> bool:
    """Whether this sets a single value: steps=3 or optim.lr=1e-5."""
    key = override.key_or_group
    return not override.is_sweep_override() and (key in VALUES or ("." in key and not override.is_hydra_override()))


def _is_axis(override: Override) -> bool:
    """Whether this is about a folder of options of the project, or about where to look for others."""
    return (CONF_DIR / override.key_or_group).is_dir() or override.key_or_group == "hydra.searchpath"


def _may_rename(override: Override) -> bool:
    """Whether a value may be the name or class of an option; `name` alone is that of the run."""
    option, _, key = override.key_or_group.rpartition(".")
    return (option != "" and key in ("name", "_target_")) or isinstance(override.value(), (dict, list))


def _is_choice(override: Override) -> bool:
    """Whether this chooses an option, quant=nvfp4, or is for Hydra itself."""
    return override.is_hydra_override() or (override.type == OverrideType.CHANGE and isinstance(override.value(), str))


def resolved(cfg: DictConfig) -> DictConfig:
    """A copy of `cfg` without interpolations, as config.yaml stores it."""
    return OmegaConf.create(plain_tree(cfg))


def plain_tree(cfg: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[return-value]


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
    require(not missing, lacks(missing))
    for field in fields(Experiment):
        require(
            field.name in VALUES or is_dataclass(nodes[field.name]),
            f"{field.name} is a group of keys, got {nodes[field.name]!r}; set its keys, {field.name}.KEY=..., or leave "
            "it out",
        )
    return Experiment(**nodes)


def option(axis: str, name: str) -> Any:
    """The spec of an option with its defaults."""
    return make_option(axis, OmegaConf.to_container(load_option(own_options.folders(), axis, name), resolve=True))


def lacks(keys: Iterable[str]) -> str:
    """What is said of a config without `keys`."""
    return (
        f"the config lacks {', '.join(sorted(keys))}, which every run needs; leave ~ overrides out. If a run of an "
        "earlier version has it, use that version (env.json names its commit), or run it again"
    )


def spec(cfg: DictConfig, key: str) -> Any:
    """The spec under `key`, or the plain value if the node has no `_target_`."""
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
        if "required keyword-only argument" in str(error):
            raise ConfigError(lacks(f"{key}.{name}" for name in re.findall(r"'(\w+)'", str(error)))) from error
        raise ConfigError(f"{key} does not work with {given}: {error}") from error
