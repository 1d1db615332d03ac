"""Our metrics under the names that TRL 1.16's GRPOTrainer gives to the same numbers, for `logger.names=trl`.

A row is here only if its metric is what TRL would log of the same completions, in one micro-batch on one process with
logging_steps of one step of ours; other splits change TRL's numbers and not ours. That is why `definitions.py`, which
reads numbers of others, gives fewer of them our names. UNLIKE has the metrics that look like one of TRL's and differ.
Nothing else has a name there. Read in TRL's sources; tests/unit/test_trl_names.py has every row on numbers by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qerl_core.options.fingerprint import flat
from qerl_studies.foreign.definitions import definition_of

TOKEN_RATIOS = ("grpo", "bnpo", "dr_grpo", "dapo", "reinforce_pp")  # algorithms whose ratio is one of each token


@dataclass(frozen=True)
class Alias:
    """`ours` is written as `theirs` in runs whose options have the values `only`. `of` is TRL's definition where
    `definitions.py` has none, and `but` what TRL's number may be in spite of it."""

    ours: str
    theirs: str
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    but: str = ""
    of: str = ""

    @property
    def text(self) -> str:
        """TRL's definition, and in what TRL's number may differ."""
        of = self.of or definition_of("trl", self.theirs).text
        return f"{of}; {self.but}" if self.but else of


ALIASES = (
    Alias("reward/mean", "reward"),
    Alias("reward/std", "reward_std"),
    Alias("reward/frac_zero_std", "frac_reward_zero_std"),  # and of equal rewards such as 0.7 too, which TRL misses
    Alias("reward/*", "rewards/*/mean", {"reward.name": ("task",)}),
    Alias("completions/mean_length", "completions/mean_length"),
    Alias("completions/truncated_frac", "completions/clipped_ratio"),
    Alias("entropy_clean", "entropy"),
    Alias("kl", "kl", {"kl.estimator": ("k3",)}, "as with use_bias_correction_kl=false: not times the ratio"),
    Alias("kl_to_base", "kl", {"kl.coef": (0,), "train.mismatch_share": (1,)}, "TRL logs none with beta=0"),
    Alias("clip_ratio/low_mean", "clip_ratio/low_mean", {"algo.name": TOKEN_RATIOS}),
    Alias("clip_ratio/high_mean", "clip_ratio/high_mean", {"algo.name": TOKEN_RATIOS}),
    Alias(
        "clip_ratio/high_mean",
        "cispo_clip_ratio",
        {"algo.name": ("cispo",)},
        of="1 for a token whose ratio is above the cap, with a positive advantage",
    ),
    Alias("mismatch/logp_abs_mean", "sampling/sampling_logp_difference/mean"),
    Alias(
        "mismatch/logp_abs_max",
        "sampling/sampling_logp_difference/max",
        of="largest |log-probability of trainer - of sampler| of a sampled token",
    ),
    Alias(
        "importance_sampling/weight_mean",
        "sampling/importance_sampling_ratio/mean",
        {"importance_sampling.level": ("token",)},
        of="weight of a token, trainer over sampler, after truncation or masking",
    ),
    Alias("loss", "loss", of="what was minimised, by loss_type, KL penalty and entropy bonus included"),
    Alias(
        "grad_norm", "grad_norm", {"train.updates_per_batch": (1,)}, of="of the whole gradient, before it is clipped"
    ),
    Alias("lr", "learning_rate", of="of the step's update"),
)
UNLIKE = {  # ours: the name of TRL's that it resembles, and why it is another number
    "entropy": ("entropy", "of the policy that sampled, with its noise; TRL's is of the trainer, as entropy_clean"),
    "entropy_t1": ("entropy", "at temperature 1; TRL's is at that of sampling"),
    "mismatch/kl": ("kl", "between sampler and trainer; TRL's is between policy and reference"),
    "accuracy": ("rewards/NAME/mean", "TRL has no right answers, only rewards; reward/correct is that reward"),
    "completions/tokens": ("num_tokens", "of one step; TRL's counts prompts too, from the beginning of the run"),
    "importance_sampling/weight_max": (
        "sampling/importance_sampling_ratio/max",
        "before truncation or masking; TRL's is after",
    ),
    "time/step_s": ("step_time", "the whole step; TRL's leaves out the optimizer"),
    "eval/accuracy_sampled": ("eval_reward", "right answers; TRL's is the mean reward of its evaluation"),
    "eval/accuracy_greedy": ("eval_reward", "greedy; TRL samples in its evaluation"),
    "validation/accuracy_sampled": ("eval_reward", "as eval/accuracy_sampled"),
    "validation/accuracy_greedy": ("eval_reward", "as eval/accuracy_greedy"),
}


def trl_names(config: Mapping[str, Any], prefix: str = "") -> Callable[[str], str]:
    """What turns the name of a metric of a run with this resolved config into TRL's, with `prefix`: "train/" where
    transformers' own loggers put it.

    What has no name there becomes qerl_NAME without a slash, so that no reader takes its last part for TRL's.
    """
    options = flat(dict(config))
    held = [row for row in ALIASES if all(options.get(key) in values for key, values in row.only.items())]
    names = {row.ours: row.theirs for row in held if not row.ours.endswith("*")}
    parts = [(row.ours[:-1], row.theirs) for row in held if row.ours.endswith("*")]

    def name(ours: str) -> str:
        if ours in names:
            return prefix + names[ours]
        for start, theirs in parts:
            if ours.startswith(start):
                return prefix + theirs.replace("*", ours.removeprefix(start))
        return f"qerl_{ours.replace('/', '_')}"

    return name
