"""Two fast paths against their plain references: the loss head without logits, and training without padding."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from qerl_bench.model import lm_head, recompute
from qerl_bench.model.kernels import LoRALinear
from qerl_bench.model.lm_head import plain_scores, token_scores
from qerl_bench.model.packing import Packing, packed_hidden
from qerl_bench.train.batch import make_batch

VOCABULARY = 97


def _inputs(
    tokens: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    linear = torch.nn.Linear(16, VOCABULARY, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(VOCABULARY, 16, generator=generator))
        linear.bias.copy_(torch.randn(VOCABULARY, generator=generator))
    hidden = torch.randn(tokens, 16, generator=generator).to(dtype).requires_grad_()
    return linear, hidden, torch.randint(0, VOCABULARY, (tokens,), generator=generator)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("rows", [1, 3, 7, 100])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_head_in_pieces_agrees_with_the_plain_one(rows: int, temperature: float, with_entropy: bool) -> None:
    """Values and gradients with respect to hidden states, weight and bias, whatever the size of the pieces."""
    linear, hidden, targets = _inputs(20, seed=rows)
    pull = torch.randn(20, generator=torch.Generator().manual_seed(1))
    inputs = (hidden, linear.weight, linear.bias)

    def gradients(scores: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        loss = (scores[0] * pull).sum()
        return torch.autograd.grad(loss + (scores[1] * pull.flip(0)).sum() if with_entropy else loss, inputs)

    plain = plain_scores(linear(hidden), targets, temperature, with_entropy)
    pieces = token_scores(linear, hidden, targets, temperature, VOCABULARY, with_entropy, max_logits=rows * VOCABULARY)
    for one, other in zip(plain, pieces, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-5)
    for one, other in zip(gradients(plain), gradients(pieces), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-5 * float(one.abs().max()))
    assert pieces[1].requires_grad == with_entropy
    assert not pieces[2].requires_grad and not pieces[3].requires_grad


def test_the_head_against_numbers_of_its_own() -> None:
    """Two tokens of a vocabulary of three, by hand: logits (0, ln 2, ln 4) have probabilities 1/7, 2/7, 4/7."""
    logits = torch.tensor([[1.0, 2.0, 4.0]]).log()
    logprobs, entropy, entropy_t1, likeliest = plain_scores(logits, torch.tensor([1]), 0.5, False)
    squares = torch.tensor([1 / 21, 4 / 21, 16 / 21])  # temperature 1/2 squares them
    assert logprobs.item() == pytest.approx(squares[1].log().item(), abs=1e-6)
    assert entropy.item() == pytest.approx(-(squares * squares.log()).sum().item(), abs=1e-6)
    p = torch.tensor([1 / 7, 2 / 7, 4 / 7])
    assert entropy_t1.item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-6)
    assert likeliest.item() == 0


def test_no_logprob_above_zero_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "plain_scores", lambda *_: (torch.tensor([-1.0, 1e-6]),) * 4)
    with pytest.raises(AssertionError, match="above 0"):
        token_scores(torch.nn.Identity(), torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), 1.0, 3)


class _Watched(torch.nn.Linear):
    """A head that remembers how many logits it made at once."""

    most = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        logits = super().forward(input)
        self.most = max(self.most, logits.numel())
        return logits


def test_how_many_logits_exist_at_once_does_not_depend_on_the_number_of_tokens() -> None:
    """A vocabulary of 151,936 as in Qwen2: in the graph of 10 or 300 tokens, no tensor is larger than one piece."""
    vocabulary, max_logits = 151_936, 4 * 151_936
    watched = _Watched(4, vocabulary, bias=False)
    largest = {}
    for tokens in (10, 300):
        hidden = torch.randn(tokens, 4, requires_grad=True)
        targets = torch.randint(0, vocabulary, (tokens,))
        sizes: list[int] = []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logprobs, *_ = token_scores(watched, hidden, targets, 1.0, vocabulary, max_logits=max_logits)
        largest[tokens] = max([size for size in sizes if size != watched.weight.numel()], default=0)
        if tokens == 10:
            logprobs.sum().backward()
            assert hidden.grad is not None and hidden.grad.abs().max() > 0
    assert watched.most == max_logits
    assert largest[300] < max_logits  # nothing of the size of logits is kept for the backward pass
    assert largest[300] <= 300 * 4


class _Live(TorchDispatchMode):
    """Bytes of all storages that operations make, alive at once, at their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.sizes:
                storage = tensor.untyped_storage()
                self.sizes[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage.data_ptr(), None)
                self.peak = max(self.peak, sum(self.sizes.values()))
        return made


def test_peak_memory_of_forward_and_backward_does_not_depend_on_the_number_of_tokens() -> None:
    """Four tokens of a vocabulary of 151,936 at a time: under seven times their logits, for 5 tokens or for 80."""
    vocabulary = 151_936
    linear = torch.nn.Linear(4, vocabulary, bias=False).requires_grad_(False)
    peaks = []
    for tokens in (5, 80):
        hidden = torch.randn(tokens, 4, requires_grad=True)
        targets = torch.randint(0, vocabulary, (tokens,))
        with _Live() as live:
            logprobs, *_ = token_scores(linear, hidden, targets, 0.9, vocabulary, max_logits=4 * vocabulary)
            logprobs.sum().backward()
        peaks.append(live.peak)
    piece = 4 * vocabulary * 4  # bytes
    assert 2 * piece < peaks[0] < 7 * piece + linear.weight.nbytes
    assert peaks[1] < 1.05 * peaks[0]


# --- packing ---------------------------------------------------------------------------------------------------------


@st.composite
def _masks(draw: st.DrawFn) -> torch.Tensor:
    rows = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=6))
    mask = torch.zeros(len(rows), 10, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(rows):
        mask[row, prompt : prompt + completion] = True
    return mask


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(mask=_masks())
def test_packing_keeps_every_real_token_once_and_goes_back(mask: torch.Tensor) -> None:
    packing = Packing.from_mask(mask)
    padded = torch.arange(mask.numel()).view(mask.shape) + 1
    packed = packing.pack(padded)
    ends = [max([i + 1 for i in range(10) if row[i]], default=1) for row in mask.tolist()]
    assert packed.tolist() == [int(padded[row, i]) for row, end in enumerate(ends) for i in range(end)]
    assert packing.positions.tolist() == [i for end in ends for i in range(end)]
    back = packing.unpack(packed)
    for row, end in enumerate(ends):
        assert back[row, :end].tolist() == padded[row, :end].tolist() and not back[row, end:].any()


def _ragged(policy: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    sizes = [(3, 9), (8, 1), (1, 4), (5, 0), (2, 20)]
    prompts = [torch.randint(0, 256, (p,), generator=generator).tolist() for p, _ in sizes]
    completions = [torch.randint(0, 256, (c,), generator=generator).tolist() for _, c in sizes]
    return make_batch(prompts, completions, policy.pad_id, policy.device)


@pytest.mark.parametrize("quant", ["bf16", "nvfp4"])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_packed_training_equals_padded_training(make_policy: Callable[..., Any], quant: str, mode: str) -> None:
    """Log-probabilities, entropies and every gradient; in training mode, where recomputation is at work."""
    found = {}
    for packing, again in (("false", "none"), ("true", mode)):
        words = (f"train.packing={packing}", f"train.recompute={again}")
        policy = make_policy(*words, quant=quant, sharp=True, adapted=True)
        assert policy.packing == (packing == "true")
        batch = _ragged(policy)
        policy.train_mode(True)
        stats = policy.token_stats(batch.input_ids, batch.mask, 1.3)
        weights = torch.linspace(-1, 1, batch.mask.numel()).view(batch.mask.shape)
        (stats.logprobs * weights).sum().backward()
        found[packing] = stats, [parameter.grad for parameter in policy.trainable]
    (plain, gradients), (packed, others) = found["false"], found["true"]
    for name in ("logprobs", "entropy", "entropy_t1"):
        assert torch.allclose(getattr(plain, name), getattr(packed, name), rtol=0, atol=2e-5), name
    assert torch.equal(plain.likeliest, packed.likeliest)
    assert len(gradients) == len(others) > 0
    for one, other in zip(gradients, others, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-4 * float(one.abs().max()) + 1e-7)
    assert max(float(gradient.abs().max()) for gradient in gradients) > 1e-3


def test_packed_layers_see_real_tokens_only(make_policy: Callable[..., Any]) -> None:
    policy = make_policy("train.packing=true")
    batch = _ragged(policy)
    seen: list[tuple[int, ...]] = []
    layer = policy.model.model.layers[0].mlp
    handle = layer.register_forward_hook(lambda module, inputs, output: seen.append(tuple(inputs[0].shape)))
    with torch.no_grad():
        policy.token_stats(batch.input_ids, batch.mask, 1.0)
    handle.remove()
    real = 12 + 9 + 5 + 1 + 22  # a prompt without completion needs no more than its first token
    assert seen == [(1, real, 32)] and batch.input_ids.numel() == 5 * 22


def test_a_packed_sequence_does_not_see_its_neighbours(make_policy: Callable[..., Any]) -> None:
    policy = make_policy("train.packing=true", sharp=True)
    batch = _ragged(policy)
    packing = Packing.from_mask(batch.mask)
    with torch.no_grad():
        before = packed_hidden(policy.model.model, batch.input_ids, packing)
        changed = batch.input_ids.clone()
        changed[0, :12] = (changed[0, :12] + 1) % 256
        after = packed_hidden(policy.model.model, changed, packing)
    assert not torch.allclose(before[:12], after[:12], atol=1e-3)
    assert torch.equal(before[12:], after[12:])


@pytest.mark.parametrize(("mode", "blocks", "matmuls"), [("none", 1, 2), ("selective", 2, 2), ("full", 2, 3)])
def test_what_is_computed_again_gives_the_same_gradient(
    make_policy: Callable[..., Any], mode: str, blocks: int, matmuls: int
) -> None:
    """To the bit: the backward pass computes the very same numbers a second time, of selective without the matmuls."""
    found = []
    for again in ("none", mode):
        policy = make_policy(f"train.recompute={again}", adapted=True)
        batch, mlp = _ragged(policy), policy.model.model.layers[0].mlp
        for module in policy.model.modules():
            if isinstance(module, LoRALinear):
                module.fused = True  # as selective and kernels on a GPU need it
        policy.train_mode(True)
        calls, operands, base = [], [], mlp.gate_proj.get_base_layer()
        mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        plain = base.operand
        base.operand = lambda dtype, operands=operands, plain=plain: (operands.append(1), plain(dtype))[1]
        stats = policy.token_stats(batch.input_ids, batch.mask, 1.0)
        stats.logprobs.sum().backward()
        found.append((len(calls), len(operands), [parameter.grad for parameter in policy.trainable]))
    (_, _, gradients), (*counts, others) = found
    assert counts == [blocks, matmuls]
    assert all(torch.equal(one, other) for one, other in zip(gradients, others, strict=True))
    assert max(float(gradient.abs().max()) for gradient in gradients) > 1e-3


def test_each_mode_keeps_less_of_the_forward_pass(
    make_policy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that are held between forward and backward: all, inputs of blocks and matmuls, inputs of blocks."""
    kept, outputs = {}, []

    def contexts() -> Any:
        outputs.append(deque())
        return recompute.keeping(outputs[-1]), recompute.reusing(outputs[-1])

    monkeypatch.setattr(recompute, "matmuls_kept", contexts)
    for mode in ("none", "selective", "full"):
        policy = make_policy(f"train.recompute={mode}", "model.layers=4", adapted=True)
        batch, held = _ragged(policy), {}
        own = {tensor.untyped_storage().data_ptr() for tensor in policy.model.state_dict().values()}
        policy.train_mode(True)

        def pack(tensor: torch.Tensor, held: dict[int, int] = held) -> torch.Tensor:
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            stats = policy.token_stats(batch.input_ids, batch.mask, 1.0)
        held |= {y.data_ptr(): y.untyped_storage().nbytes() for block in outputs for y, _ in block}
        outputs.clear()
        kept[mode] = sum(size for place, size in held.items() if place not in own)
        assert stats.logprobs.requires_grad
    assert kept["full"] < 0.7 * kept["selective"] < 0.7 * 0.7 * kept["none"]
