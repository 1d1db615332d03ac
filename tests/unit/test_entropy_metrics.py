"""The three entropies of a step, of the noisy policy, of the clean one and at T = 1, against loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from qerl_bench.engine.base import Sampling
from qerl_bench.model_setup import build_noise
from qerl_bench.train.batch import make_batch
from qerl_bench.train.update import make_optimizer, update
from qerl_core.metrics import compute
from qerl_core.records import Group

NO_RUN: Any = None  # a run directory is needed only if something is not finite


def _brute(policy: Any, rollouts: list[Any], temperature: float) -> float:
    """Mean over completion tokens of -sum p log p in FP64: a forward pass for each prefix, no cache, no padding."""
    entropies = []
    for rollout in rollouts:
        ids = rollout.prompt_ids + rollout.token_ids
        for end in range(len(rollout.prompt_ids), len(ids)):
            with torch.no_grad():
                logits = policy.model(input_ids=torch.tensor([ids[:end]])).logits[0, -1].double().numpy() / temperature
            p = np.exp(logits - logits.max())
            p /= p.sum()
            entropies.append(-sum(float(x) * np.log(float(x)) for x in p if x > 0))
    return float(np.mean(entropies))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("site", ["rollout", "rollout_and_training"])
def test_entropies_against_brute_force(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], temperature: float, site: str
) -> None:
    policy = make_policy(quant="bf16", sharp=True, adapted=True)
    words = ("aqn=constant", "aqn.level=0.3", "quant=bf16", f"noise.site={site}", f"rollout.temperature={temperature}")
    experiment = make_experiment(*words)
    noise = policy.noise = build_noise(experiment, policy.model, policy.structure, policy.layers)
    prompts = experiment.task.train_prompts(1, 2, 0)
    sampling = Sampling(samples=3, temperature=temperature, max_tokens=6, seed=1)
    with noise.for_rollout(1, 0):
        rollouts = experiment.engine.build(policy).generate(prompts, sampling)
        noisy = _brute(policy, rollouts, temperature)
    clean, clean_t1 = _brute(policy, rollouts, temperature), _brute(policy, rollouts, 1.0)
    assert len({len(rollout.token_ids) for rollout in rollouts}) > 1 or len(rollouts[0].token_ids) == 6
    rewards = [experiment.task.reward(rollout.prompt, rollout.text) for rollout in rollouts]
    groups = [Group(rollouts=rollouts[i : i + 3], rewards=rewards[i : i + 3]) for i in (0, 3)]
    sampled = compute.rollout_metrics(groups)
    batch = make_batch(
        [rollout.prompt_ids for rollout in rollouts],
        [rollout.token_ids for rollout in rollouts],
        policy.pad_id,
        policy.device,
        [rollout.logprobs for rollout in rollouts],
        torch.linspace(-1, 1, len(rollouts)),
    )
    optimizer = make_optimizer(policy, experiment.optim)
    trained = update(experiment, policy, optimizer, batch, NO_RUN, 1)
    assert sampled["entropy"] == pytest.approx(noisy, rel=1e-4)
    assert trained["entropy_clean"] == pytest.approx(clean, rel=1e-4)
    assert trained["entropy_t1"] == pytest.approx(clean_t1, rel=1e-4)
    assert abs(noisy - clean) > 0.01 * clean  # the test would notice if one stood in for the other
    assert (abs(clean - clean_t1) > 0.01 * clean) is (temperature != 1.0)


def test_entropy_bonus_is_the_gradient_of_the_mean_token_entropy(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any]
) -> None:
    """Advantages are zero, so the whole gradient is the bonus's: compare with finite differences of the brute force."""
    coefficient, moved = 0.5, 1e-3
    words = ("quant=bf16", "algo=dapo", f"train.entropy_coef={coefficient}", "train.micro_batch_tokens=400")
    experiment = make_experiment(*words)  # DAPO weighs every token alike
    policy = make_policy(quant="bf16", sharp=True, adapted=True)
    rollouts = experiment.engine.build(policy).generate(
        experiment.task.train_prompts(1, 1, 0), Sampling(samples=3, temperature=1.0, max_tokens=5, seed=1)
    )
    batch = make_batch(
        [rollout.prompt_ids for rollout in rollouts],
        [rollout.token_ids for rollout in rollouts],
        policy.pad_id,
        policy.device,
    )
    parameter = next(p for name, p in policy.model.named_parameters() if "layers.1.mlp.down_proj.lora_B" in name)
    gradients: list[torch.Tensor] = []
    optimizer = make_optimizer(policy, experiment.optim)
    optimizer.step = lambda *_: gradients.append(parameter.grad.clone())  # type: ignore[method-assign,union-attr]
    found = update(experiment, policy, optimizer, batch, NO_RUN, 1)
    before = _brute(policy, rollouts, 1.0)
    assert found["loss"] == pytest.approx(-coefficient * before, rel=1e-4)
    direction = gradients[0] / gradients[0].norm()
    clipped = min(1.0, experiment.optim.max_grad_norm / found["grad_norm"])
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            parameter.add_(sign * moved * direction)
        values.append(_brute(policy, rollouts, 1.0))
        with torch.no_grad():
            parameter.sub_(sign * moved * direction)
    slope = (values[0] - values[1]) / (2 * moved)
    assert (gradients[0] * direction).sum().item() == pytest.approx(-coefficient * slope * clipped, rel=0.01)
