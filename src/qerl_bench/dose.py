"""What noise does to a policy: entropy and KL of what it samples, for any model and any sigma.

`curve` is how noise is measured before training, with draws of its own: `qerl-bench gates` looks along it for the sigma
of aqn=matched. `first_dose` measures the noise of a run in the first step that has any, from the completions of that
step, and samples a few of its prompts once more without noise. What finds no memory there is left out: training needs
none of it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from qerl_bench.aqn.base import OpenLoop, SigmaController
from qerl_bench.aqn.constant import Constant
from qerl_bench.aqn.injector import NoiseInjector
from qerl_bench.aqn.spec import NoiseSpec
from qerl_bench.engine.base import RolloutEngine, Sampling
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model.policy import Policy
from qerl_bench.parallel import ALONE, World
from qerl_bench.train.batch import make_batch
from qerl_bench.train.reduced_sizes import Size
from qerl_bench.train.spec import RolloutSpec, Specs, TrainSpec
from qerl_bench.train.update import precision
from qerl_core.metrics.compute import entropy_ratio, mean, mean_entropy, mismatch_metrics
from qerl_core.process.out_of_memory import NO_MEMORY, shortage, whole_or_halves
from qerl_core.process.progress import bar, phase
from qerl_core.records import Group, Prompt, Rollout
from qerl_core.seeding import derive

log = logging.getLogger(__name__)
KL_TOKENS = 32_768  # of a forward pass, at most
COMPLETIONS = 64  # of a step that are sampled again without noise, about
WORDS = ((0.001, "changes next to nothing"), (0.01, "changes little"), (0.1, "changes something"))  # below a KL, nats


@dataclass(frozen=True, kw_only=True)
class Dose:
    """What a policy with noise of one sigma samples; `kl` is the metric mismatch/kl, to the policy without.

    `accuracy` is that of the task's rewards.
    """

    sigma: float
    entropy: float  # nats/token
    kl: float  # nats/token
    accuracy: float


def curve(
    experiment: Experiment,
    policy: Policy,
    engine: RolloutEngine,
    prompts: list[Prompt],
    sigmas: Sequence[float],
    draws: Sequence[int],
) -> list[Dose]:
    """The dose of each sigma, as a step would log it, over several draws; of equal random numbers for all sigmas."""
    rollout, task, doses = experiment.rollout, experiment.task, []
    for sigma in bar(sigmas, "measuring noise", len(sigmas), "sizes"):
        how = rollout, task.max_completion_tokens
        everything = noisy_samples(experiment.noise, policy, engine, prompts, sigma, draws, *how)
        kl = kl_to(experiment.train, rollout.temperature, policy, everything)
        right = mean([float(reward.correct) for reward in task.rewards(everything)])
        doses.append(Dose(sigma=sigma, entropy=mean_entropy(everything), kl=kl, accuracy=right))
    return doses


def noisy_samples(
    noise: NoiseSpec,
    policy: Policy,
    engine: RolloutEngine,
    prompts: list[Prompt],
    sigma: float,
    draws: Sequence[int],
    rollout: RolloutSpec,
    max_tokens: int,
) -> list[Rollout]:
    """A group of each prompt in each draw of noise; of equal random numbers for all sigmas."""
    quiet = policy.noise
    everything: list[Rollout] = []
    try:
        for draw in draws:
            policy.noise = injector(quiet, noise, sigma)
            with policy.noise.for_rollout(1, draw):
                engine.sync(prompts)
                everything += engine.generate(prompts, group_sampling(rollout, max_tokens, derive("probe", draw)))
    finally:
        policy.noise = quiet
    engine.sleep()
    return everything


def injector(like: NoiseInjector, spec: NoiseSpec, sigma: float) -> NoiseInjector:
    """Constant noise where `spec` puts it, in the norms or adapters of `like`; the same draws for every sigma."""
    controller = OpenLoop(Constant(name="constant", level=sigma), 1)
    once = replace(spec, accumulate="none")  # draws are compared with each other, not added up
    return NoiseInjector(once, controller, like.norms, like.offsets, like.final, derive("dose"), like.adapters)


def group_sampling(rollout: RolloutSpec, max_tokens: int, seed: int) -> Sampling:
    """How a group of completions of each prompt is sampled."""
    return Sampling(samples=rollout.group_size, temperature=rollout.temperature, max_tokens=max_tokens, seed=seed)


def kl_to(
    train: TrainSpec, temperature: float, policy: Policy, rollouts: Sequence[Rollout], planned: Size | None = None
) -> float:
    """The metric mismatch/kl of these rollouts: their sampler against the policy as it is now, at `temperature`.

    In the precision of training passes, of no more tokens at a time than their micro-batches, which a run has
    `planned`, or as few as there is memory for.
    """
    ids = [one.prompt_ids for one in rollouts], [one.token_ids for one in rollouts]
    batch = make_batch(*ids, policy.pad_id, policy.device, [one.logprobs for one in rollouts])
    tokens = min(KL_TOKENS, train.micro_batch_tokens or KL_TOKENS, KL_TOKENS if planned is None else planned.tokens)

    def both(rows: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The log-probabilities (tokens,) of trainer and sampler."""
        part = batch.rows(torch.tensor(rows, device=policy.device))
        stats = policy.token_stats(part.input_ids, part.mask, temperature)
        trained, sampled = (logprobs[part.mask].double().cpu() for logprobs in (stats.logprobs, part.sampler_logprobs))
        return [(trained, sampled)]

    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    scoring = phase("scoring completions", len(rollouts))
    with torch.no_grad(), precision(train, policy.device.type), scoring as scored:
        for rows in batch.micro_batches(tokens, torch.ones_like(batch.lengths, dtype=torch.bool)):
            parts += whole_or_halves(both, rows.tolist())
            scored.advance(len(rows))
    trainer, sampler = map(torch.cat, zip(*parts, strict=True))
    return mismatch_metrics(trainer, sampler)["mismatch/kl"]


def begins(controller: SigmaController, step: int) -> bool:
    """Whether `step` is the first with noise."""
    return controller.sigma(step) > 0 and not any(controller.sigma(before) > 0 for before in range(1, step))


def first_dose(
    specs: Specs,
    policy: Policy,
    engine: RolloutEngine,
    groups: Sequence[Group],
    sampling: Sampling,
    world: World = ALONE,
    planned: Size | None = None,
) -> dict[str, float]:
    """The metrics NOISE_DOSE of a step from its noisy `groups` and their `sampling`; the policy has no noise now.

    Without aqn/dose_kl if training will measure it, and without numbers that there is no memory for.
    """
    some = groups[: max(1, COMPLETIONS // sampling.samples)]
    noisy = [rollout for group in some for rollout in group.rollouts]
    metrics = policy.noise.scale_share()
    with nullcontext() if world.size > 1 else unless_short("aqn/dose_entropy"):  # ranks wait for what each samples
        quiet = engine.generate([group.rollouts[0].prompt for group in some], sampling)
        metrics["aqn/dose_entropy"] = entropy_ratio(noisy, quiet)
    engine.sleep()
    if not _kl_in_training(specs):
        with unless_short("aqn/dose_kl"):
            metrics["aqn/dose_kl"] = kl_to(specs.train, sampling.temperature, policy, noisy, planned)
    return metrics


@contextmanager
def unless_short(metric: str) -> Iterator[None]:
    """A shortage of memory in this block, which measures `metric`, is logged and ends nothing."""
    try:
        yield
    except Exception as error:
        said = shortage(error) or shortage(error.__cause__)
        if said is None:
            raise
        log.warning("%s is not measured: %s (%s)", metric, NO_MEMORY, said)


def _kl_in_training(specs: Specs) -> bool:
    """Whether training measures the KL that its noise makes, as mismatch/noise_kl."""
    noise = specs.noise
    return specs.importance_sampling.split_mismatch and noise.one_draw and noise.site != "rollout_and_training"


def trained_kl(specs: Specs, found: Mapping[str, float]) -> dict[str, float]:
    """aqn/dose_kl from the metrics of the step after training, if that measures it."""
    kl = found.get("mismatch/noise_kl", found["mismatch/kl"])
    return {"aqn/dose_kl": kl} if _kl_in_training(specs) else {}


def summary_line(step: int, found: Mapping[str, float]) -> str:
    """The dose in a line, from the metrics of the step."""
    share, kl, ratio = (found.get(f"aqn/{name}", math.nan) for name in ("sigma_share", "dose_kl", "dose_entropy"))
    scale = "" if math.isnan(share) else f" ({share:.1%} of the median norm scale)"
    words = "KL unknown" if math.isnan(kl) else f"KL {kl:.1g}"
    words += ", entropy unknown" if math.isnan(ratio) else f", entropy x{ratio:.2f}"
    verdict = next((words for below, words in WORDS if kl < below), "changes much")
    words += "" if math.isnan(kl) else f": {verdict}"
    changed = ", which changes no number" if found.get("aqn/norms_perturbed") == 0 else ""
    return f"first noise, step {step}: sigma {found['aqn/sigma']:g}{scale}{changed}: {words}"
