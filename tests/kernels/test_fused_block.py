"""Blocks written out compute what the modules of transformers do: hidden states, gradients, memory, noise, packing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qerl_bench.config import build, compose
from qerl_bench.engine.hf_reference import prefill
from qerl_bench.model import kernels
from qerl_bench.model.attention import NAME as OWN_ATTENTION
from qerl_bench.model.block import MODEL_TYPES, FusedBlock, fuse_blocks, without_fused_blocks
from qerl_bench.model.kernels import LoRALinear, adapters_cast_to, fuse_linears, why_not_fused_blocks
from qerl_bench.model.lm_head import decoder_of
from qerl_bench.model.packing import Packing
from qerl_bench.model.preflight import preflight
from qerl_bench.model_setup import build_policy
from qerl_bench.quant.linear import PackedLinear
from qerl_core.checks import ConfigError
from qerl_kernels import training_block, training_block_reference
from tests.models import builds

Computed = tuple[torch.Tensor, list[torch.Tensor]]


@pytest.fixture(scope="module")
def policy_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """policy_of("qwen3", "train.recompute=full"): of a tiny checkpoint, in FP32, with an adapter that has an effect."""
    root = tmp_path_factory.mktemp("checkpoints")

    def make(architecture: str, *words: str, quant: str = "nvfp4", device: str = "cpu") -> Any:
        folder = root / architecture
        if not folder.exists():
            builds.build(architecture, folder)
        options = [*builds.WORDS, f"model.id={folder}", "task=even_characters", "task.template=chat", f"quant={quant}"]
        policy = build_policy(build(compose([*options, f"device={device}", *words])), None, device)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        return policy

    return make


def _fuse(policy: Any, ops: Any = training_block_reference) -> None:
    """As on a GPU: packed layers in the kernels' layout, adapters inside their matmuls, blocks written out."""
    for module in policy.model.modules():
        if isinstance(module, LoRALinear):
            module.fused = True
        elif isinstance(module, PackedLinear):
            module.use_kernels()
    assert fuse_blocks(decoder_of(policy.model), ops) is None


def _block(policy: Any, index: int = 0) -> Any:
    decoder: Any = decoder_of(policy.model)
    return decoder.layers[index]


def _computed(policy: Any, *, prompt: int = 3, shares: bool = False) -> Computed:
    """Log-probabilities of ragged sequences, longer than the windows of `builds`, and all gradients.

    The prompts of two of them, `prompt` tokens, are equal; with `shares` they are computed once.
    """
    ids = torch.randint(3, 250, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(20) >= prompt) & (torch.arange(20) < torch.tensor([20, 9, 14])[:, None])
    ids[2, :prompt] = ids[0, :prompt]
    ids, mask = ids.to(policy.device), mask.to(policy.device)
    layout = Packing.from_mask(mask, ids if shares else None)
    assert (layout.shared is None) != shares
    policy.train_mode(True)
    stats = policy.token_stats(ids, mask, 1.0, layout=layout)
    weights = torch.linspace(-1, 1, mask.numel()).view(mask.shape)
    gradients = torch.autograd.grad((stats.logprobs * weights.to(policy.device)).sum(), policy.trainable)
    return stats.logprobs.detach(), list(gradients)


def _same(found: Computed, wanted: Computed) -> None:
    assert torch.allclose(found[0], wanted[0], rtol=0, atol=2e-5)
    assert len(found[1]) == len(wanted[1]) > 0
    for one, other in zip(found[1], wanted[1], strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-4 * float(other.abs().max()) + 1e-7)
    assert max(float(other.abs().max()) for other in wanted[1]) > 1e-3


@pytest.mark.parametrize(("architecture", "quant"), [*((name, "nvfp4") for name in MODEL_TYPES), ("qwen2", "bf16")])
def test_a_block_is_that_of_transformers(policy_of: Callable[..., Any], architecture: str, quant: str) -> None:
    """With the joined layers of the kernels' layout, packed and padded, and under noise."""
    policy = policy_of(architecture, "aqn=constant", "aqn.level=0.05", quant=quant)
    wanted = _computed(policy)
    _fuse(policy)
    block = _block(policy).forward
    assert isinstance(block, FusedBlock) and block.qkv.base is not None and block.gate_up.base is not None
    _same(_computed(policy), wanted)
    policy.packing = False
    _same(_computed(policy), wanted)
    with policy.noise.for_rollout(1, 0):
        noisy = _computed(policy)
        with without_fused_blocks(policy.model):
            _same(noisy, _computed(policy))
    assert not torch.allclose(noisy[0], wanted[0], atol=1e-2)
    with policy.without_adapter(), torch.no_grad():
        base = policy.model(torch.arange(9)[None], use_cache=False).logits
        with without_fused_blocks(policy.model):
            assert torch.allclose(base, policy.model(torch.arange(9)[None], use_cache=False).logits, atol=1e-4)


def test_a_block_that_is_given_a_cache_fills_it(policy_of: Callable[..., Any]) -> None:
    """Whatever this version of transformers calls it."""
    policy = policy_of("qwen2")
    _fuse(policy)
    prompts = [[5, 6, 7, 8], [9, 10]]
    with torch.no_grad():
        read = prefill(policy, prompts)
        with without_fused_blocks(policy.model):
            assert torch.equal(read.logits, prefill(policy, prompts).logits)
    assert read.cache.get_seq_length() == 4


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_a_shared_prompt_changes_rounding_only(
    policy_of: Callable[..., Any], architecture: str, attend: Callable[[str], None]
) -> None:
    """Over modules and written out, of prompts of one token, within a window and beyond it."""
    policy = policy_of(architecture)
    for fused in (False, True):
        if fused:
            _fuse(policy)
        for prompt in (1, 3, 11):
            wanted = _computed(policy, prompt=prompt)
            for backend in ("padded", "masked"):
                attend(backend)
                _same(_computed(policy, prompt=prompt, shares=True), wanted)


def test_kernels_train_as_the_reference(policy_of: Callable[..., Any], interpreter: None) -> None:
    policy = policy_of("qwen3")
    wanted = _computed(policy)
    _fuse(policy, training_block)
    _same(_computed(policy), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["none", "selective"])
@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "qwen3"])
def test_a_run_on_a_gpu_takes_the_kernels(policy_of: Callable[..., Any], architecture: str, mode: str) -> None:
    """In bfloat16, as `kernel=block` chooses them, to what that format resolves."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    words = ("model.dtype=bfloat16", f"train.recompute={mode}")
    policy = policy_of(architecture, *words, "kernel=block", device="cuda")
    block = _block(policy).forward
    assert isinstance(block, FusedBlock) and block.ops is training_block and block.qkv.base is not None
    logprobs, gradients = _computed(policy)
    with without_fused_blocks(policy.model):
        wanted, others = _computed(policy)
    assert torch.allclose(logprobs, wanted, rtol=0, atol=0.1)
    found, plain = (torch.cat([x.flatten() for x in parts]) for parts in (gradients, others))
    assert float((found - plain).norm() / plain.norm()) < 0.05
    again = _computed(policy)
    assert all(torch.equal(one, other) for one, other in zip(gradients, again[1], strict=True))
    assert policy.shares_prompts
    logprobs, gradients = _computed(policy, shares=True)
    assert torch.allclose(logprobs, wanted, rtol=0, atol=0.1)
    assert float((torch.cat([x.flatten() for x in gradients]) - plain).norm() / plain.norm()) < 0.05
    again = _computed(policy, shares=True)
    assert all(torch.equal(one, other) for one, other in zip(gradients, again[1], strict=True))
    for kernel in ("auto", "modules", "torch"):  # auto: the model is small
        plain_policy = policy_of(architecture, *words, f"kernel={kernel}", device="cuda")
        assert not isinstance(_block(plain_policy).forward, FusedBlock)


@pytest.mark.parametrize(
    ("kernel", "dtype", "small", "reason"),
    [
        ("auto", torch.bfloat16, False, None),
        ("auto", torch.bfloat16, True, "the model is small; kernel=block fuses them"),
        ("auto", torch.float32, False, "the model computes in float32"),
        ("block", torch.float32, True, None),
        ("modules", torch.bfloat16, False, "kernel=modules"),
    ],
)
def test_auto_fuses_blocks_of_models_that_are_not_small(
    monkeypatch: pytest.MonkeyPatch, kernel: str, dtype: torch.dtype, small: bool, reason: str | None
) -> None:
    layer = torch.nn.Linear(8, 8, dtype=dtype)
    size = sum(parameter.nbytes for parameter in layer.parameters())
    monkeypatch.setattr(kernels, "SMALL_BYTES", size if small else size - 1)
    assert why_not_fused_blocks(kernel, layer) == reason


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_what_is_computed_again_is_the_same(policy_of: Callable[..., Any], mode: str) -> None:
    found = []
    for words in ([], [f"train.recompute={mode}"]):
        policy = policy_of("qwen2", *words)
        _fuse(policy)
        found.append(_computed(policy))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


def test_joined_layers_share_the_one_packed_copy(policy_of: Callable[..., Any]) -> None:
    """Sampling joins the same layers again, and finds them joined."""
    policy = policy_of("qwen2")
    _fuse(policy)
    block = _block(policy)
    for joined, names in ((block.forward.qkv, ("q", "k", "v")), (block.forward.gate_up, ("gate", "up"))):
        owner = block.self_attn if len(names) == 3 else block.mlp
        parts = [getattr(owner, f"{name}_proj").get_base_layer() for name in names]
        with adapters_cast_to(policy.model, torch.float32):
            sampled: Any = fuse_linears(joined.layers)
        layers = (joined.base, sampled.base, *parts)
        storages = {layer.get_buffer("kernel_words").untyped_storage().data_ptr() for layer in layers}
        assert len(storages) == 1
        assert sum(layer.get_buffer("kernel_words").nbytes for layer in parts) == joined.base.kernel_words.nbytes


def test_the_checks_before_a_run_see_modules_and_the_block(policy_of: Callable[..., Any]) -> None:
    """The preflight passes, and refuses a block that computes something else."""
    policy = policy_of("llama", "aqn=constant", "aqn.level=0.05")
    quant = build(compose(["quant=nvfp4"])).quant
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    _fuse(policy)
    assert preflight(policy, quant, "llama")["logprob_gap_float32"] < 1e-3
    wrong = {**vars(training_block_reference), "swiglu": lambda x: 0.9 * training_block_reference.swiglu(x)}
    _block(policy, 1).forward.ops = SimpleNamespace(**wrong)
    with pytest.raises(ConfigError, match="does not compute what llama computes"):
        preflight(policy, quant, "llama")


def test_other_blocks_keep_their_modules(policy_of: Callable[..., Any]) -> None:
    for architecture, words, reason in (
        ("gemma2", (), "gemma2"),
        ("qwen2", ("lora.train_norms=true",), "norm scales are trained"),
    ):
        policy = policy_of(architecture, *words)
        assert reason in str(fuse_blocks(decoder_of(policy.model), training_block_reference))
        assert not any(isinstance(module.forward, FusedBlock) for module in policy.model.modules())
    decoder = decoder_of(policy_of("qwen2").model)
    decoder.set_attn_implementation("sdpa")
    assert "attention" in str(fuse_blocks(decoder)) and decoder.config._attn_implementation != OWN_ATTENTION


def test_dropout_is_left_to_peft(policy_of: Callable[..., Any]) -> None:
    """The layers then run one by one, and still give one output."""
    policy = policy_of("qwen2", "lora.dropout=0.5")
    _fuse(policy)
    joined = _block(policy).forward.gate_up
    x = torch.randn(5, 64)
    policy.train_mode(False)
    with torch.no_grad():
        whole = joined(x)
        assert torch.allclose(whole, torch.cat([layer(x) for layer in joined.layers], -1), atol=1e-5)
        policy.train_mode(True)
        assert whole.shape == joined(x).shape and not torch.allclose(whole, joined(x), atol=1e-3)


def test_it_keeps_fewer_bytes_for_the_backward_pass(policy_of: Callable[..., Any], interpreter: None) -> None:
    """Of one block in bfloat16.

    Five activations of the residual stream's width, query, key and value, and three of the MLP's inner width: the
    inputs of norms and matmuls, what attention reads, and gate and up.
    """
    policy = policy_of("qwen2", "lora.rank=1", "model.dtype=bfloat16")
    _fuse(policy, training_block)
    decoder: Any = decoder_of(policy.model)
    block, config, tokens = decoder.layers[1], decoder.config, 16
    own = {tensor.untyped_storage().data_ptr() for tensor in policy.model.state_dict().values()}
    x = torch.randn(1, tokens, config.hidden_size).bfloat16().requires_grad_()
    angles = decoder.rotary_emb(x, torch.arange(tokens)[None])
    own |= {tensor.untyped_storage().data_ptr() for tensor in angles}

    def held() -> int:
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            block(x, attention_mask=None, position_embeddings=angles)
        return sum(size for place, size in kept.items() if place not in own) // tokens

    fused = held()
    with without_fused_blocks(policy.model):
        modules = held()
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    least = 2 * (5 * config.hidden_size + heads * block.self_attn.head_dim + 3 * config.intermediate_size)
    assert fused < 1.05 * least and fused < 0.8 * modules
