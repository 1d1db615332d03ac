"""The policy: its per-token numbers against transformers' own logits, and adapter, base and checkpoint kept apart."""

from __future__ import annotations

import dataclasses
import inspect
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.utils import save_and_load
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordPiece
from transformers import PreTrainedTokenizerFast

from qerl_bench.algo.sft import SFT
from qerl_bench.model.byte_tokenizer import byte_tokenizer
from qerl_bench.model.policy import Policy
from qerl_bench.model.token_ids import stop_ids
from qerl_bench.model.word_tokenizer import word_tokenizer
from qerl_bench.model_setup import build_policy
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quantizer.apply import quantize_model
from qerl_bench.task.chat_template import texts_of
from qerl_bench.train.batch import make_batch
from qerl_bench.train.update import make_optimizer, update
from qerl_core.checks import ConfigError
from qerl_core.records import Demonstration, Prompt

QUANTS = pytest.mark.parametrize("quant", ["bf16", "nvfp4", "mxfp4", "nf4"])
PACKED = pytest.mark.parametrize("quant", ["nvfp4", "mxfp4", "nf4"])
PROMPTS = [[10], [1, 2, 3, 4, 5, 6, 7, 8, 9], [250, 3], [7, 7, 7]]
COMPLETIONS = [[5, 6, 7, 8, 257], [9], [11, 12, 13], [14] * 6]


def _batch(policy: Policy) -> Any:
    return make_batch(PROMPTS, COMPLETIONS, policy.pad_id, policy.device)


def _logits(policy: Policy, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return policy.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


NO_RUN: Any = None  # a run directory is needed only if something is not finite


def _train(policy: Policy, experiment: Any, steps: int = 3) -> None:
    optimizer = make_optimizer(policy, experiment.optim)
    supervised = dataclasses.replace(
        experiment, algo=SFT(name="sft", right_only=False), steps=max(steps, experiment.steps)
    )
    for step in range(1, steps + 1):
        update(supervised, policy, optimizer, _batch(policy), NO_RUN, step)


def test_no_dictionary_of_a_policy_can_be_written_into(make_policy: Callable[..., Any]) -> None:
    text = inspect.getsource(Policy.__init__)
    dictionaries = [name for name, value in vars(make_policy()).items() if isinstance(value, dict)]
    assert dictionaries and not [name for name in dictionaries if not re.search(rf"\b{name}: Mapping\[", text)]


# --- per-token numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.6])
def test_token_stats_against_plain_logits(make_policy: Callable[..., Any], temperature: float) -> None:
    """Right padding in token_stats against no padding at all in transformers' own forward pass."""
    policy = make_policy(sharp=True, adapted=True)
    batch = _batch(policy)
    with torch.no_grad():
        stats = policy.token_stats(batch.input_ids, batch.mask, temperature)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        logits = _logits(policy, prompt + completion)
        for offset, token in enumerate(completion):
            place = len(prompt) + offset
            scaled, plain = (logits[place - 1] / temperature).log_softmax(-1), logits[place - 1].log_softmax(-1)
            assert stats.logprobs[row, place].item() == pytest.approx(scaled[token].item(), abs=2e-5)
            assert stats.entropy[row, place].item() == pytest.approx(-(scaled.exp() * scaled).sum().item(), abs=2e-5)
            assert stats.entropy_t1[row, place].item() == pytest.approx(-(plain.exp() * plain).sum().item(), abs=2e-5)
            assert bool(stats.likeliest[row, place]) == (token == int(plain.argmax()))
    for values in (stats.logprobs, stats.entropy, stats.entropy_t1, stats.likeliest):
        assert values.shape == batch.mask.shape and values.dtype == torch.float32
        assert (values[~batch.mask] == 0).all()


def test_token_stats_against_left_padded_logits(make_policy: Callable[..., Any]) -> None:
    policy = make_policy(sharp=True, adapted=True)
    batch = _batch(policy)
    rows = [prompt + completion for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([[policy.pad_id] * (width - len(row)) + row for row in rows])
    attention = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    with torch.no_grad():
        stats = policy.token_stats(batch.input_ids, batch.mask, 1.0)
        logits = policy.model(
            input_ids=ids,
            attention_mask=attention,
            position_ids=(attention.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
        ).logits.float()
    for row, completion in enumerate(COMPLETIONS):
        size = len(completion)
        expected = logits[row, -size - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
        assert torch.allclose(stats.logprobs[row][batch.mask[row]], expected, rtol=0, atol=2e-5)


def test_padding_of_any_kind_and_width_has_no_influence(make_policy: Callable[..., Any]) -> None:
    policy = make_policy(sharp=True)
    batch = _batch(policy)
    with torch.no_grad():
        found = policy.token_stats(batch.input_ids, batch.mask, 1.0)
        for filler in (0, 5, 261):
            ids = torch.nn.functional.pad(batch.input_ids, (0, 7), value=filler)
            mask = torch.nn.functional.pad(batch.mask, (0, 7), value=False)
            for row, length in enumerate(batch.lengths.tolist()):
                ids[row, length:] = filler
            wider = policy.token_stats(ids, mask, 1.0)
            assert torch.allclose(wider.logprobs[:, :-7], found.logprobs, rtol=0, atol=2e-5)


def test_a_row_without_completion_is_all_zero(make_policy: Callable[..., Any]) -> None:
    policy = make_policy()
    batch = make_batch([[1, 2], [3]], [[], [4, 5]], policy.pad_id, policy.device)
    stats = policy.token_stats(batch.input_ids, batch.mask, 1.0)
    assert (stats.logprobs[0] == 0).all() and (stats.logprobs[1, 1:] < 0).all()
    stats.logprobs.sum().backward()
    empty = batch.rows(torch.tensor([0]))
    assert policy.token_stats(empty.input_ids, empty.mask & False, 1.0).logprobs.sum().item() == 0


def test_gradient_flows_through_logprobs_alone(make_policy: Callable[..., Any]) -> None:
    policy = make_policy()
    batch = _batch(policy)
    stats = policy.token_stats(batch.input_ids, batch.mask, 1.0)
    assert stats.logprobs.requires_grad
    assert not any(values.requires_grad for values in (stats.entropy, stats.entropy_t1, stats.likeliest))


# --- adapter and base ------------------------------------------------------------------------------------------------


@QUANTS
def test_a_fresh_adapter_has_no_effect(make_policy: Callable[..., Any], quant: str) -> None:
    policy = make_policy(quant=quant, width=64)
    with policy.without_adapter():
        base = _logits(policy, list(range(30)))
    assert torch.equal(_logits(policy, list(range(30))), base)
    state = policy.adapter_state()
    assert len(state) == 2 * 7 * 2  # A and B of seven layers in two blocks
    assert all(bool((tensor == 0).all()) == ("lora_B" in name) for name, tensor in state.items())


def test_looking_at_the_adapter_asks_no_hub(make_policy: Callable[..., Any], listen: Callable[..., list[Any]]) -> None:
    asked = listen(save_and_load, "check_file_exists_on_hf_hub")
    policy = make_policy(width=64)
    policy.adapter.peft_config["default"].base_model_name_or_path = "owner/model"
    assert len(policy.adapter_state()) == 28 and not asked


@QUANTS
def test_without_adapter_is_the_base_and_restores_the_adapter(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], quant: str
) -> None:
    policy = make_policy(quant=quant, width=64, adapted=True)
    ids = list(range(30))
    experiment = make_experiment(f"quant={quant}", "model.hidden_size=64")
    model, _ = experiment.model.load(None, "cpu")
    quantize_model(model, experiment.quant)
    with torch.no_grad():
        base = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    adapted = _logits(policy, ids)
    assert (adapted - base).abs().max() > 1e-3
    trainable = {id(parameter) for parameter in policy.trainable}
    with policy.without_adapter():
        assert torch.equal(_logits(policy, ids), base)
    assert torch.equal(_logits(policy, ids), adapted)
    with pytest.raises(RuntimeError), policy.without_adapter():
        raise RuntimeError
    assert torch.equal(_logits(policy, ids), adapted)
    assert {id(parameter) for parameter in policy.trainable} == trainable != set()


@PACKED
def test_training_changes_the_adapter_and_not_one_bit_of_anything_else(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], quant: str
) -> None:
    policy = make_policy(quant=quant, width=64)
    packed = [module for module in policy.model.modules() if isinstance(module, PackedLinear)]
    assert len(packed) == 14
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    batch = _batch(policy)
    policy.token_stats(batch.input_ids, batch.mask, 1.0).logprobs.sum().backward()
    with_gradient = {name for name, parameter in policy.model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name in before if ".lora_" in name}
    policy.model.zero_grad(set_to_none=True)

    _train(policy, make_experiment(f"quant={quant}", "model.hidden_size=64"))
    after = policy.model.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        bits = tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
        old = before[name].contiguous().view(torch.uint8) if tensor.dim() else before[name].reshape(1).view(torch.uint8)
        assert torch.equal(bits, old) == (".lora_" not in name), name
    assert all(layer.dequantized().isfinite().all() for layer in packed)


def test_the_adapter_is_seeded_by_the_run_and_nothing_else(make_experiment: Callable[..., Any]) -> None:
    def adapter(*words: str) -> torch.Tensor:
        torch.manual_seed(torch.randint(0, 2**31, ()).item())
        before = torch.get_rng_state()
        state = build_policy(make_experiment(*words), None, "cpu").adapter_state()
        assert torch.equal(torch.get_rng_state(), before)
        return torch.cat([tensor.flatten() for name, tensor in sorted(state.items()) if "lora_A" in name])

    first = adapter("quant=nvfp4")
    assert torch.equal(first, adapter("quant=nvfp4"))
    assert torch.equal(first, adapter("quant=mxfp4")), "the formats are compared from one and the same adapter"
    assert not torch.equal(first, adapter("quant=nvfp4", "seed=1"))


def test_dropout_is_on_in_training_alone(make_policy: Callable[..., Any]) -> None:
    policy = make_policy("lora.dropout=0.5", adapted=True)
    batch = _batch(policy)

    def logprobs() -> torch.Tensor:
        with torch.no_grad():
            return policy.token_stats(batch.input_ids, batch.mask, 1.0).logprobs

    assert torch.equal(logprobs(), logprobs())
    policy.train_mode(True)
    assert not torch.equal(logprobs(), logprobs())
    policy.train_mode(False)
    assert torch.equal(logprobs(), logprobs())


# --- save and load ---------------------------------------------------------------------------------------------------


@QUANTS
def test_adapter_round_trip_is_exact(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], quant: str, tmp_path: Path
) -> None:
    policy = make_policy(quant=quant, width=64)
    _train(policy, make_experiment(f"quant={quant}", "model.hidden_size=64"))
    policy.save(tmp_path)
    assert sorted(
        path.name for path in (tmp_path / "adapter").iterdir() if path.suffix in (".safetensors", ".json")
    ) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    fresh = make_policy("seed=5", quant=quant, width=64)
    ids = list(range(30))
    assert not torch.equal(_logits(fresh, ids), _logits(policy, ids))
    fresh.load(tmp_path)
    assert fresh.adapter_state().keys() == policy.adapter_state().keys()
    assert all(torch.equal(tensor, policy.adapter_state()[name]) for name, tensor in fresh.adapter_state().items())
    assert torch.equal(_logits(fresh, ids), _logits(policy, ids))
    assert all(parameter.requires_grad for parameter in fresh.trainable) and len(fresh.trainable) == 28


def test_an_adapter_of_other_layers_is_not_loaded_in_part(make_policy: Callable[..., Any], tmp_path: Path) -> None:
    policy = make_policy(width=64)
    for other in ("lora.targets=[q_proj]", "lora.rank=2"):
        make_policy(other, width=64).save(tmp_path)
        with pytest.raises(ConfigError, match="adapter of other layers, or of another rank"):
            policy.load(tmp_path)


@QUANTS
def test_a_saved_adapter_loads_with_plain_peft(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], quant: str, tmp_path: Path
) -> None:
    policy = make_policy(quant=quant, width=64, adapted=True)
    policy.name_base("owner/model", "sha256:1f", None)
    policy.save(tmp_path)
    experiment = make_experiment(f"quant={quant}", "model.hidden_size=64")
    model, _ = experiment.model.load(None, "cpu")
    quantize_model(model, experiment.quant)
    loaded = PeftModel.from_pretrained(model, str(tmp_path / "adapter"))
    ids = torch.arange(30)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, policy.model(input_ids=ids).logits)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 4, 0.0)
    assert config["base_model_name_or_path"] == "owner/model"
    assert "owner/model (sha256:1f)" in (tmp_path / "adapter" / "README.md").read_text()


def test_full_parameter_round_trip_is_exact(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], tmp_path: Path
) -> None:
    policy = make_policy("lora=none", quant="bf16")
    start = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    _train(policy, make_experiment("lora=none", "quant=bf16"))
    assert all(not torch.equal(parameter, start[name]) for name, parameter in policy.model.named_parameters())
    policy.save(tmp_path)
    fresh = make_policy("lora=none", "model.seed=3", quant="bf16")
    fresh.load(tmp_path)
    for name, parameter in fresh.model.named_parameters():
        assert torch.equal(parameter, dict(policy.model.named_parameters())[name])
    assert torch.equal(_logits(fresh, [1, 2, 3]), _logits(policy, [1, 2, 3]))
    assert fresh.model.lm_head.weight is fresh.model.model.embed_tokens.weight  # still tied


def test_full_parameters_in_several_files_round_trip(make_policy: Callable[..., Any], tmp_path: Path) -> None:
    policy = make_policy("lora=none", quant="bf16")
    policy.model.save_pretrained(str(tmp_path / "model"), max_shard_size="50KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    fresh = make_policy("lora=none", "model.seed=3", quant="bf16")
    fresh.load(tmp_path)
    assert torch.equal(_logits(fresh, [1, 2, 3]), _logits(policy, [1, 2, 3]))


def test_full_parameter_training_reaches_every_weight(make_policy: Callable[..., Any]) -> None:
    policy = make_policy("lora=none", quant="bf16")
    assert {id(p) for p in policy.trainable} == {id(p) for p in policy.model.parameters()}
    with policy.without_adapter():
        assert policy.adapter is None and policy.adapter_state() == {}


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_prompt_and_completion_ids(make_policy: Callable[..., Any]) -> None:
    policy = make_policy()
    messages = ({"role": "system", "content": "never shown"}, {"role": "user", "content": "1+2=?"})
    assert policy.tokenizer.decode(policy.prompt_ids(messages)) == "1+2=?\n"
    completion = "<think>1+2=3</think><answer>3</answer>"
    prompt = Prompt(id="q", messages=messages, answer="3")
    (prompt_ids,), (ids,) = policy.demonstration_ids([Demonstration(prompt=prompt, completion=completion)])
    assert prompt_ids == policy.prompt_ids(messages)
    assert ids[-1] == policy.tokenizer.eos_token_id and ids[-1] in policy.stop_ids
    assert len(ids) == 4 + len("1+2=3") + 1 + 1  # a tag is one token
    assert policy.tokenizer.decode(ids[:-1]) == completion
    assert policy.completion_texts([prompt_ids], [ids[:-1]]) == [completion]
    assert policy.pad_id == policy.tokenizer.pad_token_id != policy.tokenizer.eos_token_id


def _word_pieces(cls: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast, **options: Any) -> Any:
    pieces = {word: i for i, word in enumerate(["[UNK]", "do", "##es", "n't", "not", ",", ".", "fit"])}
    backend = Tokenizer(WordPiece(pieces, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return cls(tokenizer_object=backend, unk_token="[UNK]", **options)


class _Loud(PreTrainedTokenizerFast):
    def _decode(self, *args: Any, **options: Any) -> str:
        return super()._decode(*args, **options).upper()


@pytest.mark.parametrize(
    ("tokenizer", "shown"),
    [
        (byte_tokenizer(), None),
        (word_tokenizer(), None),
        (_word_pieces(clean_up_tokenization_spaces=False), "does n't fit ."),
        (_word_pieces(clean_up_tokenization_spaces=True), "doesn't fit."),
        (_word_pieces(_Loud, clean_up_tokenization_spaces=False), "DOES N'T FIT ."),
    ],
)
def test_texts_of_many_are_what_decode_makes_of_each(tokenizer: Any, shown: str | None) -> None:
    draw = random.Random(0)
    ids = [[draw.randrange(len(tokenizer)) for _ in range(length)] for length in (0, 1, 5, 40, 3)]
    assert texts_of(tokenizer, ids) == [tokenizer.decode(one) for one in ids]
    assert texts_of(tokenizer, []) == []
    if shown is not None:
        assert texts_of(tokenizer, [[1, 2, 3, 7, 6]]) == [shown]


def test_stop_ids_of_tokenizer_and_generation_config(make_policy: Callable[..., Any]) -> None:
    policy = make_policy()
    model, end = policy.model, policy.tokenizer.eos_token_id
    for listed, expected in ((None, {end}), (end, {end}), (3, {3, end}), ([3, 4], {3, 4, end})):
        model.generation_config.eos_token_id = listed
        assert stop_ids(model, policy.tokenizer) == expected


def test_layer_reports_cover_every_packed_layer(make_policy: Callable[..., Any]) -> None:
    policy = make_policy(quant="nvfp4")
    assert len(policy.layers) == 14
    assert all(
        4.5 <= report.bits_per_weight < 4.6 and 0.05 < report.relative_error < 0.15 for report in policy.layers.values()
    )


@pytest.mark.parametrize("padded", [False, True])
def test_ids_of_many_prompts_are_those_of_each(padded: bool, make_policy: Callable[..., Policy]) -> None:
    policy = make_policy()
    backend: Any = policy.tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    texts = ["1+1=", "123456 + 7 =", "2"]
    prompts = [Prompt(id=text, messages=({"role": "user", "content": text},), answer="") for text in texts]
    prompts.insert(1, Prompt(id="ids", messages=(), answer="", token_ids=(5, 6)))
    if padded:
        backend.enable_padding()
    try:
        assert policy.ids_of_each(prompts) == [policy.ids_of(prompt) for prompt in prompts]
    finally:
        backend.no_padding()
