"""One run as validated specs: a frozen dataclass that refuses combinations of options that cannot work.

Nothing here imports torch, so every combination can be checked in seconds on any machine. Weights, engines and tasks
are built later, from the specs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qerl_bench.algo.base import Algorithm
from qerl_bench.algo.importance_sampling import ImportanceSampling
from qerl_bench.algo.kl import KLPenalty
from qerl_bench.aqn.base import Schedule
from qerl_bench.aqn.spec import NoiseSpec
from qerl_bench.engine.base import EngineSpec
from qerl_bench.eval.base import Evaluator
from qerl_bench.logger.base import LoggerSpec
from qerl_bench.lora.base import Adapter
from qerl_bench.model.base import Model
from qerl_bench.model.context import context_of
from qerl_bench.parallel import ParallelSpec
from qerl_bench.quant.base import BlockFormat, WeightFormat
from qerl_bench.quant.kv_kinds import kinds_of
from qerl_bench.quantizer.base import Quantizer
from qerl_bench.reward.base import RewardSource
from qerl_bench.task.base import Task
from qerl_bench.task.graded import check_reward
from qerl_bench.train.parallel_checks import check_exact, check_shard
from qerl_bench.train.rollout_checks import check_merging, check_sampler
from qerl_bench.train.spec import CheckpointSpec, OptimSpec, RolloutSpec, TrainSpec
from qerl_bench.train.trained_weights import check_trained_weights
from qerl_core.checks import (
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
from qerl_core.options import user_options
from qerl_core.options.files import options_of
from qerl_core.options.names import format_name, option
from qerl_core.process.cards import DeviceCheck


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
            self.root[:1] != "~" and "$" not in self.root,
            f"root={self.root}: only a shell expands ~ and $, no file, no quotes; write the path, or ${{oc.env:HOME}}",
        )
        require(
            self.optim.warmup_steps < max(1, self.steps),
            f"optim.warmup_steps must be below steps={self.steps}, got {self.optim.warmup_steps}; make it smaller",
        )
        check_trained_weights(
            self.quant, self.quantizer, self.lora, self.model, self.train, self.algo, self.kl, self.noise.where
        )
        self._check_algorithm()
        check_exact(self.parallel, self.engine.name, self.lora)
        self._check_other_formats()
        copies = {"rollout.quant": self.sampled, "eval.quant": self.answering, "eval.also": self.also_answering}
        others = [key for key, copy in copies.items() if copy and copy is not self]
        check_shard(self, self.engine.name, self.kernel, others)
        self._check_evaluations()
        shape = self.model.config() or {}
        self._check_lengths(context_of(shape))
        for key in filter(shape.__contains__, ("hidden_size", "intermediate_size")):
            self.quant.check_width(f"model={self.model.name}, {key}", shape[key])
        self.aqn.check_with(self.quant, self.noise)
        longest_completion = max(self.task.max_completion_tokens, getattr(self.eval, "max_tokens", None) or 0)
        self.engine.check_with(shape, self.model.dtype, self.lora.rank, longest_completion)
        kinds_of(self).check(self.engine.name, self.engine.kv_formats, shape, self.model.name)
        self.task.check_with(self.algo, self.eval.name, self.rollout.group_size)
        check_reward(self.task)
        self.reward.check_with(self.algo)
        self.lora.check_with(f"model={self.model.name}", shape)

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

    def _check_other_formats(self) -> None:
        """Formats that evaluations or rollouts have of their own."""
        rollout, engine_is_own = self.rollout, self.engine.name == "hf"
        check_sampler(rollout, self.quant, self.algo, self.engine.name, self.steps)
        others = [("eval.quant", self.answering), ("rollout.quant", self.sampled)]
        for key, other in [*others, *(("eval.also", one) for one in self.also_answering.values())]:
            require(
                other is self or engine_is_own,
                f"{key}={other.quant.name} samples from a copy of the policy with other weights, which only engine=hf "
                f"makes, got engine={self.engine.name}. Use engine=hf, or leave {key} out; a finished run can be "
                "evaluated in another format with any engine: qerl-bench eval RUN eval.quant=nvfp4",
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
    def answering(self) -> Experiment:
        """This experiment on the base that evaluations ask; itself if that is the one of training."""
        quant, quantizer = getattr(self.eval, "quant", None), getattr(self.eval, "quantizer", None)
        return self.in_format("eval.quant", quant, quantizer=quantizer)

    @property
    def also_answering(self) -> dict[str, Experiment]:
        """This experiment on each further base that the evaluation after the last step asks, by its `format_name`."""
        own = format_name(self.answering.quant.name, self.answering.quantizer.name)
        asked = {name: name.partition("+") for name in getattr(self.eval, "also", ()) if name != own}
        return {
            name: self.in_format("eval.also", quant, quantizer=quantizer or "rtn")
            for name, (quant, _, quantizer) in asked.items()
        }

    @property
    def sampled(self) -> Experiment:
        """This experiment on the base that rollouts are sampled from; itself if that is the one of training."""
        return self.in_format("rollout.quant", self.rollout.quant, self.rollout.activations)

    @property
    def merged_into(self) -> WeightFormat | None:
        """The format that base and adapter of this experiment's policy are rounded to together, in some passes."""
        own = self.rollout.merge and (self.train.merge != "none" or self.sampled is self)
        return self.sampled.quant if own else None

    def in_format(
        self, key: str, name: str | None, activations: str | None = None, quantizer: str | None = None
    ) -> Experiment:
        """This experiment on a base in the weight format `name`, without noise; itself if that is its base.

        Its codes are those of `quantizer`, and the inputs of packed layers are rounded to `activations`; None: as in
        training. Raises ConfigError, naming `key`, if that cannot be.
        """
        same = name in (None, self.quant.name)
        quant = self.quant if same else _chosen(key, "quant", name)
        if same and quantizer in (None, self.quantizer.name):
            return self if activations in (None, quant.activations) else self._on_base(key, quant, activations, None)
        chosen = None if quantizer is None else _chosen(key.replace("quant", "quantizer"), "quantizer", quantizer)
        require(
            chosen is None or quantizer == "rtn" or quant.bits_per_weight is not None,
            f"{key.replace('quant', 'quantizer')}={quantizer} chooses codes, and quant={quant.name} stores none. Leave "
            f"it out, or give a format that packs, {key}=nvfp4",
        )
        rescales = next((one for one in (self.quantizer, chosen) if one is not None and one.rescales), None)
        require(
            rescales is None or (key != "rollout.quant" and not getattr(self.lora, "train_norms", False)),
            f"{key}={quant.name} puts the adapter on another base, and quantizer={rescales and rescales.name} moves "
            "scales between the layers and norms that it was trained on: an evaluation can follow them, with "
            f"lora.train_norms=false, and rollouts cannot. Use quantizer=rtn, mse or gptq, or leave {key} out",
        )
        return self._on_base(key, quant, activations, chosen)

    def _on_base(
        self, key: str, quant: WeightFormat, activations: str | None, quantizer: Quantizer | None
    ) -> Experiment:
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
        quantizer = option("quantizer", "rtn") if quant.bits_per_weight is None else quantizer
        others = {"quant": None, "quantizer": None, "also": ()}
        left_out = {name: value for name, value in others.items() if getattr(self.eval, name, None)}
        own_eval = {"eval": replace(self.eval, **left_out)} if left_out else {}  # type: ignore[type-var]
        try:
            merge = self.rollout.merge and key == "rollout.quant"
            rollout = replace(self.rollout, quant=None, activations=None, merge=merge)
            train, aqn = replace(self.train, merge="none", gradients="bf16"), option("aqn", "none")
            chosen = quantizer or self.quantizer
            return replace(self, quant=quant, quantizer=chosen, aqn=aqn, rollout=rollout, train=train, **own_eval)
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

    def check_calibration(self) -> None:
        """Raise ConfigError unless each quantizer has its text, as far as that needs no tokenizer."""
        for one in {id(one): one for one in (self, self.answering, *self.also_answering.values())}.values():
            if one.quant.bits_per_weight is not None and one.quantizer.calibration is not None:
                one.quantizer.calibration.check(one.task)

    @property
    def run_dir(self) -> Path:
        return Path(self.root) / "runs" / self.name


def _chosen(key: str, axis: str, name: str | None) -> Any:
    """The option `name` of an axis. Raises ConfigError, naming `key`, if there is none."""
    options = options_of(user_options.folders(), axis)
    require(name in options, f"{key} must be null or one of {', '.join(sorted(options))}, got {name!r}")
    return option(axis, str(name))
