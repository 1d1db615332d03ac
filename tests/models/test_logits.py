"""Trainer and sampler compute each architecture's own logits: its attention, its scalings, its caches, no dropout.

In FP32, against the model's own forward pass over one sequence at a time with the attention its authors wrote, which
transformers calls eager.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from qerl_bench.engine import hf_graph, hf_reference
from qerl_bench.engine.base import Sampling
from qerl_bench.engine.recordable import FAMILIES, eager_reason
from qerl_bench.engine.sampler import decode
from qerl_bench.model import attention
from qerl_bench.model.attention import enable_attention
from qerl_bench.model.kernels import choose_kernels
from qerl_bench.model.keys_values import KVRounding
from qerl_bench.model.lm_head import decoder_of, head_of, hidden_states, token_scores, token_stats
from qerl_bench.model.packing import Packing, mixes_sequences, packed_hidden
from qerl_bench.model.policy import Policy, prepare_attention
from qerl_bench.model.recompute import recompute_blocks
from qerl_bench.quant.kv_kinds import Kinds
from qerl_bench.quant.nvfp4 import NVFP4
from qerl_bench.quantizer.apply import quantize_model
from qerl_bench.train.batch import Batch, make_batch
from tests.models import matrix
from tests.models.builds import PAD_ID, WINDOW, config_of, draw_weights, known
from tests.weight_formats import PLAIN

# Heads that do more than multiply by a matrix.
SCALED = {"granite", "granitemoe", "granitemoehybrid", "cohere2", "falcon_h1", "gemma2", "gemma4_text", "nanochat"}
# Layers that carry a state from token to token, and decoders that do not hand `packing` to their attention.
STATEFUL = {"lfm2", "nemotron_h", "falcon_h1", "granitemoehybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"}
DEAF = {"stablelm", "nemotron"}
ROUNDING = 1e-4  # nats; FP32 makes up to 4.5e-5 (Qwen3-Next), and what the tests exclude is above 1e-2
TABLE = {row.architecture: row for row in matrix.read() if row.quant == "bf16"}
LENGTHS = (3 * WINDOW, 7, 2 * WINDOW + 1)


def _model(name: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(name), attn_implementation="eager")
    draw_weights(model, torch.Generator().manual_seed(0))
    return model.eval().requires_grad_(False)


def _sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 250, (length,), generator=generator).tolist() for length in LENGTHS]


def _batch() -> Batch:
    return make_batch([ids[:1] for ids in _sequences()], [ids[1:] for ids in _sequences()], PAD_ID, torch.device("cpu"))


def _own(model: Any, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities (M, V) after all tokens but the last of each sequence, by the model's own forward pass."""
    logits = [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1] for ids in _sequences()]
    return (torch.cat(logits).float() / temperature).log_softmax(-1)


@pytest.mark.parametrize("name", known())
def test_the_trainer_computes_the_models_own_logits(
    name: str, attend: Callable[[str], None], listen: Callable[..., list[Any]]
) -> None:
    """Over the whole vocabulary, with padding and, where layers allow it, without; sequences exceed the window."""
    model, batch = _model(name), _batch()
    predicts = batch.mask.roll(-1, dims=1)
    with torch.no_grad():
        wanted, head = _own(model), head_of(model)
        assert (head is model.get_output_embeddings()) == (name not in SCALED)
        assert enable_attention(decoder_of(model)) is None
        can_pack = not mixes_sequences(decoder_of(model))
        assert can_pack == (name not in STATEFUL | DEAF)
        for packing in (False, True) if can_pack else (False,):
            hidden = hidden_states(model, batch.input_ids, batch.mask, predicts, packing)
            found = head(hidden).float().log_softmax(-1)
            torch.testing.assert_close(found, wanted, rtol=0, atol=ROUNDING)
        if can_pack:  # the reference of attention without padding, which gets the windows that flash gets
            attend("masked")
            asked = listen(attention, "packed_backend")
            hidden = hidden_states(model, batch.input_ids, batch.mask, predicts, True)
            torch.testing.assert_close(head(hidden).float().log_softmax(-1), wanted, rtol=0, atol=ROUNDING)
            assert len(asked) == decoder_of(model).config.num_hidden_layers


@pytest.mark.parametrize("name", sorted({*known()} - STATEFUL - DEAF))
def test_a_shared_prompt_gives_the_models_own_logits(name: str, attend: Callable[[str], None]) -> None:
    """Computed once for completions of several lengths, with windows that begin in the prompt and after it."""
    model, ids = _model(name), _sequences()
    prompts, completions = [ids[1]] * 3, [ids[0][:20], ids[2][:1], ids[2]]
    batch = make_batch(prompts, completions, PAD_ID, torch.device("cpu"))
    packing = Packing.from_mask(batch.mask, batch.input_ids)
    assert len(packing.indices) == len(ids[1]) + sum(map(len, completions))
    with torch.no_grad():
        rows = zip(prompts, completions, strict=True)
        own = [model(input_ids=torch.tensor([p + c]), use_cache=False).logits[0, len(p) - 1 : -1] for p, c in rows]
        head, decoder = head_of(model), decoder_of(model)
        assert enable_attention(decoder) is None
        for backend in ("padded", "masked"):
            attend(backend)
            hidden = packed_hidden(decoder, batch.input_ids, packing)[packing.predictors]
            found, wanted = (logits.float().log_softmax(-1) for logits in (head(hidden), torch.cat(own)))
            torch.testing.assert_close(found, wanted, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", ["granite", "gemma2", "falcon_h1"])
def test_scores_and_gradients_behind_a_scaled_head(name: str) -> None:
    """A few logits at a time against all at once; entropy and greedy choice are of the model's logits too."""
    model, targets = _model(name), torch.tensor([token for ids in _sequences() for token in ids[1:]])
    hidden, head = torch.randn(len(targets), 64, generator=torch.Generator().manual_seed(2)), head_of(model)
    gradients = []
    for max_logits in (5 * 320, 1 << 20):
        leaf = hidden.clone().requires_grad_()
        logprobs, entropy, *_ = token_scores(head, leaf, targets, 0.7, 320, True, max_logits)
        (logprobs.sum() + 2 * entropy.sum()).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        batch = _batch()
        stats = token_stats(model, head, batch.input_ids, batch.mask, 0.7)
        cold, plain = _own(model, 0.7), _own(model)
    torch.testing.assert_close(stats.entropy[batch.mask], -(cold.exp() * cold).sum(-1), rtol=0, atol=ROUNDING)
    torch.testing.assert_close(stats.entropy_t1[batch.mask], -(plain.exp() * plain).sum(-1), rtol=0, atol=ROUNDING)
    assert torch.equal(stats.likeliest[batch.mask].bool(), plain.argmax(-1) == targets)


@pytest.mark.parametrize(("name", "reason"), [("qwen3_5_text", "read on"), ("llama", None)])
def test_packing_is_left_where_it_would_mix_sequences(
    name: str, reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert prepare_attention(decoder_of(_model(name))) == (reason is None)
    assert (reason or "") in caplog.text and bool(caplog.text) == (reason is not None)


@pytest.mark.parametrize("name", [name for name in known() if TABLE[name].verdict == "works"])
def test_no_family_loses_the_packed_training_that_the_table_has(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A release of transformers may take SDPA from a family, as 5.24 from Gemma 2: a run would only be slow."""
    with caplog.at_level("INFO"):
        packs = prepare_attention(decoder_of(_model(name)))
    assert packs == (TABLE[name].padding == "skipped"), caplog.text


# --- nothing random of the base --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "seed_oss", "starcoder2", "phi3", "mixtral"])
def test_only_the_adapters_dropout_is_on_in_training(name: str) -> None:
    """Each of these configs has a dropout of 0.1; Mixtral's router noise is switched on here."""
    model, batch = _model(name), _batch()
    for module in model.modules():
        if hasattr(module, "jitter_noise"):
            module.jitter_noise = 0.5
    assert getattr(model.config, "attention_dropout", 0) == 0.1
    recompute_blocks(model, "full")
    adapter = get_peft_model(model, LoraConfig(r=2, target_modules=["o_proj"], lora_dropout=0.5)).eval()
    policy: Any = SimpleNamespace(model=model)
    head, calls = head_of(model), []

    def logprobs() -> torch.Tensor:
        return token_stats(model, head, batch.input_ids, batch.mask, 1.0).logprobs

    quiet = logprobs().detach()
    Policy.train_mode(policy, True)
    assert torch.equal(logprobs(), quiet)  # B of the adapter is still 0
    for parameter_name, parameter in adapter.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    assert not torch.equal(logprobs(), logprobs())
    decoder_of(model).layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    logprobs().sum().backward()
    assert len(calls) == 2  # once more for the backward pass
    Policy.train_mode(policy, False)
    assert torch.equal(logprobs(), logprobs()) and not any(module.training for module in model.modules())


# --- sampling --------------------------------------------------------------------------------------------------------

NVFP4_SPEC = NVFP4(name="nvfp4", compute_dtype="float32", convention="compressed-tensors", **PLAIN)
SAMPLES, SAMPLING = 3, Sampling(samples=3, temperature=1.0, max_tokens=3 * WINDOW, seed=1)
KEYS = list(range(3 * SAMPLES))
PROMPTS = [_sequences()[0][:13], _sequences()[1][:1], _sequences()[2][:7]]


def _sampler(name: str, quant: str = "bf16", device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """As much of a policy as sampling needs. One token in twelve ends a completion, so that rows leave the batch."""
    model = _model(name)
    layers = quantize_model(model, NVFP4_SPEC).reports if quant == "nvfp4" else {}
    model = model.to(device, dtype)
    head, fused = head_of(model), device == "cuda"
    assert enable_attention(decoder_of(model)) is None
    choose_kernels(model, layers, "auto")
    stop_ids = frozenset(range(3, 320, 12))
    return SimpleNamespace(
        rounding=None,
        kv=KVRounding(Kinds(), torch.device(device)),
        merging=None,
        is_sharded=False,
        model=model,
        head=head,
        device=torch.device(device),
        pad_id=PAD_ID,
        stop_ids=stop_ids,
        fused=fused,
    )


# One for each kind of cache and of attention, and those with a head of their own.
KINDS = ["mistral", "gemma2", "gemma3", "gemma4_text", "cohere2", "gpt_oss", "llama4_text", "deepseek_v3", "granite"]


@pytest.mark.parametrize("name", KINDS + sorted(STATEFUL))
@torch.no_grad()
def test_the_sampler_agrees_with_the_trainer(name: str) -> None:
    """Left-padded prompts, caches repeated and cut down to the rows that are left, against one pass over the whole."""
    policy = _sampler(name)
    together = hf_reference.prefill(policy, PROMPTS).logits
    alone = torch.cat([hf_reference.prefill(policy, [ids]).logits for ids in PROMPTS])
    torch.testing.assert_close(together, alone, rtol=0, atol=ROUNDING)
    completions = hf_reference.decode(policy, PROMPTS, SAMPLING, KEYS)
    lengths = [len(ids) for ids, *_ in completions]
    assert len(set(lengths)) > 3  # rows leave the batch
    prompts = [ids for ids in PROMPTS for _ in range(SAMPLES)]
    batch = make_batch(
        prompts, [ids for ids, *_ in completions], PAD_ID, policy.device, [logprobs for _, logprobs, _ in completions]
    )
    stats = token_stats(policy.model, policy.head, batch.input_ids, batch.mask, 1.0)
    torch.testing.assert_close(stats.logprobs, batch.sampler_logprobs, rtol=0, atol=ROUNDING)


def _same(found: list[hf_reference.Completion], wanted: list[hf_reference.Completion], tolerance: float) -> None:
    assert [ids for ids, *_ in found] == [ids for ids, *_ in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one[1] == pytest.approx(other[1], abs=tolerance)
        assert one[2] == pytest.approx(other[2], abs=tolerance)


@pytest.mark.parametrize(
    ("name", "quant"), [(name, "bf16") for name in (*sorted(FAMILIES), "gemma3")] + [("qwen3_moe", "nvfp4")]
)
@torch.no_grad()
def test_the_recorded_step_samples_what_transformers_samples(name: str, quant: str) -> None:
    policy = _sampler(name, quant)
    _same(*(how(policy, PROMPTS, SAMPLING, KEYS) for how in (decode, hf_reference.decode)), ROUNDING)
    policy.fused = True
    reason = eager_reason(policy)
    assert reason is None if quant == "bf16" else "experts" in str(reason)  # which have kernels on a GPU only


@torch.no_grad()
def test_noise_on_norms_of_1_plus_w_is_in_the_recorded_step(make_noise: Any) -> None:
    policy = _sampler("gemma3_text")
    norms = {name: norm for name, norm in policy.model.named_modules() if name.endswith("feedforward_layernorm")}
    plain = decode(policy, PROMPTS, SAMPLING, KEYS)
    with make_noise(norms, 0.2).for_rollout(1, 0):
        found, wanted = (how(policy, PROMPTS, SAMPLING, KEYS) for how in (decode, hf_reference.decode))
    _same(found, wanted, ROUNDING)
    assert [ids for ids, *_ in found] != [ids for ids, *_ in plain]


@pytest.mark.gpu
@pytest.mark.parametrize("quant", ["bf16", "nvfp4"])
@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "qwen3_moe"])
@torch.inference_mode()
def test_a_replay_is_what_was_recorded(name: str, quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    with torch.inference_mode(False):
        policy = _sampler(name, quant, "cuda", torch.bfloat16)
    assert eager_reason(policy) is None
    found = decode(policy, PROMPTS, SAMPLING, KEYS)
    monkeypatch.setattr(hf_graph.Decoding, "_advance", hf_graph.Decoding._step)
    _same(found, decode(policy, PROMPTS, SAMPLING, KEYS), 0.0)


def test_experts_that_wait_for_the_gpu_are_not_recorded() -> None:
    policy = _sampler("qwen3_moe")
    policy.fused = True
    policy.model.set_experts_implementation("eager")
    assert "experts" in str(eager_reason(policy))
