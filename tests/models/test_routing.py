"""Which experts a forward pass chooses, and how many of these choices noise changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qerl_bench.config import build, compose
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model.policy import Policy
from qerl_bench.model.routing import changed_choices
from qerl_bench.model_setup import build_policy
from qerl_bench.train.batch import make_batch
from qerl_bench.train.update import make_optimizer, update
from tests.models import builds

NO_RUN: Any = None


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Experiment, Policy, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    checkpoint = functools.cache(lambda name: builds.build(name, folder / name))

    def make(name: str, *words: str) -> tuple[Experiment, Policy, Any]:
        experiment = build(compose([*builds.WORDS, f"model.id={checkpoint(name)}", *words]))
        policy = build_policy(experiment, None, "cpu")
        rows = [[5, 6, 7, 8, 9, 10, 11], [8, 9], [30, 31, 32]], [[1, 2, 3], [4, 5, 60, 70, 80], [90]]
        logprobs = [[-1.0] * len(row) for row in rows[1]]
        batch = make_batch(*rows, policy.pad_id, policy.device, logprobs, torch.tensor([1.0, -0.5, 0.0]))
        return experiment, policy, batch

    return make


def test_changed_choices_by_hand() -> None:
    """Order within a token's experts does not count."""
    before = [torch.tensor([[0, 1], [2, 3]]), torch.tensor([[4], [5]])]
    after = [torch.tensor([[1, 0], [2, 0]]), torch.tensor([[4], [6]])]
    assert changed_choices(before, after).tolist() == [False, False, False, True, False, True]
    assert not changed_choices(before, before).any()


@pytest.mark.parametrize(
    ("name", "quant"), [("qwen3_moe", "nvfp4"), ("gpt_oss", "bf16"), ("deepseek_v3", "nvfp4"), ("nemotron_h", "bf16")]
)
def test_the_experts_of_every_completion_token_are_seen(world: Callable[..., Any], name: str, quant: str) -> None:
    """With and without padding in the batch, packed or not, with an adapter on the experts or without."""
    _, policy, batch = world(name, f"quant={quant}", "aqn=none", f"lora.experts={str(quant == 'nvfp4').lower()}")
    layers = sum(bool(site.routers) for site in policy.structure.sites)
    found = []
    for packing in {policy.packing, False}:
        policy.packing = packing
        with torch.no_grad(), policy.routing(batch.mask) as chosen:
            policy.token_stats(batch.input_ids, batch.mask, 1.0)
        assert [tuple(layer.shape) for layer in chosen] == [(int(batch.mask.sum()), 2)] * layers
        assert all(layer.min() >= 0 and layer.max() < 4 for layer in chosen)
        found.append([layer.sort().values for layer in chosen])
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[-1], strict=True))


def test_experts_are_those_of_the_largest_router_logits(world: Callable[..., Any]) -> None:
    _, policy, batch = world("qwen3_moe", "aqn=none")
    policy.packing = False
    logits: list[torch.Tensor] = []
    routers = [policy.model.get_submodule(router) for site in policy.structure.sites for router in site.routers]
    for router in routers:
        router.register_forward_hook(lambda module, inputs, output: logits.append(inputs[0] @ module.weight.t()))
    with torch.no_grad(), policy.routing(batch.mask) as chosen:
        policy.token_stats(batch.input_ids, batch.mask, 1.0)
    for layer, values in zip(chosen, logits, strict=True):
        expected = values.view(-1, 4)[batch.mask.flatten()].topk(2).indices
        assert torch.equal(layer.sort().values, expected.sort().values)


@pytest.mark.parametrize("site", ["rollout", "rollout_and_old_logprobs", "rollout_and_training"])
def test_noise_changes_choices_by_the_share_that_is_reported(world: Callable[..., Any], site: str) -> None:
    """Over two micro-batches, against two forward passes of the whole batch."""
    words = (
        "aqn=constant",
        "aqn.level=0.3",
        f"noise.site={site}",
        "train.micro_batch_tokens=49",
        "train.mismatch_share=1",
    )
    experiment, policy, batch = world("qwen3_moe", *words)
    passes = []
    with torch.no_grad():
        with policy.routing(batch.mask) as chosen:
            policy.token_stats(batch.input_ids, batch.mask, 1.0)
        passes.append(chosen)
        with policy.noise.for_rollout(1, 0), policy.routing(batch.mask) as chosen:
            policy.token_stats(batch.input_ids, batch.mask, 1.0)
        passes.append(chosen)
    expected = changed_choices(*passes).double().mean().item()
    found = update(experiment, policy, make_optimizer(policy, experiment.optim), batch, NO_RUN, 1)
    assert 0 < expected < 1 and found["router/changed_frac"] == pytest.approx(expected, abs=1e-9)


def test_without_noise_nothing_changes_and_without_experts_nothing_is_reported(world: Callable[..., Any]) -> None:
    experiment, policy, batch = world("mixtral", "aqn=none")
    assert (
        update(experiment, policy, make_optimizer(policy, experiment.optim), batch, NO_RUN, 1)["router/changed_frac"]
        == 0
    )
    experiment, policy, batch = world("llama", "aqn=none")
    assert "router/changed_frac" not in update(
        experiment, policy, make_optimizer(policy, experiment.optim), batch, NO_RUN, 1
    )
