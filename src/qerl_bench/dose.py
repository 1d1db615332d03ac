"""What noise does to a policy: entropy, KL and accuracy of what it samples, for any model and any sigma.

`curve` is how noise is measured before training, with draws of its own: `qerl-bench gates` looks along it for the sigma
of aqn=matched. `first_dose` measures the noise of a run in the first step that has any, from the completions of that
step, and samples a few of its prompts once more without noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from qerl_bench.aqn.base import OpenLoop, SigmaController
from qerl_bench.aqn.constant import Constant
from qerl_bench.aqn.injector import NoiseInjector
from qerl_bench.aqn.spec import NoiseSpec
from qerl_bench.engine.base import RolloutEngine, Sampling
from qerl_bench.experiment_spec import Experiment
from qerl_bench.metrics import entropy_ratio, mean, mean_entropy, mismatch_metrics
from qerl_bench.model.policy import Policy
from qerl_bench.records import Group, Prompt, Rollout
from qerl_bench.seeding import derive
from qerl_bench.train.batch import make_batch

KL_TOKENS = 32_768  # of a forward pass
COMPLETIONS = 64  # of a step that are sampled again without noise, about
WORDS = ((0.001, "changes next to nothing"), (0.01, "changes little"), (0.1, "changes something"))  # below a KL, nats


@dataclass(frozen=True, kw_only=True)
class Dose:
    """What a policy with noise of one sigma samples; `kl` is the metric mismatch/kl, to the policy without."""

    sigma: float
    entropy: float  # nats/token
    kl: float  # nats/token
    accuracy: float | None  # share of completions


def curve(
    experiment: Experiment,
    policy: Policy,
    engine: RolloutEngine,
    prompts: list[Prompt],
    sigmas: Sequence[float],
    draws: Sequence[int],
    graded: bool = False,
) -> list[Dose]:
    """The dose of each sigma, as a step would log it, over several draws; of equal random numbers for all sigmas."""
    rollout, quiet = experiment.rollout, policy.noise
    doses = []
    for sigma in sigmas:
        everything: list[Rollout] = []
        try:
            for draw in draws:
                policy.noise = injector(quiet, experiment.noise, sigma)
                with policy.noise.for_rollout(1, draw):
                    engine.sync(prompts)
                    sampling = probe_sampling(experiment, rollout.group_size, rollout.temperature, draw)
                    everything += engine.generate(prompts, sampling)
        finally:
            policy.noise = quiet
        engine.sleep()
        rewards = experiment.task.rewards(everything) if graded else []
        accuracy = mean([float(reward.correct) for reward in rewards]) if graded else None
        kl = kl_to(experiment, policy, everything)
        doses.append(Dose(sigma=sigma, entropy=mean_entropy(everything), kl=kl, accuracy=accuracy))
    return doses


def injector(like: NoiseInjector, spec: NoiseSpec, sigma: float) -> NoiseInjector:
    """Constant noise where `spec` puts it, in the norms or adapters of `like`; the same draws for every sigma."""
    controller = OpenLoop(Constant(name="constant", level=sigma), 1)
    once = replace(spec, accumulate="none")  # draws are compared with each other, not added up
    return NoiseInjector(once, controller, like.norms, like.offsets, like.final, derive("dose"), like.adapters)


def probe_sampling(experiment: Experiment, samples: int, temperature: float, draw: int | str) -> Sampling:
    longest = experiment.task.max_completion_tokens
    return Sampling(samples=samples, temperature=temperature, max_tokens=longest, seed=derive("probe", draw))


def kl_to(experiment: Experiment, policy: Policy, rollouts: Sequence[Rollout]) -> float:
    """The metric mismatch/kl of these rollouts: their sampler against the policy as it is now."""
    sampler, trainer = [], []
    ids = [one.prompt_ids for one in rollouts], [one.token_ids for one in rollouts]
    batch = make_batch(*ids, policy.pad_id, policy.device, [one.logprobs for one in rollouts])
    for rows in batch.micro_batches(KL_TOKENS, torch.ones_like(batch.lengths, dtype=torch.bool)):
        part = batch.rows(rows)
        with torch.no_grad():
            stats = policy.token_stats(part.input_ids, part.mask, experiment.rollout.temperature)
        trainer.append(stats.logprobs[part.mask].double().cpu())
        sampler.append(part.sampler_logprobs[part.mask].double().cpu())
    return mismatch_metrics(torch.cat(trainer), torch.cat(sampler))["mismatch/kl"]


def begins(controller: SigmaController, step: int) -> bool:
    """Whether `step` is the first with noise."""
    return controller.sigma(step) > 0 and not any(controller.sigma(before) > 0 for before in range(1, step))


def first_dose(
    experiment: Experiment, policy: Policy, engine: RolloutEngine, groups: Sequence[Group], sampling: Sampling
) -> dict[str, float]:
    """The metrics NOISE_DOSE of a step from its noisy `groups` and their `sampling`; the policy has no noise now.

    Without aqn/dose_kl if training will measure it, as mismatch/noise_kl.
    """
    few = groups[: max(1, COMPLETIONS // sampling.samples)]
    noisy = [rollout for group in few for rollout in group.rollouts]
    quiet = engine.generate([group.rollouts[0].prompt for group in few], sampling)
    engine.sleep()
    noise = experiment.noise
    split = experiment.importance_sampling.split_mismatch and noise.one_draw and noise.site != "rollout_and_training"
    kl = {} if split else {"aqn/dose_kl": kl_to(experiment, policy, noisy)}
    return {"aqn/dose_entropy": entropy_ratio(noisy, quiet), **policy.noise.scale_share(), **kl}


def in_words(step: int, found: Mapping[str, float]) -> str:
    """The dose in a line, from the metrics of the step."""
    share, kl = found.get("aqn/sigma_share"), found["aqn/dose_kl"]
    scale = "" if share is None else f" ({share:.1%} of the median norm scale)"
    verdict = next((words for below, words in WORDS if kl < below), "changes much")
    return (
        f"first noise, step {step}: sigma {found['aqn/sigma']:g}{scale}: KL {kl:.1g}, entropy "
        f"x{found['aqn/dose_entropy']:.2f}: {verdict}"
    )
