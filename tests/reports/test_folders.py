"""Folders of others: what config, generation config, tokenizer and files say is checked before anything is built."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, JambaConfig, LlamaConfig, PreTrainedTokenizerFast

from qerl_bench.config import build as build_experiment
from qerl_bench.config import compose
from qerl_bench.model.context import context_of
from qerl_bench.model.digest import digest_of, file_digest
from qerl_bench.model.hub import HubModel
from qerl_bench.model.load import load_packed
from qerl_bench.model_setup import build_policy
from qerl_bench.quant.export import export
from qerl_bench.quant.foreign_config import checked_config
from qerl_bench.quant.weight_files import weight_files
from qerl_bench.quantizer.calibration import Calibration
from qerl_bench.task.chat_template import demonstration_ids
from qerl_bench.task.datafile import read_rows
from qerl_core.checks import ConfigError
from qerl_core.records import RENDERED, Demonstration, Message, Prompt
from qerl_core.rundir.run_dir import RunDir
from tests.failing import failing
from tests.models.builds import BEGIN, PAD_ID, VOCABULARY, build, write_tokenizer

CHAT: tuple[Message, ...] = ({"role": "user", "content": "2+2?"},)
IDS = torch.tensor([[3, 200, 17, 44, 101, 7, 9, 66]])
FORMATS = ("bf16", "nvfp4", "mxfp4", "nf4")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = build(name, tmp_path_factory.mktemp("foreign") / name)
        return made[name]

    return folder


@pytest.fixture
def llama(folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint to damage, whose head is its embedding."""
    return shutil.copytree(folders("llama"), tmp_path / "llama")


@pytest.fixture
def mistral(folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """The same with a head of its own."""
    return shutil.copytree(folders("mistral"), tmp_path / "mistral")


def say(folder: Path, file: str = "config.json", **changes: Any) -> None:
    path = folder / file
    said = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(said | changes))


def put(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def experiment(folder: Path, *words: str) -> Any:
    chosen = ("model=hub", f"model.id={folder}", "model.dtype=float32", "device=cpu", "quant=bf16", *words)
    return build_experiment(compose([*chosen]))


def load(folder: Path, *words: str) -> Any:
    chosen = experiment(folder, *words)
    return load_packed(chosen.model, chosen.quant, chosen.quantizer, chosen.task, None, "cpu")[0]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


def hub(folder: Path, **changes: Any) -> HubModel:
    values: dict[str, Any] = {"name": "x", "id": str(folder), "revision": None, "dtype": "float32", "lr": 1e-5}
    values |= {"trust_remote_code": False, "template": {}, "dither": None, "dither_scale": 1.0}
    return HubModel(**(values | changes))


# --- tied by config, two matrices in the file: https://github.com/huggingface/transformers/issues/42612 --------------
# and https://github.com/huggingface/peft/issues/2777


def other_head(folder: Path) -> torch.Tensor:
    shape = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].shape
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


@pytest.mark.parametrize("quant", FORMATS)
def test_a_head_that_differs_from_the_embedding_is_kept(llama: Path, quant: str, tmp_path: Path) -> None:
    """In weights that are packed while they are read, and in those that were packed before."""
    put(llama, **{"lm_head.weight": (head := other_head(llama))})
    model = load(llama, f"quant={quant}")
    assert torch.equal(model.lm_head.weight, head.float())
    assert not torch.equal(model.model.embed_tokens.weight, head.float())
    theirs = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    assert torch.equal(theirs.lm_head.weight, head.float())  # transformers keeps both, too
    if quant == "bf16":
        assert torch.equal(logits(model), logits(theirs.eval()))
        return
    chosen = experiment(llama, f"quant={quant}", "model.dtype=bfloat16")
    packed = load(llama, f"quant={quant}", "model.dtype=bfloat16")
    export(packed, chosen.model.tokenizer(), chosen.quant, tmp_path / "packed")
    say(tmp_path / "packed", tie_word_embeddings=True)
    again = load(tmp_path / "packed", f"quant={quant}")
    assert torch.equal(again.lm_head.weight, head.float())


def test_a_head_in_the_old_format_of_pytorch_is_kept(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors") | {"lm_head.weight": (head := other_head(llama))}
    (llama / "model.safetensors").unlink()
    torch.save(tensors, llama / "pytorch_model.bin")
    assert torch.equal(load(llama).lm_head.weight, head.float())


def test_the_head_of_a_multimodal_checkpoint_is_kept(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders("gemma3"), tmp_path / "gemma3")
    names = load_file(folder / "model.safetensors")
    embedding = next(name for name in names if name.endswith("embed_tokens.weight"))
    head = torch.randn(names[embedding].shape).to(torch.bfloat16)
    put(folder, **{"language_model.lm_head.weight": head})
    model = load(folder)
    assert torch.equal(model.get_output_embeddings().weight, head.float())


def test_a_head_that_is_the_embedding_stays_tied(llama: Path) -> None:
    put(llama, **{"lm_head.weight": load_file(llama / "model.safetensors")["model.embed_tokens.weight"].clone()})
    model = load(llama)
    assert model.lm_head.weight is model.model.embed_tokens.weight


# --- pad token without an embedding: https://github.com/meta-llama/llama-cookbook/issues/189 and ----------------------
# https://github.com/huggingface/transformers/issues/23401


def with_tokens(folder: Path, words: dict[str, Any]) -> None:
    """Tokens beyond the embedding, which has VOCABULARY rows."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens([f"<{number}>" for number in range(VOCABULARY - len(tokenizer))])
    tokenizer.add_special_tokens(words)
    tokenizer.save_pretrained(folder)


def test_padding_needs_no_embedding_of_its_own(llama: Path) -> None:
    with_tokens(llama, {"pad_token": "[PAD]"})
    policy = build_policy(experiment(llama), None, "cpu")
    assert policy.tokenizer.pad_token_id == VOCABULARY and policy.pad_id == min(policy.stop_ids)
    with_tokens(llama, {"eos_token": "[END]"})  # the generation config has another
    policy = build_policy(experiment(llama), None, "cpu")
    assert policy.tokenizer.eos_token == "[END]" and max(*policy.stop_ids, policy.pad_id) < VOCABULARY


def test_a_model_that_cannot_end_is_refused(llama: Path) -> None:
    with_tokens(llama, {"eos_token": "[END]"})
    say(llama, "generation_config.json", eos_token_id=VOCABULARY)
    with pytest.raises(
        ConfigError, match=rf"names no token .*\[{VOCABULARY}\].* rows 0 to {VOCABULARY - 1}.*eos_token"
    ):
        build_policy(experiment(llama), None, "cpu")
    say(llama, eos_token_id=None)
    say(llama, "generation_config.json", eos_token_id=None)
    say(llama, "tokenizer_config.json", eos_token=None)
    with pytest.raises(ConfigError, match=r"names no token that ends.*eos_token_id in generation_config\.json"):
        build_policy(experiment(llama), None, "cpu")
    demonstration = Demonstration(prompt=Prompt(id="q", messages=CHAT, answer="4"), completion="4")
    with pytest.raises(ConfigError, match=r"eos_token=None.*tokenizer_config\.json"):
        demonstration_ids(hub(llama).tokenizer(), [demonstration], {})


def test_a_prompt_with_a_token_that_the_embedding_lacks_is_refused_before_weights_are_read(llama: Path) -> None:
    with_tokens(llama, {"bos_token": "[BEGIN]"})
    (llama / "model.safetensors").unlink()
    for template, prompt in (({}, CHAT), (None, ({"role": RENDERED, "content": "[BEGIN]"},))):
        with pytest.raises(ConfigError, match=rf"model\.id={llama}: .*\[BEGIN\]' with the id {VOCABULARY} .*resize"):
            hub(llama, template=template).check(prompt)


def test_tokens_of_questions_and_demonstrations_have_rows(llama: Path) -> None:
    with_tokens(llama, {"additional_special_tokens": ["[IMG]"]})
    policy = build_policy(experiment(llama), None, "cpu")
    seen = Prompt(id="q/7", messages=({"role": "user", "content": "[IMG]?"},), answer="4")
    ready = Prompt(id="q/8", messages=CHAT, answer="4", token_ids=(VOCABULARY + 1,))
    for prompt in (seen, ready):
        with pytest.raises(ConfigError, match=rf"{prompt.id} .* embedding has the rows 0 to {VOCABULARY - 1}"):
            policy.ids_of(prompt)
    plain = Prompt(id="q/9", messages=CHAT, answer="4")
    assert policy.ids_of(plain)
    with pytest.raises(ConfigError, match=r"a demonstration has the token '\[IMG\]'"):
        policy.demonstration_ids([Demonstration(prompt=plain, completion="[IMG]")])


@pytest.mark.parametrize("pad", [-1, VOCABULARY, 32_000])
def test_a_pad_token_of_the_config_without_a_row_is_left_out(
    llama: Path, pad: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Llama 1 has -1; transformers itself ends with an AssertionError at the others."""
    expected = logits(load(llama))
    say(llama, pad_token_id=pad)
    (llama / "generation_config.json").unlink()
    with caplog.at_level(logging.WARNING):
        model = load(llama)
    assert torch.equal(logits(model), expected)
    assert f"pad_token_id={pad}" in caplog.text and "config.json" in caplog.text
    assert model.generation_config.pad_token_id is None


# --- a generation config that cannot be written: https://github.com/huggingface/transformers/issues/29988, -----------
# https://github.com/hiyouga/LlamaFactory/issues/2767 and https://github.com/QwenLM/Qwen3-ASR/issues/210


@pytest.mark.parametrize(
    "said",
    [
        {"do_sample": False, "temperature": 0.9, "top_p": 0.6},
        {"length_penalty": 2.0},
        {"max_new_tokens": -3},
        {"cache_implementation": "nonsense"},
        {"early_stopping": "perhaps"},
    ],
)
def test_sampling_flags_that_contradict_each_other_do_not_end_a_run(
    llama: Path, said: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    say(llama, "generation_config.json", **said)
    with caplog.at_level(logging.WARNING):
        policy = build_policy(experiment(llama, "lora=none"), None, "cpu")
    (line,) = {one.getMessage() for one in caplog.records if "written again" in one.getMessage()}
    assert all(f"{key}={value!r}" in line for key, value in said.items() if value) and next(reversed(said)) in line
    ends = json.loads((llama / "generation_config.json").read_text())["eos_token_id"]
    assert policy.model.generation_config.eos_token_id == ends
    policy.save(tmp_path / "checkpoint")
    policy.load(tmp_path / "checkpoint")
    packed = load(llama, "quant=nvfp4", "model.dtype=bfloat16")
    chosen = experiment(llama, "quant=nvfp4", "model.dtype=bfloat16")
    export(packed, policy.tokenizer, chosen.quant, tmp_path / "packed")
    assert json.loads((tmp_path / "packed" / "generation_config.json").read_text())["eos_token_id"] == ends


def test_sampling_flags_that_can_be_written_stay(llama: Path) -> None:
    say(llama, "generation_config.json", do_sample=True, temperature=0.7, top_k=20)
    found = load(llama).generation_config
    assert (found.do_sample, found.temperature, found.top_k) == (True, 0.7, 20)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("[1]", r"generation_config\.json is no JSON object"),
        ("{", r"generation_config\.json is no JSON object"),
        ('{"eos_token_id": "257"}', r"generation_config\.json has eos_token_id='257'"),
        ('{"eos_token_id": [257, null]}', r"eos_token_id=\[257, None\]"),
        ('{"eos_token_id": -1}', "eos_token_id=-1"),
    ],
)
def test_a_generation_config_that_names_no_tokens_is_refused(llama: Path, said: str, message: str) -> None:
    (llama / "generation_config.json").write_text(said)
    with pytest.raises(ConfigError, match=message):
        experiment(llama).check_model()  # before anything is built
    with pytest.raises(ConfigError, match=message):
        load(llama)


def test_a_pad_token_of_the_generation_config_that_is_none_is_left_out(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    say(llama, "generation_config.json", pad_token_id=-1)
    assert load(llama).generation_config.pad_token_id is None and "pad_token_id=-1" in caplog.text


def test_what_cannot_be_written_is_refused_before_the_first_step(llama: Path) -> None:
    with failing(PreTrainedTokenizerFast, "save_pretrained", ValueError("this vocabulary has no file")):
        with pytest.raises(ConfigError, match=r"was read and cannot be written.*no file"):
            build_policy(experiment(llama, "lora=none"), None, "cpu")
        build_policy(experiment(llama), None, "cpu")  # adapters need none of it


# --- weights twice in a repository: https://github.com/sgl-project/sglang/issues/33671, ------------------------------
# https://github.com/vllm-project/vllm/issues/40765 and https://github.com/InftyAI/llmaz/issues/163


@pytest.mark.parametrize("name", ["mistral", "ministral", "ministral3"])
@pytest.mark.parametrize("quant", ["bf16", "nvfp4"])
def test_weights_in_two_formats_are_read_once(
    folders: Callable[[str], Path], name: str, quant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(folders(name), tmp_path / name)
    expected, digest = logits(load(folder, f"quant={quant}")), digest_of(hub(folder), None)
    tensors = load_file(folder / "model.safetensors")
    save_file({"norm.weight": tensors["model.norm.weight"].clone()}, folder / "consolidated.safetensors")
    save_file({"base_model.model.x.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(load(folder, f"quant={quant}")), expected)
    assert "adapter_model.safetensors, consolidated.safetensors" in caplog.text and "adapter_config" in caplog.text
    assert digest_of(hub(folder), None) == digest == f"sha256:{file_digest(folder / 'model.safetensors')[:16]}"


def sharded(folder: Path) -> list[str]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    return sorted(path.name for path in folder.glob("*.safetensors"))


def test_the_index_says_which_files_are_the_weights(mistral: Path) -> None:
    expected = logits(load(mistral))
    shards = sharded(mistral)
    shutil.copy(mistral / shards[0], mistral / "consolidated-00001-of-00002.safetensors")
    shutil.copy(mistral / shards[1], mistral / "old.safetensors")
    assert [path.name for path in weight_files(mistral)] == shards
    assert torch.equal(logits(load(mistral)), expected)
    (mistral / "model.safetensors.index.json").unlink()
    (mistral / "old.safetensors").unlink()
    assert [path.name for path in weight_files(mistral)] == shards  # all that may be parts


def test_an_index_and_a_whole_file_are_refused_by_name(mistral: Path) -> None:
    """A new export over old shards, or the other way round."""
    shutil.copy(mistral / "model.safetensors", mistral / "kept")
    sharded(mistral)
    shutil.move(mistral / "kept", mistral / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json of other files.*Delete"):
        load(mistral)


@pytest.mark.parametrize("name", ["gone.safetensors", "../mistral/model.safetensors", "/etc/passwd"])
def test_an_index_names_files_of_its_folder(mistral: Path, name: str) -> None:
    (mistral / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ConfigError, match=r"index\.json says that the tensor model\.norm\.weight is in .*, which"):
        load(mistral)


def test_a_folder_of_another_program_alone_is_refused(mistral: Path) -> None:
    (mistral / "model.safetensors").rename(mistral / "consolidated.safetensors")
    with pytest.raises(ConfigError, match=r"the weights of model\.id="):
        load(mistral)


# --- NF4 in 16-bit storage: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1295 ----------------------


def as_nf4(folder: Path, out: Path, double: bool) -> Any:
    words = ("quant=nf4", f"quant.double_quant={double}", "model.dtype=bfloat16")
    chosen = experiment(folder, *words)
    model = load(folder, *words)
    export(model, chosen.model.tokenizer(), chosen.quant, out)
    return model


CODES = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("storage", ["bfloat16", "float16", "float32", "int8"])
def test_nf4_in_another_storage_has_the_same_bytes(llama: Path, storage: str, double: bool, tmp_path: Path) -> None:
    out = tmp_path / "nf4"
    expected = logits(as_nf4(llama, out, double))
    tensors = load_file(out / "model.safetensors")
    codes = {
        name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.uint8 and name.endswith("weight")
    }
    put(out, **{name: tensor.flatten().view(getattr(torch, storage)).view(-1, 1) for name, tensor in codes.items()})
    assert len(codes) == 14
    entry = json.loads((out / "config.json").read_text())["quantization_config"]
    say(out, quantization_config=entry | {"bnb_4bit_quant_storage": storage})
    words = ("quant=nf4", f"quant.double_quant={double}", "model.dtype=bfloat16")
    assert torch.equal(logits(load(out, *words)), expected)
    put(out, **{CODES: codes[CODES].long()})
    with pytest.raises(ConfigError, match=f"{CODES} is stored as torch.int64; bnb_4bit_quant_storage"):
        load(out, *words)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (f"{CODES}.quant_map", torch.linspace(-1, 1, 16)),
        (f"{CODES}.nested_quant_map", torch.linspace(-1, 1, 256)),
        (CODES.replace("weight", "rotation"), torch.eye(64)),
        (f"{CODES}.smoothing", torch.ones(64)),
        ("model.layers.0.mlp.rotation.weight", torch.eye(64)),
    ],
)
def test_nf4_with_another_table_or_an_addition_is_refused(
    llama: Path, name: str, value: torch.Tensor, tmp_path: Path
) -> None:
    as_nf4(llama, tmp_path / "nf4", True)
    put(tmp_path / "nf4", **{name: value})
    with pytest.raises(ConfigError, match=rf"{name} .*unquantized"):
        load(tmp_path / "nf4", "quant=nf4", "quant.double_quant=true")


def test_nf4_with_a_state_that_says_more_is_refused(llama: Path, tmp_path: Path) -> None:
    as_nf4(llama, tmp_path / "nf4", False)
    state = f"{CODES}.quant_state.bitsandbytes__nf4"
    said = json.loads(bytes(load_file(tmp_path / "nf4" / "model.safetensors")[state].tolist()))
    for change in ({"rotation": "hadamard"}, {"quant_type": "af4"}, {"blocksize": 128}):
        put(tmp_path / "nf4", **{state: torch.tensor(list(json.dumps(said | change).encode()), dtype=torch.uint8)})
        with pytest.raises(ConfigError, match=f"{next(iter(change))}.*unquantized"):
            load(tmp_path / "nf4", "quant=nf4")


# --- rotations of a packed checkpoint: https://github.com/vllm-project/vllm/issues/22486 and -------------------------
# https://github.com/huggingface/transformers/issues/40673; more in tests/models/test_packed_checkpoints.py


@pytest.mark.parametrize("quant", ["nvfp4", "mxfp4", "nf4"])
@pytest.mark.parametrize("place", ["quantization_config", "compression_config", "text_config"])
def test_what_a_packed_checkpoint_adds_to_its_weights_is_refused_by_name(
    llama: Path, quant: str, place: str, tmp_path: Path
) -> None:
    chosen = experiment(llama, f"quant={quant}", "model.dtype=bfloat16")
    model = load(llama, f"quant={quant}", "model.dtype=bfloat16")
    export(model, chosen.model.tokenizer(), chosen.quant, tmp_path / "packed")
    entry = json.loads((tmp_path / "packed" / "config.json").read_text()).pop("quantization_config")
    rotated = entry | {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}
    entries: dict[str, Any] = {place: {"quantization_config": rotated} if place == "text_config" else rotated}
    say(tmp_path / "packed", quantization_config=None)
    say(tmp_path / "packed", **entries)
    with pytest.raises(ConfigError, match=r"transform_config=.*hadamard"):
        load(tmp_path / "packed", f"quant={quant}")


# --- what config.json leaves out and the files have ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "self_attn.q_proj.bias",  # of a config with attention_bias=false
        "self_attn.q_proj.lora_A.weight",  # of an adapter that was not merged
        "self_attn.q_proj.lora_B.default.weight",
        "mlp.down_proj.pre_quant_scale",
        "input_layernorm.bias",
    ],
)
def test_a_tensor_below_a_layer_that_has_no_place_for_it_is_refused(llama: Path, name: str) -> None:
    put(llama, **{f"model.layers.0.{name}": torch.ones(64)})
    for quant in ("bf16", "nvfp4"):
        with pytest.raises(ConfigError, match=rf"has the tensor model\.layers\.0\.{name}, which .*Correct config.json"):
            load(llama, f"quant={quant}")


def test_blocks_that_config_json_leaves_out_are_refused(llama: Path) -> None:
    put(llama, **{"model.layers.9.mlp.down_proj.weight": torch.ones(64, 64)})
    for quant in ("bf16", "nvfp4"):
        with pytest.raises(
            ConfigError, match=r"model\.layers\.9\.mlp.*model\.layers of this .* ends before it.*num_hidden_layers"
        ):
            load(llama, f"quant={quant}")


def test_tensors_that_compute_nothing_are_named_or_passed_over(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = logits(load(llama))
    extra = ("self_attn.rotary_emb.inv_freq", "self_attn.k_proj.k_scale", "self_attn.q_proj.input_scale")
    put(llama, **{f"model.layers.0.{name}": torch.ones(1) for name in extra}, **{"v_head.weight": torch.ones(64)})
    caplog.clear()
    assert torch.equal(logits(load(llama)), expected)
    assert "4 tensors belong to no part of the model" in caplog.text


def test_layers_of_which_packing_leaves_little_are_named_with_the_remedy(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In FP16 the tensor scale of small weights overflows, and that of NVFP4 becomes 1."""
    name = "model.layers.0.mlp.down_proj"
    shape = load_file(llama / "model.safetensors")[f"{name}.weight"].shape
    put(llama, **{f"{name}.weight": 1e-3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))})
    for words in (["quant=nvfp4"], ["quant=mxfp4"], ["quant=fp8"], ["quant=int8"], ["quant=int4"]):
        load(llama, *words)
    assert "lost more than" not in caplog.text
    load(llama, "quant=nvfp4", "quant.compute_dtype=float16")
    (line,) = {record.getMessage() for record in caplog.records if "lost more than" in record.getMessage()}
    assert re.search(rf"{name} most: relative_error [01]\.\d+ .*quant\.compute_dtype=bfloat16", line)


# --- values of config.json that cannot be, and keys that nothing reads -----------------------------------------------


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"hidden_act": "swishy"}, "hidden_act='swishy'.*no activation"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, r"rope_parameters\.rope_type='spiral'.*yarn"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3.*num_attention_heads=4"),
        ({"vocab_size": "320"}, "vocab_size"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}}, r"config\.json"),
        ({"torch_dtype": "float7", "dtype": "float7"}, r"config\.json .*float7"),
    ],
)
def test_a_config_that_no_model_can_have_is_refused_in_words(llama: Path, said: dict[str, Any], message: str) -> None:
    say(llama, **said)
    with pytest.raises(ConfigError, match=message):
        load(llama)


LINEAR, BY_FOUR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, {"type": "linear", "factor": 4}
DEFAULT = {"rope_type": "default"}


@pytest.mark.parametrize(
    ("said", "whole", "named"),
    [
        *(({"rope_theta": theta}, LINEAR, f"rope_theta={theta} and 10000.0") for theta in (5e6, "10000")),
        ({"rope_scaling": BY_FOUR | {"factor": 8.0}}, LINEAR, "factor=8.0 and 4.0"),
        ({"rope_scaling": BY_FOUR}, DEFAULT, "rope_type=linear and default"),
        ({"partial_rotary_factor": 0.5}, LINEAR | {"partial_rotary_factor": 1.0}, "=0.5 and 1.0"),
        *((said, LINEAR, "") for said in ({"rope_theta": 10000}, {"rope_scaling": BY_FOUR}, {"rope_scaling": None})),
        *(({"rope_theta": 5e6}, whole, "") for whole in (DEFAULT, {"full_attention": LINEAR}, None)),
    ],
)
def test_a_rotation_has_one_value_whatever_its_key_is_called(said: dict[str, Any], whole: Any, named: str) -> None:
    """Of an edited `rope_theta` beside `rope_parameters` transformers reads nothing, and other programs that alone."""
    with pytest.raises(ConfigError, match=f"{named}.*rope_parameters") if named else nullcontext():
        checked_config("folder", LlamaConfig(), said | {"rope_parameters": whole})


def test_keys_that_the_model_does_not_know_are_named(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As MiniCPM's scales in a folder that calls itself llama: transformers computes without them."""
    load(llama)
    assert "does not know" not in caplog.text
    say(llama, scale_emb=12, logit_scale=0.5, use_mrope=False, unsloth_fixed=True)
    load(llama)
    (line,) = {record.getMessage() for record in caplog.records if "does not know" in record.getMessage()}
    assert "scale_emb=12, logit_scale=0.5" in line and "mrope" not in line and "unsloth" not in line


def test_keys_that_a_model_reads_without_declaring_them_are_not_called_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Qwen3-MoE's model asks its config for head_dim by getattr, and `num_local_experts` is another name there."""
    from transformers import Qwen3MoeConfig

    said = {"head_dim": 32, "num_local_experts": 4, "scale_emb": 12}
    checked_config("folder", Qwen3MoeConfig(**said), said)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "has scale_emb=12, which Qwen3MoeConfig does not know" in line


# https://github.com/huggingface/transformers/issues/10083
def test_tuples_in_the_place_of_named_results_change_nothing(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = logits(load(llama))
    say(llama, return_dict=False)
    assert torch.equal(logits(load(llama)), expected) and "return_dict=false" in caplog.text


def test_a_model_reads_as_much_as_its_config_says_and_anything_without_a_word() -> None:
    """BLOOM and Mamba have no limit, MPT's has another name."""
    limits = {"max_position_embeddings": 99}, {"max_seq_len": 98}, {}
    assert [context_of(said) for said in limits] == [99, 98, None]


@pytest.mark.parametrize("template", ["{% for m in messages %}", {"rag": "x"}])
def test_a_chat_template_that_cannot_be_read_is_refused_in_words(llama: Path, template: Any) -> None:
    (llama / "chat_template.jinja").unlink(missing_ok=True)
    said = (
        [{"name": name, "template": text} for name, text in template.items()]
        if isinstance(template, dict)
        else template
    )
    say(llama, "tokenizer_config.json", chat_template=said)
    with pytest.raises(ConfigError, match=f"model.id={llama} .*chat template cannot be read.*task.template=plain"):
        hub(llama).check(CHAT)
    hub(llama, template=None).check(({"role": RENDERED, "content": "2+2?"},))  # is asked without one


# --- layers whose weight is read and not called: https://github.com/axolotl-ai-cloud/axolotl/issues/1498, ------------
# https://github.com/axolotl-ai-cloud/axolotl/issues/3951 and https://github.com/huggingface/transformers/issues/30849


def test_a_model_that_fails_at_its_first_text_is_refused_in_words(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers = {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}
    mamba = {"mamba_dt_rank": 16, "use_mamba_kernels": False, "num_experts_per_tok": 1}
    ids = {"pad_token_id": PAD_ID, "bos_token_id": PAD_ID + 2, "eos_token_id": PAD_ID + 1}
    config = JambaConfig(vocab_size=VOCABULARY, **sizes, **layers, **mamba, **ids)  # type: ignore[arg-type]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    build_policy(experiment(tmp_path, "lora.rank=4"), None, "cpu")
    with pytest.raises(ConfigError, match=r"reads the weight of this layer instead of calling it.*quant=bf16"):
        build_policy(experiment(tmp_path, "lora.rank=4", "quant=nvfp4", "quant.partial=true"), None, "cpu")


@pytest.mark.parametrize("quant", ["bf16", "nvfp4"])
def test_advice_is_another_than_what_was_tried(llama: Path, quant: str) -> None:
    say(llama, partial_rotary_factor=0.5)
    with pytest.raises(ConfigError, match=rf"quant={quant}: RuntimeError.*choose another model") as caught:
        build_policy(experiment(llama, "lora.rank=4", f"quant={quant}"), None, "cpu")
    assert ("only quant=bf16" in str(caught.value)) == (quant != "bf16") != ("config.json may" in str(caught.value))


# --- JSON Lines end with a newline and nothing else: https://github.com/wbolster/jsonlines/issues/53 -----------------

ENDS = "\u2028 \u2029 \u0085 \x0b \x0c \x1c \x1d \x1e"  # where str.splitlines splits, too


def test_json_lines_are_split_at_newlines_alone(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    text = f"one{ENDS}two"
    written = json.dumps({"text": text}, ensure_ascii=False).replace("\x7f", "") + "\n"
    file.write_text("\ufeff" + written * 3, encoding="utf-8")
    assert [row["text"] for row in read_rows(file).values()] == [text] * 3
    from qerl_bench.model.byte_tokenizer import byte_tokenizer

    tokenizer, task = byte_tokenizer(), None
    found = Calibration(file=str(file), samples=3, length=99, seed=0).text(tokenizer, task, None).sequences  # type: ignore[arg-type]
    assert [tokenizer.decode(ids) for ids in found] == [text] * 3
    file.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"calibration\.file=.*UTF-8"):
        Calibration(file=str(file), samples=1, length=9, seed=0).text(tokenizer, task, None)  # type: ignore[arg-type]


def test_metrics_are_split_at_newlines_alone(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run", compose(["device=cpu"])) as run:
        key = f"own{ENDS[0]}metric"
        line = json.dumps({"kind": "train", "step": 1, "time": 0.0, key: 1.0}, ensure_ascii=False)
        (run.path / "metrics.jsonl").write_text(line + "\n", encoding="utf-8")
        assert run.metrics() == [json.loads(line)]


def test_the_tokens_here_are_those_of_the_builds(llama: Path) -> None:
    tokenizer = hub(llama).tokenizer()
    assert (tokenizer.bos_token, tokenizer.pad_token_id) == (BEGIN, PAD_ID) and len(tokenizer) < VOCABULARY
