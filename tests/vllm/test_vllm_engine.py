"""vLLM in this process, FP32: what it samples is the policy, with adapter and noise, at every moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl_bench.engine.base import Sampling
from qerl_bench.engine.hf import HFEngine
from qerl_bench.train.batch import make_batch
from qerl_core.checks import ConfigError
from qerl_core.records import Rollout

ROUNDING = 1e-4  # nats, FP32
LAYERS = 2  # of the model


@pytest.fixture(scope="module")
def policy(make_policy: Callable[..., Any]) -> Any:
    """Tokens differ by several nats, and one in twelve of them ends a completion."""
    policy = make_policy(quant="bf16", width=64, sharp=True, adapted=True)
    policy.stop_ids = frozenset({*policy.stop_ids, *range(3, 262, 12)})
    return policy


@pytest.fixture(scope="module")
def engine(policy: Any, serving: Callable[..., Any]) -> Iterator[Any]:
    before = torch.random.get_rng_state()
    with serving(policy) as engine:
        assert torch.equal(torch.random.get_rng_state(), before)  # vLLM seeds the process; the run's seeds stay
        yield engine


@contextmanager
def _scaled_adapter(policy: Any, factor: float) -> Iterator[None]:
    """The adapter of another step: every B times `factor`."""
    weights = {tensor: tensor.detach().clone() for name, tensor in policy.model.named_parameters() if "lora_B" in name}
    with torch.no_grad():
        for weight in weights:
            weight.mul_(factor)
        yield
        for weight, kept in weights.items():
            weight.copy_(kept)


def _sampling(**changed: Any) -> Sampling:
    return Sampling(**{"samples": 4, "temperature": 0.7, "max_tokens": 12, "seed": 5, **changed})


def _trainer(policy: Any, rollouts: list[Rollout], temperature: float) -> Any:
    batch = make_batch(
        [r.prompt_ids for r in rollouts],
        [r.token_ids for r in rollouts],
        policy.pad_id,
        policy.device,
        [r.logprobs for r in rollouts],
    )
    with torch.no_grad():
        return policy.token_stats(batch.input_ids, batch.mask, temperature), batch


def _gap(policy: Any, rollouts: list[Rollout], temperature: float = 0.7) -> float:
    stats, batch = _trainer(policy, rollouts, temperature)
    return (stats.logprobs - batch.sampler_logprobs)[batch.mask].abs().max().item()


def _tokens(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.token_ids for rollout in rollouts]


# --- sampling --------------------------------------------------------------------------------------------------------


def test_greedy_completions_are_those_of_the_other_engine(policy: Any, engine: Any, make_prompts: Any) -> None:
    """Token ids go in and come out, so that no tokenizer but the policy's has a say."""
    sampling = _sampling(samples=1, temperature=0.0)
    ours, theirs = (e.generate(make_prompts(), sampling) for e in (HFEngine(policy, 8), engine))
    for a, b in zip(ours, theirs, strict=True):
        assert (a.prompt.id, a.sample, a.prompt_ids, a.token_ids) == (b.prompt.id, b.sample, b.prompt_ids, b.token_ids)
        assert (a.text, a.finished) == (b.text, b.finished)
        assert a.logprobs == pytest.approx(b.logprobs, abs=ROUNDING)
        assert a.entropies == pytest.approx(b.entropies, abs=ROUNDING)


def test_logprobs_and_entropies_are_those_of_the_trainer_at_the_temperature(
    policy: Any, engine: Any, make_prompts: Any
) -> None:
    rollouts = engine.generate(make_prompts(), _sampling())
    stats, batch = _trainer(policy, rollouts, 0.7)
    assert _gap(policy, rollouts) < ROUNDING
    assert _gap(policy, rollouts, 1.0) > 0.1  # a temperature that is left out would be seen
    entropies = torch.tensor([value for r in rollouts for value in r.entropies])
    torch.testing.assert_close(entropies, stats.entropy[batch.mask], atol=ROUNDING, rtol=0)


def test_a_completion_depends_on_seed_prompt_and_sample_alone(engine: Any, make_prompts: Any) -> None:
    prompts = make_prompts()
    rollouts = engine.generate(prompts, _sampling())
    assert [(r.prompt.id, r.sample) for r in rollouts] == [(f"test/{p}", s) for p in range(3) for s in range(4)]
    assert len({tuple(ids) for ids in _tokens(rollouts)}) > 9
    assert _tokens(engine.generate(prompts[1:2], _sampling())) == _tokens(rollouts[4:8])
    fewer = engine.generate(prompts, _sampling(samples=2, max_tokens=6))
    assert _tokens(fewer) == [ids[:6] for i in (0, 4, 8) for ids in _tokens(rollouts[i : i + 2])]
    assert _tokens(engine.generate(prompts, _sampling(seed=6))) != _tokens(rollouts)


def test_completions_end_at_any_stop_token_or_at_the_limit(policy: Any, engine: Any, make_prompts: Any) -> None:
    rollouts = engine.generate(make_prompts(), _sampling(samples=8))
    assert {r.finished for r in rollouts} == {True, False}
    for r in rollouts:
        assert r.finished == (r.token_ids[-1] in policy.stop_ids) and not policy.stop_ids & set(r.token_ids[:-1])
        assert r.finished or len(r.token_ids) == 12
        assert len(r.token_ids) == len(r.logprobs) == len(r.entropies)


def test_a_prompt_that_is_too_long_is_refused(engine: Any, make_prompts: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine\.max_model_len"):
        engine.generate(make_prompts(1), _sampling(max_tokens=500))


# --- adapter ---------------------------------------------------------------------------------------------------------


def test_each_adapter_replaces_the_last_under_an_id_of_its_own(policy: Any, engine: Any, make_prompts: Any) -> None:
    prompts = make_prompts()
    engine.sync(prompts)
    before = engine.mirror.adapters
    with _scaled_adapter(policy, -1):
        found = engine.sync(prompts)
        assert engine.llm.llm_engine.list_loras() == {before + 1} == {engine.mirror.adapters}
        assert [path.name for path in engine.folder.glob("adapter-*")] == [f"adapter-{before + 1}"]
        assert found["sync/adapter_effect"] > 0.1 and found["sync/gap"] < ROUNDING
        assert found["sync/adapter_effect_engine"] == pytest.approx(found["sync/adapter_effect"], abs=ROUNDING)
        assert _gap(policy, engine.generate(prompts, _sampling())) < ROUNDING
        engine.sync(prompts)
        assert engine.mirror.adapters == before + 1  # nothing changed, nothing was pushed


def test_generating_without_a_sync_takes_the_adapter_all_the_same(policy: Any, engine: Any, make_prompts: Any) -> None:
    """An evaluation cannot forget it."""
    engine.sync(make_prompts())
    with _scaled_adapter(policy, -1):
        assert not engine.mirror.current
        assert _gap(policy, engine.generate(make_prompts(), _sampling())) < ROUNDING


def test_an_engine_that_answers_with_the_base_model_is_found_out(
    policy: Any, engine: Any, make_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the adapter does less than rounding may do."""
    with _scaled_adapter(policy, 1e-6):
        found = engine.sync(make_prompts())
        assert 0 < found["sync/adapter_effect"] < ROUNDING
    logprobs = engine.mirror._logprobs
    monkeypatch.setattr(engine.mirror, "_logprobs", lambda prompts, adapter: logprobs(prompts, None))
    with pytest.raises(AssertionError, match="does not compute what is trained"):
        engine.sync(make_prompts())
    with _scaled_adapter(policy, 1e-6), pytest.raises(AssertionError, match="answers with the base model"):
        engine.sync(make_prompts())


# --- noise -----------------------------------------------------------------------------------------------------------


def test_noise_reaches_every_norm_and_leaves_no_trace(
    policy: Any, engine: Any, make_prompts: Any, make_noise: Any
) -> None:
    """Prompts fill whole blocks, so that a prefix cache of other norm scales would be seen."""
    prompts = make_prompts()
    clean = engine.generate(prompts, _sampling())
    for seed in (1, 2):
        with make_noise(policy.norms, 0.1, seed).for_rollout(1, 0) as report:
            found = engine.sync(prompts)
            noisy = engine.generate(prompts, _sampling())
            assert _gap(policy, noisy) < ROUNDING
        assert found["sync/norms_changed"] == report.norms_perturbed == 2 * LAYERS
        assert _gap(policy, noisy) > 0.01  # without the noise the trainer is another policy
    assert engine.sync(prompts)["sync/norms_changed"] == 0
    again = engine.generate(prompts, _sampling())
    assert [(r.token_ids, r.logprobs) for r in again] == [(r.token_ids, r.logprobs) for r in clean]


def test_noise_on_adapters_reaches_it_and_leaves_no_trace(
    policy: Any, engine: Any, make_prompts: Any, make_noise: Any
) -> None:
    prompts = make_prompts()
    engine.sync(prompts)
    clean = engine.generate(prompts, _sampling())
    for seed in (1, 2):
        with make_noise({}, 0.3, seed, adapters=policy.noise.adapters).for_rollout(1, 0):
            assert engine.sync(prompts)["sync/norms_changed"] == 0
            noisy = engine.generate(prompts, _sampling())
            assert _gap(policy, noisy) < ROUNDING
        assert _gap(policy, noisy) > 0.01  # without the noise the trainer is another policy
    engine.sync(prompts)
    again = engine.generate(prompts, _sampling())
    assert [(r.token_ids, r.logprobs) for r in again] == [(r.token_ids, r.logprobs) for r in clean]


def test_noise_that_does_not_arrive_is_found_out(
    policy: Any, engine: Any, make_prompts: Any, make_noise: Any, tmp_path: Any
) -> None:
    engine.sync(make_prompts())
    pushed = engine.mirror.folder / "norms.safetensors"
    scales = load_file(pushed)
    with make_noise(policy.norms, 0.1).for_rollout(1, 0):
        engine.mirror.scales = {name: scale.clone() for name, scale in engine.mirror._scales().items()}  # as if written
        with pytest.raises(AssertionError, match="does not compute what is trained"):
            engine.sync(make_prompts())
    engine.mirror.scales = {}
    missing = tmp_path / "missing.safetensors"
    save_file({name: scale for name, scale in scales.items() if name != "model.norm"}, missing)
    with pytest.raises(AssertionError, match="norms of the engine"):
        engine.llm.collective_rpc("qerl_set_norms", args=(str(missing),))


# --- this process ----------------------------------------------------------------------------------------------------


def test_training_goes_on_while_vllm_runs_here(policy: Any, engine: Any, make_prompts: Any) -> None:
    rollouts = engine.generate(make_prompts(), _sampling())
    _, batch = _trainer(policy, rollouts, 1.0)
    policy.token_stats(batch.input_ids, batch.mask, 1.0).logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in policy.trainable)
    for parameter in policy.trainable:
        parameter.grad = None
    assert engine.sleep() == {}  # a CPU has nothing to report


def test_a_second_engine_beside_it_is_refused(policy: Any, engine: Any, serving: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"engine\.isolation=child"), serving(policy):
        pass
