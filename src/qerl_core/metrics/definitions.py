"""Every metric that a run writes: name, unit and definition. compute.py has the functions that compute them.

A mean is taken once over all tokens or completions of a step; it is never a mean of means over micro-batches or
sequences. The definitions are stored with each run, and runs with different definitions are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    unit: str
    definition: str


ROLLOUT = {  # of every step that samples, what training measures on its samples too
    "reward/mean": Metric("reward", "mean total reward of the step's completions"),
    "reward/std": Metric("reward", "standard deviation of the total reward over the step's completions (n - 1)"),
    "reward/frac_zero_std": Metric("share", "groups whose completions all got the same reward: no learning signal"),
    "accuracy": Metric("share", "completions with the correct answer"),
    "entropy": Metric("nats/token", "of the policy that sampled, noise in, at rollout temperature; full vocabulary"),
    "entropy/top20": Metric("nats/token", "mean entropy of the fifth of the step's tokens that have most of it"),
    "entropy/rest": Metric("nats/token", "mean entropy of the other tokens"),
    "completions/tokens": Metric("tokens", "completion tokens sampled"),
    "completions/mean_length": Metric("tokens", "mean completion length, stop token included"),
    "completions/truncated_frac": Metric("share", "completions cut at the token limit"),
    "mismatch/kl": Metric(
        "nats/token", "KL(sampler || trainer), k3 estimate: mean of exp(d) - d - 1, d = trainer - sampler"
    ),
    "mismatch/logp_abs_mean": Metric("nats", "mean |trainer - sampler| log-probability of the sampled tokens"),
    "mismatch/logp_abs_max": Metric("nats", "largest |trainer - sampler| log-probability of the sampled tokens"),
    "mismatch/ess": Metric("share", "(sum w)^2 / (n sum w^2) over tokens, w = exp(trainer - sampler); 1 = no mismatch"),
    "mismatch/ess_sequence": Metric("share", "the same over completions, w = exp(their sum of trainer - sampler)"),
    "clip_ratio/low_mean": Metric(
        "share", "tokens with ratio < 1 - epsilon_low and negative advantage, over all updates"
    ),
    "clip_ratio/high_mean": Metric(
        "share", "tokens with ratio > 1 + epsilon_high and positive advantage, over all updates"
    ),
    "completions/garbled_frac": Metric("share", "completions with broken tags, or tokens repeated over and over"),
    "dynamic/refills": Metric("count", "rounds of sampling after the first (dynamic sampling)"),
    "dynamic/groups_kept": Metric("count", "groups that are trained on"),
    "aqn/sigma": Metric(
        "norm scale", "noise standard deviation that the schedule asks for; a share of the weights on adapters"
    ),
    "aqn/sigma_realised": Metric(
        "norm scale", "rms change of the scales, as stored (noise.relative: over |scale|); or of adapters, as aqn/sigma"
    ),
    "aqn/norms_perturbed": Metric("count", "norms, or adapters, in which at least one number changed"),
    "aqn/scales_changed": Metric(
        "share", "norm scales, or numbers of adapters, that changed: adding in BF16 rounds small noise away"
    ),
    "time/rollout_s": Metric("s", "sampling"),
    "time/reward_s": Metric("s", "judging the completions"),
    "time/sync_s": Metric("s", "bringing weights and noise to the sampler"),
    "speed/rollout_tok_s": Metric("tokens/s", "completion tokens over time/rollout_s"),
    "memory/rollout_gib": Metric("GiB", "peak during sampling: of the GPU's allocations, or of the process on a CPU"),
}
# With engine=vllm, which has its own copy of the weights. Each is the mean of |difference| between log-probabilities of
# prompt tokens at temperature 1, with the noise in.
WEIGHT_SYNC = {
    "sync/adapter_effect": Metric("nats", "trainer with its adapter against trainer without"),
    "sync/adapter_effect_engine": Metric("nats", "engine with the adapter against engine without"),
    "sync/gap": Metric("nats", "engine against trainer, both with the adapter"),
    "sync/gap_base": Metric("nats", "engine against trainer, both without the adapter"),
    "sync/norms_changed": Metric(
        "count", "norms whose scale in every worker of the engine differs from the checkpoint's"
    ),
}
GPU_MEMORY = {  # on a GPU
    "memory/rollout_reserved_gib": Metric("GiB", "peak during sampling of what PyTorch holds, in use or not"),
    "memory/train_reserved_gib": Metric("GiB", "peak during training of what PyTorch holds, in use or not"),
}
VLLM_MEMORY = {  # with engine=vllm on a GPU
    "memory/device_rollout_gib": Metric("GiB", "in use on the GPU by all processes at the end of sampling"),
    "memory/device_train_gib": Metric("GiB", "in use on the GPU by all processes before training, the engine asleep"),
}
ENGINE_HF = {  # with engine=hf on a GPU, if it decodes from CUDA graphs
    "rollout/rows_computed": Metric("count", "rows of all decoding steps, done and idle ones included"),
    "rollout/preempted": Metric("count", "completions that started again because no page of the cache was left"),
    "time/recording_s": Metric("s", "recording CUDA graphs, a part of time/rollout_s"),
    "memory/cache_gib": Metric("GiB", "keys and values: pages that were reserved"),
    "memory/cache_used_gib": Metric("GiB", "keys and values: the most pages that held some at a time"),
}
ACTIVATIONS = {  # with quant.activations or rollout.activations other than none
    "activations/underflow": Metric("share", "inputs of packed layers, not zero, that training passes round to zero"),
    "activations/underflow_rollout": Metric("share", "the same while sampling; of several GPUs the one with most"),
    "gradients/underflow": Metric("share", "the same of gradients of their outputs; with `train.gradients=fp8`"),
}
KEYS_VALUES = {  # with train.kv, and with rollout.kv
    f"kv/{name}{suffix}": Metric("share", f"{definition} {when}")
    for suffix, when in (("", "in passes of training"), ("_rollout", "while sampling; of several GPUs the most"))
    for name, definition in (
        ("underflow", "numbers in keys and values, not zero themselves, that are rounded to zero"),
        ("scale_fallback", "scales of tokens and heads that are 1 or an epsilon, as their largest number gives none,"),
    )
}
MERGED = {  # with rollout.merge
    "merge/update_kept": Metric(
        "share",
        "<Q(W + D) - Q(W), D> / <D, D> over the adapted weights, D = s B A: what rounding leaves of the adapter",
    ),
}
LAGGED = {"rollout/lag": Metric("steps", "by which the adapter that sampled is behind the trained one")}
NOISE_DOSE = {  # of the first step with noise: dose.py
    "aqn/dose_kl": Metric(
        "nats/token", "mismatch/noise_kl or, where training does not measure that, mismatch/kl of the completions below"
    ),
    "aqn/dose_entropy": Metric(
        "ratio", "entropy of the step's first completions, about 64, over that of the same sampled without noise"
    ),
    "aqn/sigma_share": Metric(
        "share",
        "aqn/sigma over the median size of the norm scales that get noise; not on adapters, nor with sigmas by norm",
    ),
    "time/dose_s": Metric("s", "sampling without noise for aqn/dose_entropy"),
}
NOISE_CONTROLLER = {  # with aqn=entropy
    "aqn/entropy_target": Metric("nats/token", "what the entropy of this step should have been"),
    "aqn/entropy_smoothed": Metric("nats/token", "the measured entropy as the controller sees it"),
    "aqn/sigma_next": Metric("norm scale", "the decision: standard deviation of the next step's noise"),
    "aqn/saturated": Metric("-", "1 if more than sigma_max is wanted, -1 if less than sigma_min, else 0"),
}
TRAIN = {  # of every step, with algo=sft too
    "train/micro_batches": Metric("count", "forward passes that training made of the batch, for one update"),
    "train/taught_frac": Metric(
        "share", "completion tokens trained on whose completion was in a backward pass: its loss can have a gradient"
    ),
    "loss": Metric("-", "the objective over the whole step, KL penalty included; mean over its updates"),
    "grad_norm": Metric("-", "global gradient norm before clipping; mean over the step's updates"),
    "updates_skipped": Metric("count", "updates of the step that were not applied because something was not finite"),
    "lr": Metric("-", "learning rate of this step"),
    "packed_share": Metric("share", "weights of the matrices in the blocks that are stored in the format of quant"),
    "entropy_clean": Metric("nats/token", "as entropy on the same tokens, noise off, before the update"),
    "entropy_t1": Metric("nats/token", "as entropy_clean at temperature 1"),
    "time/train_s": Metric("s", "forward, backward and optimiser"),
    "time/idle_s": Metric("s", "the rest of time/step_s: metrics, records, making the batch; a GPU has nothing to do"),
    "time/step_s": Metric("s", "the whole step, logging and checkpoint excluded"),
    "speed/train_tok_s": Metric("tokens/s", "prompt and completion tokens of all sequences over time/train_s"),
    "memory/train_gib": Metric("GiB", "peak during training, measured as memory/rollout_gib"),
    "memory/peak_gib": Metric("GiB", "peak of the step"),
}
# Three policies score the same sampled tokens: the engine (noise in), the trainer with the sampler's noise, and the
# trainer as it trains. The first two differ by their kernels, the last two by the noise.
# If that takes a pass of its own, it is made for a sample of the micro-batches (train.mismatch_share).
MISMATCH_SPLIT = {  # only with importance_sampling.split_mismatch and one draw of noise to a step
    "mismatch/kernel_kl": Metric("nats/token", "mismatch/kl of engine and trainer, same noise in both"),
    "mismatch/kernel_logp_abs_max": Metric("nats", "mismatch/logp_abs_max of engine and trainer, same noise in both"),
    "mismatch/kernel_ess": Metric("share", "mismatch/ess of engine and trainer, same noise in both"),
    "mismatch/noise_kl": Metric("nats/token", "mismatch/kl of the trainer, with the sampler's noise and as it trains"),
    "mismatch/noise_logp_abs_max": Metric(
        "nats", "mismatch/logp_abs_max of the trainer, with the sampler's noise and as it trains"
    ),
    "mismatch/noise_ess": Metric("share", "mismatch/ess of the trainer, with the sampler's noise and as it trains"),
    "mismatch/measured_frac": Metric("share", "completion tokens trained on that mismatch/kernel_* and noise_* are of"),
}
ROUTING = {  # with experts, if the trainer makes a pass with noise and one without; as for MISMATCH_SPLIT
    "router/changed_frac": Metric(
        "share",
        "experts of a completion token that the noise replaces by others, in the layers whose router reads a norm",
    ),
}
POSITIONS = tuple(4**power for power in range(8))  # the first token of each bin, counted from 1 in its completion
BY_POSITION = {  # bins without tokens are left out
    f"mismatch/kl_by_position_{first}": Metric("nats/token", f"mismatch/kl of the tokens of a completion from {which}")
    for first, end in zip(POSITIONS, (*POSITIONS[1:], None), strict=True)
    for which in [f"{first} on" if end is None else f"{first} to {end - 1}"]
}
BY_SIGN = {  # the four sum to 1; left out where all gaps are those of rounding
    f"mismatch/kl_frac_{sign}_{side}": Metric(
        "share", f"of the sum behind mismatch/kl over tokens of advantage not 0: {sign} ones, trainer {side} sampler"
    )
    for sign in ("negative", "positive")
    for side in ("below", "above")
}
IMPORTANCE_SAMPLING = {  # only with importance_sampling.mode other than none
    "importance_sampling/weight_mean": Metric(
        "-", "mean over tokens of the importance weight that multiplied the loss"
    ),
    "importance_sampling/weight_max": Metric("-", "largest importance weight before truncation or masking"),
    "importance_sampling/changed_frac": Metric("share", "tokens whose importance weight was truncated or masked"),
}
KL = {  # only with kl.coef > 0
    "kl": Metric(
        "nats/token", "policy against the base without its adapter, by kl.estimator, unweighted, over all updates"
    ),
}
KL_TO_BASE = {  # every kl.every steps
    "kl_to_base": Metric(
        "nats/token",
        "KL(policy || base), policy and adapter without noise, k3 estimate on the sampled tokens of a share of "
        "train.mismatch_share of the micro-batches",
    ),
}
_PARTS = {
    "_stderr_questions": "the part of it that more samples would not remove",
    "_stderr_sampling": "the part of it that comes from sampling the answers",
}


def _score(name: str, definition: str, parts: dict[str, str] | None = None) -> dict[str, Metric]:
    said = {"": definition, "_stderr": "its standard error over questions", **(parts or {})}
    return {f"{name}{end}": Metric("share", text) for end, text in said.items()}


EVAL = {
    **_score("eval/accuracy_greedy", "held-out questions answered correctly by greedy decoding"),
    "eval/accuracy_greedy_truncated": Metric("share", "greedy completions cut at the token limit"),
    "eval/accuracy_greedy_format_failed": Metric("share", "greedy completions without an answer in task.answer_format"),
    **_score("eval/accuracy_sampled", "held-out questions answered correctly, mean over samples (pass@1)", _PARTS),
    "eval/accuracy_sampled_truncated": Metric("share", "sampled completions cut at the token limit"),
    "eval/accuracy_sampled_format_failed": Metric(
        "share", "sampled completions without an answer in task.answer_format"
    ),
    **_score("eval/majority", "questions whose most frequent answer of all samples is correct (maj@n)"),
    **_score("eval/pass_at_k", "questions that one of eval.k samples answers correctly, unbiased (pass@k)"),
}
VALIDATION = {  # at a few steps, on the first of the held-out questions: eval/validation.py
    "validation/questions": Metric("questions", "held-out questions of this point"),
    **_score("validation/accuracy_greedy", "as eval/accuracy_greedy, of these questions"),
    **_score("validation/accuracy_sampled", "as eval/accuracy_sampled, of these questions, up to four samples"),
}


def _gains(of: str, where: str) -> dict[str, Metric]:
    stderr = {"_stderr": "standard error of the paired difference"}
    return {
        f"eval/gain_{where}{mode}{part}": Metric("share", said)
        for mode, more in (("greedy", stderr), ("sampled", stderr | _PARTS))
        for part, said in {"": f"eval/{of}_{mode} minus that of step 0, the same questions", **more}.items()
    }


EVAL_GAIN = _gains("accuracy", "")  # at every evaluation after that of step 0, which is of the quantized base
# Of tasks with an answer format whose gold answers are numbers: right if the last number of a finished completion is.
LENIENT = {
    **_score("eval/lenient_greedy", "held-out questions whose finished greedy completion ends in the right number"),
    **_score("eval/lenient_sampled", "the same of sampled completions, mean over samples", _PARTS),
    **_score("validation/lenient_greedy", "as eval/lenient_greedy, of the questions of that point"),
    **_score("validation/lenient_sampled", "as eval/lenient_sampled, of these questions, up to four samples"),
}
LENIENT_GAIN = _gains("lenient", "lenient_")
# With eval=lm_eval eval.protocol=standard: lm-eval's filters for correct answers.
_LM_EVAL_FILTERS = {
    "strict_match": "gsm8k: number behind ####",
    "flexible_extract": "gsm8k: last number in the text, or `...` or `$$` behind it",
    "math_verify": "minerva_math500: answer that math-verify finds in the text",
}
LM_EVAL = {
    f"eval/{name}{suffix}": Metric("share", definition)
    for mode, what in _LM_EVAL_FILTERS.items()
    for name, suffix, definition in (
        (f"lm_eval_{mode}", "", f"correct by lm-eval's {what}"),
        (f"lm_eval_{mode}", "_stderr", "its standard error over questions"),
        (f"lm_eval_{mode}", "_truncated", "completions cut at the token limit"),
        (f"lm_eval_{mode}", "_format_failed", "completions in which lm-eval finds no answer"),
        (f"gain_{mode}", "", f"eval/lm_eval_{mode} minus that of step 0, the same questions"),
        (f"gain_{mode}", "_stderr", "standard error of the paired difference"),
    )
}
IN_FORMATS = {  # FORMAT is one of eval.also
    f"eval/in/FORMAT/{name.removeprefix('eval/')}": Metric(metric.unit, f"{name}, answered in that format")
    for name, metric in (EVAL | LENIENT).items()
    if name.startswith("eval/")
}
TABLES = {  # what makes a run write them: the metrics
    "Steps that sample": ROLLOUT,
    "Steps that train": TRAIN,
    "Sampler, trainer and noise apart (`importance_sampling.split_mismatch`, one draw of noise a step)": MISMATCH_SPLIT,
    "Weights on the loss (`importance_sampling.mode` other than none)": IMPORTANCE_SAMPLING,
    "Mismatch by position (bins that have tokens)": BY_POSITION,
    "Mismatch by the signs of advantage and gap (if there is some)": BY_SIGN,
    "Penalty (`kl.coef` above 0)": KL,
    "Distance to the base (every `kl.every` steps)": KL_TO_BASE,
    "First step with noise": NOISE_DOSE,
    "Closed loop (`aqn=entropy`)": NOISE_CONTROLLER,
    "Experts (models that route tokens, a pass with noise and one without)": ROUTING,
    "Evaluation before the first step and after the last": EVAL,
    "Gain over the packed base (every evaluation after the first)": EVAL_GAIN,
    "Held-out accuracy during training (`eval.every`)": VALIDATION,
    "The last number of a completion (tasks with `task.answer_format` and numbers as answers)": LENIENT,
    "Gain of that over the packed base (every evaluation after the first)": LENIENT_GAIN,
    "Answers in further weight formats, after the last step (`eval.also`)": IN_FORMATS,
    "`eval=lm_eval eval.protocol=standard`": LM_EVAL,
    "Copy of the weights (`engine=vllm`)": WEIGHT_SYNC,
    "Rounded inputs of packed layers (`quant.activations`, `rollout.activations`)": ACTIVATIONS,
    "Rounded keys and values (`train.kv`, `rollout.kv`)": KEYS_VALUES,
    "Base and adapter rounded together while sampling (`rollout.merge`)": MERGED,
    "Sampling with an earlier adapter (`rollout.lag` above 0)": LAGGED,
    "GPU": GPU_MEMORY,
    "vLLM on a GPU": VLLM_MEMORY,
    "CUDA graphs of `engine=hf` on a GPU": ENGINE_HF,
}


def definitions() -> dict[str, str]:
    """Unit and definition of every metric, as stored in env.json."""
    return {name: f"{metric.unit}: {metric.definition}" for table in TABLES.values() for name, metric in table.items()}
