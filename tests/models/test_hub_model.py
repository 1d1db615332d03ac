"""model=hub: any causal language model that transformers knows, named by its id, or refused before weights are read."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.errors import HydraException
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from qerl_bench.config import build, compose
from qerl_bench.model.hub import HubModel
from qerl_bench.model.load import load_packed
from qerl_bench.quant.architecture import causal_lm_config
from qerl_bench.sweep.check import check
from qerl_core.checks import ConfigError
from qerl_core.exits import explain
from qerl_core.options.composer import register_resolvers
from qerl_core.options.model_names import short_name
from qerl_core.options.names import load_option, make_option
from qerl_core.process.installation import CONF_DIR
from tests.models.builds import COMMON, draw_weights, write_tokenizer
from tests.models.builds import build as write_model

MESSAGES = ({"role": "user", "content": "2+2?"},)


def hub(folder: Path | str, **changes: Any) -> HubModel:
    values: dict[str, Any] = {"name": "x", "id": str(folder), "revision": None, "dtype": "float32", "lr": 1e-5}
    return HubModel(
        **{**values, "trust_remote_code": False, "template": {}, "dither": None, "dither_scale": 1.0, **changes}
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("hub") / "My Llama-1B")


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(llama, tmp_path / "copy"))


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("id", "name"),
    [
        ("Qwen/Qwen3-0.6B", "qwen3-0.6b"),
        ("/models/My Llama/", "my-llama"),
        ("gpt2", "gpt2"),
        ("~/.cache/huggingface/hub/models--Qwen--Qwen3-4B-Base/snapshots/0123abc", "qwen3-4b-base"),
    ],
)
def test_a_model_is_called_by_the_last_part_of_its_id(id: str, name: str) -> None:
    assert short_name(id) == name


def test_a_run_is_named_by_the_model_that_it_trains(llama: Path) -> None:
    for words in (["model=hub"], ["model=qwen2.5-0.5b-instruct"]):  # whatever the preset is called
        cfg = compose([*words, f"model.id={llama}"])
        assert cfg.model.name == "my-llama-1b" and cfg.name.startswith("my-llama-1b-bf16-none-grpo-r32-s0-")
    with pytest.raises(ConfigError, match=r"model.name=llama cannot be set"):
        compose(["model=hub", f"model.id={llama}", "model.name=llama"])


PRESETS = [path.stem for path in (CONF_DIR / "model").glob("*.yaml") if "defaults: [hub]" in path.read_text()]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_named_by_its_id_and_sets_a_template_or_none(preset: str) -> None:
    option = load_option([CONF_DIR], "model", preset)
    register_resolvers()
    model = make_option("model", OmegaConf.to_container(option, resolve=True))
    assert isinstance(model, HubModel) and model.name == preset == short_name(model.id)
    is_base = preset.endswith("-base") or preset in ("llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b", "olmo-3-1025-7b")
    assert (model.template is None) == is_base


def test_presets_set_only_what_differs() -> None:
    assert len(PRESETS) >= 40
    for preset in PRESETS:
        assert OmegaConf.load(CONF_DIR / "model" / f"{preset}.yaml").keys() <= {"defaults", "id", "template"}
    assert build(compose(["model=llama-3.2-1b-instruct"])).model.template == {"date_string": "26 Jul 2024"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.id=/a/folder"], "which belongs to model=hub"),
        (["model=hub"], "model.id must be a hub id, a folder or a GGUF file: model.id=ORG/NAME"),
        (["model=hub", "model.id=7"], "model.id must be a hub id, a folder or a GGUF file"),
        (["model=hub", "model.id=x", "model.template=chatml"], "model.template must be null or a mapping"),
        (
            ["model=hub", "model.id=x", "model.template.enable_thinking=false"],
            r"\+model.template.enable_thinking=",
        ),
    ],
)
def test_what_is_missing_is_said(words: list[str], says: str) -> None:
    with pytest.raises((ConfigError, HydraException)) as refusal:
        build(compose(words))
    assert re.search(says, explain(refusal.value))


# --- any folder ------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_preset_is_checked_and_described(llama: Path, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", logger="qerl_bench")
    experiment = check(compose(["model=hub", f"model.id={llama}", "quant=nvfp4", f"root={tmp_path}/root"]))
    assert not (tmp_path / "root").exists()
    (said,) = [record.getMessage() for record in caplog.records if "model.id=" in record.getMessage()]
    for part in (str(llama), "llama model", "stored in bfloat16", "reads: no keywords", "learning rate 1e-05"):
        assert part in said
    assert experiment.model.config() is not None and experiment.model.remote_code() is None


def config_json(folder: Path, content: Any) -> None:
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"model_type": "no_such_model"}, "type no_such_model, which transformers .* does not know.*model.id"),
        ({}, "no config.json with a model_type"),
        ("[]", "no config.json with a model_type"),
        ("{", "config.json of model.id=.* cannot be read"),
        ({"model_type": "llama", "hidden_size": "a"}, "config.json of model.id=.* cannot be read"),
        ({"model_type": "bert"}, "of the type bert, .* no causal language model.*decoder-only"),
        ({"model_type": "t5"}, "of the type t5, .* no causal language model.*decoder-only"),
        ({"model_type": "qwen3_vl"}, r"of the type qwen3_vl, whose text part \(qwen3_vl_text\) is no causal"),
        ({"model_type": "vit"}, "of the type vit, .* no causal language model"),
    ],
    ids=str,
)
def test_a_config_of_something_else_is_refused_before_weights_are_read(
    copy: Path, content: Any, says: str, listen: Callable[..., list[Any]]
) -> None:
    config_json(copy, content)
    looked = listen(HubModel, "_path")
    with pytest.raises(ConfigError, match=says):
        hub(copy).check(MESSAGES)
    assert not looked


@pytest.mark.parametrize("damage", ["missing", "no keys", "not JSON"])
def test_a_tokenizer_that_cannot_be_read_is_refused(copy: Path, damage: str) -> None:
    if damage == "missing":
        for file in copy.glob("*token*"):
            file.unlink()
    else:
        (copy / "tokenizer.json").write_text("{}" if damage == "no keys" else "{")
    with pytest.raises(ConfigError, match=r"the tokenizer of model.id=.*model.id=/path/to/model"):
        hub(copy).check(MESSAGES)


def test_a_missing_chat_template_is_refused(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"no chat template.*task.template=plain"):
        hub(copy).check(MESSAGES)
    hub(copy).check(({"role": "rendered", "content": "2+2="},))


def test_weights_without_safetensors_that_lack_a_tensor_are_refused(copy: Path) -> None:
    model, _ = hub(copy).load(None, "cpu")
    state = model.state_dict()
    (copy / "model.safetensors").unlink()
    torch.save(state, copy / "pytorch_model.bin")
    again, _ = hub(copy).load(None, "cpu")
    assert torch.equal(again.get_parameter("model.norm.weight"), model.get_parameter("model.norm.weight"))
    torch.save(
        {name: tensor for name, tensor in state.items() if name != "model.norm.weight"}, copy / "pytorch_model.bin"
    )
    with pytest.raises(ConfigError, match=r"lacks 1 tensors .* model.norm.weight"):
        hub(copy).load(None, "cpu")


# --- code that comes with a model ------------------------------------------------------------------------------------

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({trace!r}).write_text("executed")
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_remote_code_runs_only_if_it_is_allowed_and_is_then_recorded(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    trace = tmp_path / "trace"
    code = CODE.format(trace=str(trace))
    (copy / "own.py").write_text(code)
    config = json.loads((copy / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config_json(copy, config | {"model_type": "own_llama", "auto_map": classes})
    with pytest.raises(ConfigError, match=r"own_llama.*was not executed.*model.trust_remote_code=true"):
        hub(copy).check(MESSAGES)
    assert not trace.exists() and hub(copy).remote_code() is None
    trusted = hub(copy, trust_remote_code=True)
    trusted.check(MESSAGES)
    assert trace.exists() and trusted.remote_code() == {"own.py": hashlib.sha256(code.encode()).hexdigest()}
    cfg = compose(["model=hub", f"model.id={copy}", "model.trust_remote_code=true", "model.dtype=float32"])
    experiment = build(cfg)
    model, *_ = load_packed(experiment.model, experiment.quant, experiment.quantizer, experiment.task, None, "cpu")
    assert type(model).__name__ == "OwnModel"


# --- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "tied"), [(1.0, True), (1.5, False)])
def test_a_head_that_differs_from_the_embedding_is_kept_though_config_ties_them(
    copy: Path, factor: float, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    file = copy / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"] * factor
    save_file({**tensors, "lm_head.weight": head}, file, {"format": "pt"})
    experiment = build(compose(["model=hub", f"model.id={copy}", "model.dtype=float32"]))
    model, *_ = load_packed(experiment.model, experiment.quant, experiment.quantizer, experiment.task, None, "cpu")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied  # type: ignore[union-attr]
    assert torch.equal(model.lm_head.weight, head.float())  # type: ignore[arg-type]
    assert ("lm_head.weight is the embedding, and the two differ" in caplog.text) == (not tied)
    theirs = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(model(torch.arange(20)[None]).logits, theirs(torch.arange(20)[None]).logits)


# --- the text part of multimodal models ------------------------------------------------------------------------------


def write_mistral3(folder: Path) -> None:
    """Its class is not among transformers' causal language models; its text part is."""
    text = {key: value for key, value in COMMON.items() if key != "attention_dropout"}
    vision = {"model_type": "pixtral", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = AutoConfig.for_model(
        "mistral3",
        text_config={"model_type": "mistral", **text},
        vision_config={**vision, "num_attention_heads": 4, "head_dim": 16, "image_size": 28, "patch_size": 14},
        tie_word_embeddings=False,
    )
    model = AutoModelForImageTextToText.from_config(config)
    draw_weights(model, torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    write_tokenizer(folder)


@pytest.mark.parametrize("quant", ["bf16", "nvfp4"])
@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_the_text_part_of_a_multimodal_model_is_loaded_alone(kind: str, quant: str, tmp_path: Path) -> None:
    folder = tmp_path / kind
    write_mistral3(folder) if kind == "mistral3" else write_model(kind, folder)
    text = causal_lm_config(folder)
    assert type(text) in MODEL_FOR_CAUSAL_LM_MAPPING and text.model_type != kind
    experiment = build(compose(["model=hub", f"model.id={folder}", f"quant={quant}", "model.dtype=float32"]))
    experiment.model.check(MESSAGES)
    model, *_ = load_packed(experiment.model, experiment.quant, experiment.quantizer, experiment.task, None, "cpu")
    assert not [name for name, _ in model.named_modules() if "vision" in name]
    if quant == "bf16":
        whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.arange(20)[None]
        with torch.no_grad():
            assert torch.equal(model(input_ids=ids).logits, whole(input_ids=ids).logits)
