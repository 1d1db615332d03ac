"""Seeds, the built-in model and its tokenizer: made on any machine, the same every time."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from qerl_bench.config import build, compose
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model.byte_tokenizer import TAGS, byte_tokenizer
from qerl_bench.model.hub import HubModel
from qerl_bench.model.tiny import TinyModel
from qerl_core.checks import ConfigError
from qerl_core.options import user_options
from qerl_core.process.installation import CONF_DIR
from qerl_core.seeding import derive

_tokenizer = cache(byte_tokenizer)


def _tiny(**changed: Any) -> TinyModel:
    options = {
        "name": "tiny",
        "hidden_size": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "intermediate_size": 48,
        "warm_start_steps": 0,
        "seed": 0,
        "dtype": "float32",
        "lr": 1e-3,
    }
    return TinyModel(**{**options, **changed})


def _flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().float() for parameter in model.parameters()])


# --- seeds -----------------------------------------------------------------------------------------------------------


def test_a_seed_is_the_hash_of_its_parts() -> None:
    digest = hashlib.blake2b(b"0/rollout/7/arithmetic/1+2=?/3", digest_size=8).digest()
    assert derive(0, "rollout", 7, "arithmetic/1+2=?", 3) == int.from_bytes(digest, "little") // 2
    assert derive(0, "train", 1) == 5117484978319604450, "a change of this number changes every run"


def test_seeds_fit_into_63_bits_and_differ() -> None:
    seeds = {
        derive(seed, purpose, step)
        for seed in range(10)
        for purpose in ("train", "noise", "rollout")
        for step in range(100)
    }
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62 > 2**40 > min(seed & (2**41 - 1) for seed in seeds)
    for seed in sorted(seeds)[:3]:
        torch.Generator().manual_seed(seed)


def test_a_seed_does_not_depend_on_the_process() -> None:
    code = "from qerl_core.seeding import derive; print(derive(3, 'noise', 5))"
    for hash_seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(found.stdout) == derive(3, "noise", 5)


# --- the tokenizer ---------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    tokenizer = _tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not any(special in text for special in ("<|pad|>", "<|end|>")):
        assert tokenizer.decode(ids) == text


def test_one_token_for_each_byte_and_each_tag() -> None:
    tokenizer = _tokenizer()
    assert len(tokenizer) == 262
    for text in ("12+34=?\n", "é€😀", " leading", "\x00\x7f"):
        assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == len(text.encode())
    ids = tokenizer("".join(TAGS), add_special_tokens=False)["input_ids"]
    assert len(ids) == 4 and len(set(ids)) == 4 and min(ids) >= 258
    assert tokenizer("a<think>b", add_special_tokens=False)["input_ids"][1] == ids[0]
    assert tokenizer(" <think> ", add_special_tokens=False)["input_ids"][1] == ids[0]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.decode([257]) == "<|end|>"


def test_the_tokenizer_survives_a_checkpoint(tmp_path: Path) -> None:
    _tokenizer().save_pretrained(str(tmp_path))
    again = AutoTokenizer.from_pretrained(str(tmp_path))
    text = "<think>1+2=3</think><answer>3</answer> é"
    assert (
        again(text, add_special_tokens=False)["input_ids"] == _tokenizer()(text, add_special_tokens=False)["input_ids"]
    )
    ids = again(text, add_special_tokens=False)["input_ids"]
    assert again.decode(ids) == text
    messages = [{"role": "system", "content": "no"}, {"role": "user", "content": "1+2=?"}]
    for tokenizer in (again, _tokenizer()):
        assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "1+2=?\n"
    assert (again.pad_token_id, again.eos_token_id, len(again)) == (256, 257, 262)


# --- the tiny model --------------------------------------------------------------------------------------------------


def test_the_seed_alone_decides_the_weights() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, _ = _tiny().load(None, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(_flat(_tiny().load(None, "cpu")[0]), _flat(first))
    assert not torch.equal(_flat(_tiny(seed=1).load(None, "cpu")[0]), _flat(first))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_checkpoint_is_bfloat16_whatever_it_computes_in(dtype: str) -> None:
    model, _ = _tiny(dtype=dtype).load(None, "cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    reference, _ = _tiny().load(None, "cpu")
    assert torch.equal(_flat(reference), _flat(reference).bfloat16().float())
    if dtype != "float16":
        assert torch.equal(_flat(model), _flat(reference))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotary_frequencies_keep_their_precision(dtype: str, tmp_path: Path) -> None:
    """In BF16 a frequency is wrong by up to 0.4 %, which at position 1,000 turns an angle by radians."""
    model, tokenizer = _tiny(dtype=dtype).load(None, "cpu")
    model.save_pretrained(str(tmp_path))
    tokenizer.save_pretrained(str(tmp_path))
    models = [
        model,
        _tiny(dtype=dtype).load(tmp_path, "cpu")[0],
        _hub(id=str(tmp_path), dtype=dtype).load(None, "cpu")[0],
    ]
    exact = 10_000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)  # head size 8
    for loaded in models:
        assert next(loaded.parameters()).dtype == getattr(torch, dtype)
        assert torch.allclose(loaded.model.rotary_emb.inv_freq.double(), exact, rtol=1e-6, atol=0)


def test_shape_and_ties() -> None:
    model, tokenizer = _tiny().load(None, "cpu")
    assert model.config.num_hidden_layers == 2 and model.config.hidden_size == 32 and model.config.vocab_size == 262
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.eos_token_id == tokenizer.eos_token_id == 257
    assert (
        sum(p.numel() for p in model.parameters())
        == 262 * 32 + 2 * ((32 * 32 + 32) + 2 * (32 * 16 + 16) + 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32
    )


def test_a_warm_started_base_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    model, tokenizer = _tiny(seed=4).load(None, "cpu")
    model.save_pretrained(str(tmp_path))
    tokenizer.save_pretrained(str(tmp_path))
    loaded, again = _tiny(seed=0).load(tmp_path, "cpu")
    assert torch.equal(_flat(loaded), _flat(model))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    text = "<think>e\u0301 <|endoftext|></think>"  # AutoTokenizer would compose the accent and know a 263rd token
    assert len(again) == 262
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_the_warm_start_is_a_run_of_its_own() -> None:
    assert _tiny().warm_start_overrides() is None
    words = _tiny(warm_start_steps=7, seed=3).warm_start_overrides()
    assert words is not None
    assert build(compose(words)).optim.warmup_steps == 3  # half of a short warm start, 20 steps of a long one
    words = _tiny(warm_start_steps=70, seed=3, dtype="bfloat16").warm_start_overrides()
    assert words is not None
    experiment = build(compose(words))
    assert (experiment.algo.name, experiment.quant.name, experiment.lora.rank, experiment.aqn.name) == (
        "sft",
        "bf16",
        0,
        "none",
    )
    assert (experiment.steps, experiment.save_every, experiment.optim.warmup_steps) == (70, 100, 20)
    assert experiment.model.warm_start_overrides() is None  # or it would start a warm start of its own
    for key in ("hidden_size", "layers", "heads", "kv_heads", "intermediate_size"):
        assert getattr(experiment.model, key) == getattr(_tiny(), key)
    assert experiment.model.seed == 3


def test_another_recipe_is_another_base_and_the_first_keeps_its_name() -> None:
    def pretraining(*words: str) -> Experiment:
        model = build(compose(["model=small/10m", "task=countdown", *words])).model
        overrides = model.warm_start_overrides()
        assert overrides is not None
        return build(compose([*overrides, "task=countdown"]))

    plain, bf16 = pretraining(), pretraining("model.warm_start_experiment=pretrain_bf16")
    assert plain.name == "small-10m-bf16-none-sft-r0-s0-e9859579" != bf16.name
    assert (plain.train.autocast, plain.optim.beta2, plain.optim.warmup_steps) == (False, 0.99, 20)
    assert (bf16.train.autocast, bf16.optim.beta2, bf16.optim.warmup_steps) == (True, 0.95, 200)
    assert bf16.optim.lr == plain.optim.lr and bf16.model.dtype == "float32"
    with pytest.raises(ConfigError, match="must be one of pretrain, pretrain_bf16, got 'pretrain_bf61'"):
        pretraining("model.warm_start_experiment=pretrain_bf61")


def test_other_weights_are_another_warm_start() -> None:
    def name(**changed: Any) -> str:
        return build(compose(_tiny(**{"warm_start_steps": 70, **changed}).warm_start_overrides())).name

    names = {name(), name(seed=1), name(layers=3), name(warm_start_steps=71), name(intermediate_size=64)}
    assert len(names) == 5
    assert name(dtype="bfloat16", lr=1.0) == name()  # the same base weights for every way to compute with them


@pytest.mark.parametrize("size", ["2m", "10m", "25m", "50m"])
def test_a_small_base_is_pretrained_under_its_own_name_and_once_for_all_outliers(size: str) -> None:
    def pretraining(*words: str) -> Experiment:
        return build(compose(build(compose([f"model=small/{size}", *words])).model.warm_start_overrides()))

    assert (pretraining().save_every, pretraining().checkpoints.keep) == (100, 1)
    made, model = pretraining("model.seed=3"), build(compose([f"model=small/{size}", "model.seed=3"])).model
    assert made.name.startswith(f"small-{size}-bf16-none-sft-")
    assert vars(made.model) == {**vars(model), "warm_start_steps": 0}
    assert pretraining("model.seed=3", "model.outliers=1.15", "model.dtype=bfloat16").name == made.name
    fewer = pretraining("model.seed=3", "model.warm_start_prompts=96", "model.warm_start_steps=7")
    assert (fewer.rollout.prompts_per_step, fewer.steps, made.rollout.prompts_per_step) == (96, 7, 2048)
    if size == "10m":  # what earlier caches have
        assert made.name == "small-10m-bf16-none-sft-r0-s0-c68813d5"


def test_a_small_model_from_elsewhere_is_pretrained_as_itself(tmp_path: Path) -> None:
    user_options.use([tmp_path])
    (tmp_path / "model" / "own").mkdir(parents=True)
    known = (CONF_DIR / "model" / "small" / "2m.yaml").read_text()
    rough = known.replace("name: small-2m", "name: own-rough").replace("outliers: 0.0", "outliers: 2.0")
    (tmp_path / "model" / "own" / "rough.yaml").write_text(rough.replace("dtype: float32", "dtype: bfloat16"))
    here = user_options.words_in_use()
    model = build(compose([*here, "model=own/rough"])).model
    made = build(compose([*here, *(model.warm_start_overrides() or [])]))
    assert made.name.startswith("own-rough-") and (made.model.name, made.model.dtype) == ("own-rough", "float32")
    assert vars(made.model)["outliers"] == 0 and vars(model)["outliers"] == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"hidden_size": 30},
        {"hidden_size": 0},
        {"kv_heads": 3},
        {"heads": 0},
        {"layers": 1.5},
        {"layers": True},
        {"dtype": "int8"},
        {"warm_start_steps": -1},
        {"seed": "a"},
        {"seed": -1},
    ],
    ids=str,
)
def test_impossible_shapes_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changed))):
        _tiny(**changed)


# --- models from elsewhere -------------------------------------------------------------------------------------------


def _hub(**changed: Any) -> HubModel:
    values: dict[str, Any] = {"name": "x", "id": "x", "revision": None, "dtype": "bfloat16", "lr": 1e-5}
    return HubModel(
        **{**values, "trust_remote_code": False, "template": {}, "dither": None, "dither_scale": 1.0, **changed}
    )


def test_a_local_folder(make_policy: Callable[..., Any], tmp_path: Path) -> None:
    model, tokenizer = _tiny().load(None, "cpu")
    model.save_pretrained(str(tmp_path))
    tokenizer.save_pretrained(str(tmp_path))
    loaded, again = _hub(id=str(tmp_path)).load(None, "cpu")
    assert type(loaded) is type(model) and loaded.dtype == torch.bfloat16
    assert torch.equal(_flat(loaded), _flat(model))
    assert again.eos_token_id == 257


@pytest.mark.parametrize("missing", ["no/such/folder/anywhere", "empty"])
def test_a_folder_that_is_not_there_or_holds_no_model(tmp_path: Path, missing: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        _hub(id=str(tmp_path / missing)).load(None, "cpu")
    assert str(tmp_path / missing) in str(caught.value) and "model.id=" in str(caught.value)


def test_hub_values_are_checked() -> None:
    assert _hub().warm_start_overrides() is None
    with pytest.raises(ConfigError, match="dtype"):
        _hub(dtype="int4")
