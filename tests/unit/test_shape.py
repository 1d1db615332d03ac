"""task=shape and model=shape: exact lengths in every engine, rewards that always teach, weights that stay in bounds."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qerl_bench.config import build, compose
from qerl_bench.engine import hf_graph, hf_reference
from qerl_bench.engine.base import Sampling, exact_lengths
from qerl_bench.engine.hf import HFEngine
from qerl_bench.engine.sampler import Sampler, decode
from qerl_bench.engine.vllm.engine import VLLMEngine
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model.load import load_packed
from qerl_bench.model.policy import Policy
from qerl_bench.model.shape import RandomWeights
from qerl_bench.model_setup import build_policy
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quantizer.apply import quantize_model
from qerl_bench.task.shape import Shape
from qerl_core.checks import ConfigError
from qerl_core.records import Prompt, Rollout

MakePolicy = Callable[..., Policy]


def _task(**changed: Any) -> Shape:
    options = {
        "name": "shape",
        "prompt_tokens": 7,
        "lengths": "geometric",
        "completion_tokens": 6,
        "max_completion_tokens": 20,
        "group_size": 4,
    }
    return Shape(**{**options, **changed})


def _experiment(*words: str) -> Experiment:
    return build(compose(["model=shape/tiny", "task=shape", "eval=none", "device=cpu", "lora.rank=4", *words]))


def _load_packed(experiment: Experiment) -> Any:
    return load_packed(experiment.model, experiment.quant, experiment.quantizer, experiment.task, None, "cpu")


# --- the task --------------------------------------------------------------------------------------------------------


def test_prompts_are_of_the_asked_length_and_all_different() -> None:
    prompts = [prompt for step in (1, 2) for prompt in _task(prompt_tokens=33).train_prompts(step, 50, seed=0)]
    assert {len(prompt.token_ids or ()) for prompt in prompts} == {33}
    assert all(0 <= token < 256 for prompt in prompts for token in prompt.token_ids or ())
    assert len({prompt.token_ids for prompt in prompts}) == len({prompt.id for prompt in prompts}) == 100


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_rewards_differ_in_every_group_and_are_half_ones(size: int) -> None:
    task = _task(group_size=size)
    prompts = task.train_prompts(3, 800, seed=1)
    assert all(prompt.answer.count("1") == size // 2 and len(prompt.answer) == size for prompt in prompts)
    assert {prompt.answer for prompt in prompts} == {
        "".join("1" if i in ones else "0" for i in range(size))
        for ones in itertools.combinations(range(size), size // 2)
    }
    rollouts = [
        Rollout(
            prompt=prompts[0], sample=i, prompt_ids=[], token_ids=[1], logprobs=[], entropies=[], text="", finished=True
        )
        for i in reversed(range(size))
    ]
    rewards = task.rewards(rollouts)
    assert [reward.total for reward in rewards] == [float(digit) for digit in reversed(prompts[0].answer)]
    assert [reward.correct for reward in rewards] == [reward.total == 1 for reward in rewards]


def test_geometric_lengths_have_the_asked_distribution() -> None:
    """Against P(length > k) = (1 - 1 / mean)^k, at 20,000 draws: five standard errors."""
    prompts = _task(completion_tokens=30, max_completion_tokens=90, group_size=8).train_prompts(1, 2500, seed=0)
    lengths = [length for prompt in prompts for length in prompt.new_tokens or ()]
    assert len(lengths) == 20_000 and min(lengths) == 1 and max(lengths) == 90
    for k in (0, 1, 5, 20, 30, 60, 89):
        wanted = (1 - 1 / 30) ** k
        error = math.sqrt(wanted * (1 - wanted) / len(lengths))
        assert abs(sum(length > k for length in lengths) / len(lengths) - wanted) <= 5 * error, k


def test_lengths_depend_on_seed_step_prompt_and_sample_alone() -> None:
    task = _task(completion_tokens=600, max_completion_tokens=4096)
    (first, second) = task.train_prompts(5, 2, seed=3)
    assert task.train_prompts(5, 7, seed=3)[1] == second
    wider = _task(completion_tokens=600, max_completion_tokens=4096, group_size=8, prompt_tokens=99)
    assert (wider.train_prompts(5, 1, seed=3)[0].new_tokens or ())[:4] == first.new_tokens
    others = [task.train_prompts(6, 1, seed=3)[0], task.train_prompts(5, 1, seed=4)[0], second]
    assert len({prompt.new_tokens for prompt in (first, *others)}) == 4
    assert len(set(first.new_tokens or ())) > 1


def test_fixed_lengths_are_exact() -> None:
    (prompt,) = _task(lengths="fixed", completion_tokens=20).train_prompts(1, 1, seed=0)
    assert prompt.new_tokens == (20, 20, 20, 20)
    (prompt,) = _task(completion_tokens=1).train_prompts(1, 1, seed=0)
    assert prompt.new_tokens == (1, 1, 1, 1)


def test_there_is_nothing_to_hold_out_imitate_or_judge() -> None:
    task = _task()
    with pytest.raises(ConfigError, match="eval=none"):
        task.eval_prompts(3)
    with pytest.raises(ConfigError, match="other than sft"):
        task.demonstrations(1, 1, 0)
    with pytest.raises(ConfigError, match="task=shape cannot grade"):
        task.reward(task.train_prompts(1, 1, 0)[0], "text")


# --- exact lengths ---------------------------------------------------------------------------------------------------


def _sampling(**changed: Any) -> Sampling:
    return Sampling(**{"samples": 4, "temperature": 1.0, "max_tokens": 20, "seed": 11, **changed})


@pytest.fixture(scope="module")
def policy() -> Policy:
    """Every third token is a stop token, so that hardly a completion would reach its length otherwise."""
    policy = build_policy(_experiment("quant=nvfp4"), None, "cpu")
    policy.stop_ids = frozenset(range(0, 512, 3))
    return policy


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("max_num_seqs", [3, 256])
def test_completions_have_exactly_the_lengths_of_their_prompt(policy: Policy, graph: bool, max_num_seqs: int) -> None:
    engine = HFEngine(policy, max_num_seqs)
    if graph:
        engine.sampler = Sampler(policy, engine.limits)
    prompts = _task(completion_tokens=9).train_prompts(1, 5, seed=0)
    rollouts = engine.generate(prompts, _sampling())
    wanted = [length for prompt in prompts for length in prompt.new_tokens or ()]
    assert len(set(wanted)) > 5 and max(wanted) == 20
    assert [len(rollout.token_ids) for rollout in rollouts] == wanted
    assert [len(rollout.logprobs) for rollout in rollouts] == [len(rollout.entropies) for rollout in rollouts] == wanted
    assert [rollout.prompt_ids for rollout in rollouts[::4]] == [list(prompt.token_ids or ()) for prompt in prompts]
    assert [rollout.finished for rollout in rollouts] == [length < 20 for length in wanted]
    assert any(token in policy.stop_ids for rollout in rollouts for token in rollout.token_ids[:-1])


@pytest.mark.parametrize("how", [hf_reference.decode, decode])
def test_an_exact_length_cuts_and_extends_but_changes_no_token(policy: Policy, how: Any) -> None:
    """The tokens are those that the same request draws without stop tokens, and stop where the length says."""
    prompts = [list(prompt.token_ids or ()) for prompt in _task().train_prompts(1, 2, seed=0)]
    keys, lengths = list(range(8)), [3, 20, 1, 7, None, 20, 12, None]
    with torch.inference_mode():
        found = how(policy, prompts, _sampling(), keys, lengths)
        whole = how(policy, prompts, _sampling(), keys, [20] * 8)
    for (ids, logprobs, _), (all_ids, all_logprobs, _), length in zip(found, whole, lengths, strict=True):
        end = next(i for i, token in enumerate([*all_ids, 0], 1) if token in policy.stop_ids or i == 20)
        assert ids == all_ids[: length or end]
        assert logprobs == pytest.approx(all_logprobs[: length or end], abs=1e-5)


def test_both_ways_to_decode_agree_on_ragged_lengths(policy: Policy) -> None:
    prompts = [list(prompt.token_ids or ()) for prompt in _task().train_prompts(1, 4, seed=0)]
    lengths = [1, 2, 3, 20, 1, 1, 1, 1, 19, 2, 2, 2, 4, 9, 9, 1]
    with torch.inference_mode():
        one, other = (
            how(policy, prompts, _sampling(), list(range(16)), lengths) for how in (hf_reference.decode, decode)
        )
    assert [ids for ids, _, _ in one] == [ids for ids, _, _ in other]
    assert [len(ids) for ids, _, _ in one] == lengths


def test_decoding_ends_with_the_longest_exact_length(policy: Policy, listen: Callable[..., Any]) -> None:
    """Not with the next look at who is done, which a measurement of few tokens would count."""
    advanced = listen(hf_graph.Decoding, "_advance")
    with torch.inference_mode():
        decode(policy, [[1, 2]], _sampling(), [0, 1], [3, 2])
    assert len(advanced) == 2  # the first token is drawn from the prompt


@pytest.mark.parametrize(
    ("lengths", "says"), [((3, 21), "the longest 21 tokens"), ((3,), "of 1 completions"), ((0, 3), "1 to 20")]
)
def test_lengths_that_cannot_be_sampled_are_refused(policy: Policy, lengths: tuple[int, ...], says: str) -> None:
    prompt = Prompt(id="a", messages=(), answer="01", token_ids=(1, 2), new_tokens=lengths)
    with pytest.raises(ConfigError, match=says):
        HFEngine(policy, 8).generate([prompt], _sampling(samples=2))


def test_a_prompt_without_lengths_ends_at_a_stop_token() -> None:
    prompt = Prompt(id="a", messages=(), answer="")
    assert exact_lengths(prompt, range(2, 5), _sampling()) == [None, None, None]


class FakeVllm:
    """Draws the wished number of tokens, each the seed of its sample, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], Any]] = []

    def generate(self, prompts: list[Any], params: list[Any], **_: Any) -> list[Any]:
        self.asked += [(prompt["prompt_token_ids"], one) for prompt, one in zip(prompts, params, strict=True)]
        return [
            SimpleNamespace(outputs=[self._drawn(one, index) for index in reversed(range(one.n))]) for one in params
        ]

    def _drawn(self, params: Any, index: int) -> Any:
        ids = [(params.seed + index) % 512] * params.max_tokens
        return SimpleNamespace(
            index=index, token_ids=ids, logprobs=[{token: SimpleNamespace(logprob=-1.0)} for token in ids]
        )


def test_vllm_is_asked_for_exact_lengths_sample_by_sample(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    engine: Any = object.__new__(VLLMEngine)
    engine.policy, engine.llm, engine.max_model_len, engine.asleep = policy, FakeVllm(), 4096, False
    engine.workers = []
    engine.options = SimpleNamespace(score_batch_size=8)
    engine.mirror = SimpleNamespace(current=True, request=None)
    prompts = _task().train_prompts(1, 2, seed=0)
    exact = engine.generate(prompts, _sampling())
    lengths = [length for prompt in prompts for length in prompt.new_tokens or ()]
    assert [len(rollout.token_ids) for rollout in exact] == lengths
    assert [rollout.sample for rollout in exact] == [0, 1, 2, 3] * 2
    assert all(len(rollout.entropies) == len(rollout.token_ids) for rollout in exact)
    assert [(params.n, params.max_tokens) for _, params in engine.llm.asked] == [(1, length) for length in lengths]
    assert all(params.stop_token_ids == [] and params.ignore_eos for _, params in engine.llm.asked)
    assert not any(hasattr(params, "min_tokens") for _, params in engine.llm.asked)  # it would forbid stop tokens
    free = engine.generate([replace(prompt, new_tokens=None) for prompt in prompts], _sampling())
    assert [params.n for _, params in engine.llm.asked[8:]] == [4, 4]
    assert all(params.stop_token_ids == sorted(policy.stop_ids) for _, params in engine.llm.asked[8:])
    # a sample has the same seed in either request
    assert [rollout.token_ids[0] for rollout in exact] == [rollout.token_ids[0] for rollout in free]


# --- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", ["bf16", "nf4", "mxfp4", "nvfp4"])
def test_packed_while_it_is_made_it_is_what_packing_the_whole_gives(quant: str) -> None:
    experiment = _experiment(f"quant={quant}")
    model, _, reports, *_ = _load_packed(experiment)
    whole, tokenizer = experiment.model.load(None, "cpu")
    assert list(reports) == list(quantize_model(whole, experiment.quant).reports) and len(reports) == 14
    assert sum(isinstance(layer, PackedLinear) for layer in model.modules()) == (0 if quant == "bf16" else 14)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, whole(input_ids=ids).logits)
    assert model.lm_head.weight is model.model.embed_tokens.weight and len(model.lm_head.weight) == 512
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert len(tokenizer) < 512


def test_never_more_than_one_block_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for at once: everything outside the blocks, then one block after the other, the last one packed."""
    asked: list[tuple[set[str], int]] = []
    fill = RandomWeights.fill

    def seen(self: RandomWeights, model: Any, names: Any) -> None:
        plain = {name for name, p in model.named_parameters() if p.ndim == 2 and not p.is_meta and ".layers." in name}
        asked.append(({".".join(name.split(".")[:3]) for name in names if ".layers." in name}, len(plain)))
        fill(self, model, names)

    monkeypatch.setattr(RandomWeights, "fill", seen)
    _load_packed(_experiment("quant=nvfp4"))
    assert asked == [(set(), 0), ({"model.layers.0"}, 0), ({"model.layers.1"}, 0)]


def test_the_seed_and_the_name_of_a_parameter_decide_its_values() -> None:
    def weights(seed: int, dtype: str) -> dict[str, torch.Tensor]:
        model, _ = _experiment(f"model.seed={seed}", f"model.dtype={dtype}").model.load(None, "cpu")
        return {name: p.detach().float() for name, p in model.named_parameters()}

    first, again, other = weights(0, "float32"), weights(0, "bfloat16"), weights(1, "float32")
    assert all(torch.equal(first[name], again[name]) for name in first)  # BF16, whatever it computes in
    drawn = [name for name in first if first[name].ndim == 2]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    assert len({float(first[name].flatten()[0]) for name in drawn}) == len(drawn)


def test_a_deep_model_in_bfloat16_stays_in_bounds() -> None:
    """As many blocks as a 72B model has: finite, near-uniform over the vocabulary, and with a gradient that is too."""
    words = ("model.layers=80", "model.dtype=bfloat16", "model.tied=false", "train.recompute=full")
    policy = build_policy(_experiment("quant=nvfp4", *words), None, "cpu")
    ids = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, 8:] = True
    policy.train_mode(True)
    stats = policy.token_stats(ids, mask, 1.0)
    stats.logprobs.sum().backward()
    entropy = stats.entropy[mask]
    assert math.log(512) - 1.5 < float(entropy.min()) and float(entropy.max()) < math.log(512)
    gradients = torch.cat([p.grad.flatten() for p in policy.trainable if p.grad is not None])
    assert gradients.isfinite().all() and gradients.abs().max() > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_7b_shape_is_packed_on_the_gpu_without_ever_being_whole() -> None:
    """15.2 GB in 16 bits; packed 6.4, of which 2.2 are embedding and head. One 16-bit block has 0.5."""
    torch.cuda.reset_peak_memory_stats()
    words = ("model=shape/7b", "task=shape", "eval=none", "quant=nvfp4", "device=cuda")
    policy = build_policy(build(compose([*words])), None, "cuda")
    assert torch.cuda.max_memory_allocated() < 11e9
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < torch.cuda.memory_allocated() + 3e8  # packing left no gaps
    ids = torch.randint(256, (2, 300), generator=torch.Generator().manual_seed(0)).cuda()
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, 200:] = True
    with torch.no_grad():
        entropy = policy.token_stats(ids, mask, 1.0).entropy[mask]
    assert entropy.isfinite().all()
    assert float(entropy.mean()) == pytest.approx(math.log(152064) - 0.5, abs=0.1)  # of logits of variance 1


@pytest.mark.parametrize(
    ("name", "billions"),
    [("0.5b", 0.494), ("1.5b", 1.544), ("3b", 3.086), ("7b", 7.616), ("14b", 14.770), ("32b", 32.764), ("72b", 72.706)],
)
def test_shapes_have_the_parameters_of_qwen(name: str, billions: float) -> None:
    """The numbers of parameters of Qwen2.5's safetensors files."""
    model = build(compose([f"model=shape/{name}"])).model.without_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=1e-3)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.dtype == torch.bfloat16
    head = model.config.hidden_size // model.config.num_attention_heads
    assert float(model.model.rotary_emb.inv_freq[1]) == pytest.approx(1e6 ** (-2 / head), rel=1e-6)


# --- other architectures ---------------------------------------------------------------------------------------------

SHAPES = ("qwen3-30b-a3b", "gpt-oss-20b", "llama-3.1-8b", "qwen3-8b")
PARAMETERS = {
    "qwen3-30b-a3b": 30.5e9,
    "gpt-oss-20b": 20.9e9,
    "llama-3.1-8b": 8.03e9,
    "qwen3-8b": 8.19e9,
}  # as published


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_parameters_of_the_real_model(name: str) -> None:
    experiment = _experiment(f"model=shape/{name}")
    model = experiment.model.without_weights()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(PARAMETERS[name], rel=0.005)
    assert experiment.model.name == f"shape-{name}" and all(p.is_meta for p in model.parameters())


TINY_EXPERTS = {
    "qwen3-30b-a3b": ("num_experts=8", "num_experts_per_tok=2", "moe_intermediate_size=64", "head_dim=32"),
    "gpt-oss-20b": ("num_local_experts=8", "num_experts_per_tok=2", "intermediate_size=64", "head_dim=32"),
}


@pytest.mark.parametrize("name", TINY_EXPERTS)
def test_experts_are_packed_while_they_are_made(name: str) -> None:
    """Block by block as in one piece, with every expert's rows of length 1, and biases of 0."""
    sizes = ("hidden_size=128", "num_hidden_layers=2", "num_attention_heads=4", "num_key_value_heads=2")
    words = [f"model.sizes.{size}" for size in (*sizes, *TINY_EXPERTS[name], "vocab_size=512")]
    experiment = _experiment(f"model=shape/{name}", "quant=nvfp4", "model.dtype=float32", *words)
    model, _, reports, *_ = _load_packed(experiment)
    whole, _ = experiment.model.load(None, "cpu")
    experts = whole.model.layers[1].mlp.experts
    for weight in (experts.gate_up_proj, experts.down_proj):
        inputs = 1 if experts.is_transposed else 2
        assert weight.float().square().sum(inputs).mean().item() == pytest.approx(1, rel=0.05)
        assert weight[0].std().item() == pytest.approx(weight.shape[inputs] ** -0.5, rel=0.1)
    assert not any(bool(p.any()) for n, p in whole.named_parameters() if n.endswith("bias"))
    assert list(reports) == list(quantize_model(whole, experiment.quant).reports) and len(reports) == 2 * (4 + 2)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        assert torch.equal(logits, whole(input_ids=ids).logits) and bool(logits.isfinite().all())
        assert 0.1 < logits.std().item() < 10


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("model.architecture=qwen9",), "model.architecture .*qwen3_moe, got 'qwen9'"),
        (("+model.sizes.layers=3",), "model.sizes has layers, which qwen3 has not"),
    ],
)
def test_what_transformers_does_not_know_is_refused(words: tuple[str, ...], says: str) -> None:
    experiment = _experiment("model=shape/qwen3-8b", *words)
    with pytest.raises(ConfigError, match=says):
        experiment.model.without_weights()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("model.sizes.vocab_size=100", "model.sizes.vocab_size .*at least 262"),
        ("~model.sizes.hidden_size", "hidden_size"),
    ],
)
def test_sizes_that_every_model_has_are_checked(words: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _experiment("model=shape/qwen3-8b", words)
