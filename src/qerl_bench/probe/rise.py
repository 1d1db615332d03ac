"""The noise that raises the entropy of a policy by a wanted share, and what it does to other prompts and draws."""

from __future__ import annotations

from typing import Any

from qerl_bench.dose import curve, noisy_samples
from qerl_bench.engine.base import RolloutEngine
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model.policy import Policy
from qerl_bench.probe.bisection import find_sigma
from qerl_bench.probe.parts import Keep, anew
from qerl_bench.run_setup import on_base_of
from qerl_core.metrics.compute import mean_entropy
from qerl_core.seeding import derive

START = 0.1  # sigma that is tried first


def sigma_of_rise(
    experiment: Experiment,
    policy: Policy,
    engine: RolloutEngine,
    rise: float,
    prompts: int,
    draws: int,
    keep: Keep = anew,
) -> dict[str, Any]:
    """The sigma that raises the entropy of what the rollouts of `experiment` sample by `rise`, None if none does.

    Found with groups of `prompts` questions in each of `draws`; `rise`, `kl` and `entropy`, which is the one without
    noise, are measured with as many others. `keep` has what is known of a search that was stopped.
    """
    noise, how = experiment.noise, (experiment.rollout, experiment.task.max_completion_tokens)
    search, check = (experiment.task.train_prompts(step, prompts, derive("dose")) for step in (1, 2))
    with on_base_of(experiment.sampled, "rollout.quant", experiment, policy, engine) as (_, sampler):

        def entropy(sigma: float) -> float:
            def sampled() -> float:
                return mean_entropy(noisy_samples(noise, policy, sampler, search, sigma, range(draws), *how))

            return keep(f"entropy at sigma {sigma!r}", sampled)

        quiet = entropy(0.0)
        sigma, tried = find_sigma(lambda sigma: entropy(sigma) / quiet - 1, rise, START)
        if sigma is None:
            return {"sigma": None, "tried": tried}
        before, noisy = curve(experiment, policy, sampler, check, [0.0, sigma], range(draws, 2 * draws))
    rise_on_others = noisy.entropy / before.entropy - 1
    return {"sigma": sigma, "rise": rise_on_others, "kl": noisy.kl, "entropy": before.entropy, "tried": tried}
