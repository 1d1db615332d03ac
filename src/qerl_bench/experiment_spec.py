"""One run as validated specs: a frozen dataclass that refuses combinations of options that cannot work.

Nothing here imports torch, so every combination can be checked in seconds on any machine. Weights, engines and tasks
are built later, from the specs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

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
from qerl_bench.logger.base import LoggerSpec
from qerl_bench.lora.base import Adapter
from qerl_bench.model.base import Model
from qerl_bench.model.context import context_of
from qerl_bench.options import user_options
from qerl_bench.options.files import options_of
from qerl_bench.options.names import option
from qerl_bench.parallel import ParallelSpec
from qerl_bench.process.cards import DeviceCheck
from qerl_bench.quant.base import BlockFormat, WeightFormat
from qerl_bench.quantizer.base import Quantizer
from qerl_bench.reward.base import RewardSource
from qerl_bench.task.base import Task
from qerl_bench.task.graded import check_reward
from qerl_bench.train.rollout_checks import check_merging, check_sampler
from qerl_bench.train.spec import CheckpointSpec, OptimSpec, RolloutSpec, TrainSpec


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
            steps=at_most(MAX_STEPS, count(0)),
            save_every=count(),
            save_on_term=flag,
            seed=count(0),
            device=DeviceCheck(),
            kernel=one_of("auto", "block", "modules", "torch"),
        )
        require(
            isinstance(self.root, str) and is_folder_name(self.name),
            "name must be a folder name below root/runs, of printable characters and up to 200 bytes between slashes, "
            f"and root a path, got name={self.name!r}, root={self.root!r}",
        )
        require(
            self.optim.warmup_steps < max(1, self.steps),
            f"optim.warmup_steps must be below steps={self.steps}, got {self.optim.warmup_steps}; make it smaller",
        )
        self._check_trained_weights()
        self._check_algorithm()
        self._check_parallel()
        self._check_other_formats()
        self._check_evaluations()
        shape = self.model.config() or {}
        self._check_lengths(context_of(shape))
        for key in ("hidden_size", "intermediate_size"):
            if key in shape:
                self.quant.check_width(f"model={self.model.name}, {key}", shape[key])
        self.aqn.check_with(self.quant, self.noise)
        longest_completion = max(self.task.max_completion_tokens, getattr(self.eval, "max_tokens", None) or 0)
        self.engine.check_with(shape, self.model.dtype, self.lora.rank, longest_completion)
        self.task.check_with(self.algo, self.eval.name, self.rollout.group_size)
        check_reward(self.task)
        self.reward.check_with(self.algo)
        self.lora.check_with(f"model={self.model.name}", shape)

    def _check_trained_weights(self) -> None:
        """What is trained: an adapter on packed or unpacked weights, or the unpacked weights themselves."""
        packed, full_training = self.quant.bits_per_weight is not None, self.lora.rank == 0
        require(
            not (full_training and packed),
            f"lora=none trains every weight, but the packed weights of quant={self.quant.name} cannot be trained. Use "
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
            full_training or not self.train.autocast,
            "train.autocast=true computes with rounded copies of weights that are trained in FP32, and beside an "
            "adapter none are. Use train.autocast=false, or lora=none",
        )
        require(
            packed or self.quantizer.name == "rtn",
            f"quantizer={self.quantizer.name} chooses codes, but quant={self.quant.name} stores none. Leave "
            "quantizer=rtn, or use a format that packs, such as quant=nvfp4",
        )
        require(
            self.train.updates_per_batch == 1 or full_training or self.lora.dropout == 0,
            f"train.updates_per_batch={self.train.updates_per_batch} compares log-probabilities between updates, and "
            f"lora.dropout={self.lora.dropout} would change them at random. Use lora.dropout=0",
        )
        require(
            self.kl.coef == self.kl.every == 0 or (not full_training and self.algo.on_policy),
            "kl.coef > 0 or kl.every > 0 compares completions with the base, the policy without its adapter. It "
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
        rollout, engine_is_own = self.rollout, self.engine.name == "hf"
        check_sampler(rollout, self.quant, self.algo, self.engine.name, self.steps)
        for key, name in {"eval.quant": self.eval_format, "rollout.quant": rollout.quant}.items():
            require(
                self.in_format(key, name, rollout.activations if key == "rollout.quant" else None) is self
                or engine_is_own,
                f"{key}={name} samples from a copy of the policy with other weights, which only engine=hf makes, got "
                f"engine={self.engine.name}. Use engine=hf, or leave {key} out; a finished run can be evaluated in "
                f"another format with any engine: qerl-bench eval RUN eval.quant=nvfp4",
            )
        check_merging(rollout, self.train, self.lora, self.sampled.quant, self.quantizer, self.engine.name)

    def _check_evaluations(self) -> None:
        require(
            self.steps > 0 or self.eval.name != "none",
            "steps=0 trains nothing but evaluates the base, and eval=none evaluates nothing: choose eval=task, or more "
            "steps",
        )
        late = [step for step in getattr(self.eval, "at", ()) if step >= self.steps]
        require(
            not late,
            f"eval.at has {late}, which are not before the last of steps={self.steps}, after which there is an "
            "evaluation anyway. Leave them out, or raise steps",
        )

    @property
    def eval_format(self) -> str | None:
        """The weight format that evaluations ask for; None for that of training."""
        return getattr(self.eval, "quant", None)

    @property
    def sampled(self) -> Experiment:
        """This experiment on the base that rollouts are sampled from; itself if that is the one of training."""
        return self.in_format("rollout.quant", self.rollout.quant, self.rollout.activations)

    @property
    def merged_into(self) -> WeightFormat | None:
        """The format that base and adapter of this experiment's policy are rounded to together, in some passes."""
        own = self.rollout.merge and (self.train.merge != "none" or self.sampled is self)
        return self.sampled.quant if own else None

    def in_format(self, key: str, name: str | None, activations: str | None = None) -> Experiment:
        """This experiment on a base in the weight format `name`, without noise; itself if that is its format.

        The inputs of packed layers are rounded to `activations`; None: as in training. Raises ConfigError, naming
        `key`, if that cannot be.
        """
        if name in (None, self.quant.name):
            return (
                self if activations in (None, self.quant.activations) else self._on_base(key, self.quant, activations)
            )
        formats = options_of(user_options.folders(), "quant")
        require(name in formats, f"{key} must be null or one of {', '.join(sorted(formats))}, got {name!r}")
        require(
            not self.quantizer.rescales,
            f"{key}={name} puts the adapter on another base, and quantizer={self.quantizer.name} moves scales between "
            f"the layers that the adapter was trained on. Use quantizer=rtn, mse or gptq, or leave {key} out",
        )
        return self._on_base(key, option("quant", str(name)), activations)

    def _on_base(self, key: str, quant: WeightFormat, activations: str | None) -> Experiment:
        require(
            self.train.merge == "none" or key == "rollout.quant",
            f"{key}={quant.name} puts the adapter on another base, and with train.merge={self.train.merge} it was "
            f"trained in one rounded weight with its own. Leave {key} out",
        )
        if isinstance(quant, BlockFormat):
            quant = replace(quant, activations=activations or self.quant.activations)
        require(
            activations in (None, quant.activations),
            f"rollout.activations={activations} rounds the inputs of packed layers, and quant={quant.name} packs none. "
            "Sample from packed weights, rollout.quant=..., or leave rollout.activations out",
        )
        quantizer = self.quantizer if quant.bits_per_weight is not None else option("quantizer", "rtn")
        own_eval = {} if self.eval_format is None else {"eval": replace(self.eval, quant=None)}  # type: ignore[type-var]
        try:
            merge = self.rollout.merge and key == "rollout.quant"
            rollout = replace(self.rollout, quant=None, activations=None, merge=merge)
            train, aqn = replace(self.train, merge="none"), option("aqn", "none")
            return replace(self, quant=quant, quantizer=quantizer, aqn=aqn, rollout=rollout, train=train, **own_eval)
        except ConfigError as error:
            raise ConfigError(f"{key}={quant.name}: {error}") from error

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
