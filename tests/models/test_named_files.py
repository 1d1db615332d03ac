"""What is wrong with a model of others is said of its folder and file: chat templates, ends of texts, weights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl_bench.config import build as build_experiment
from qerl_bench.config import compose
from qerl_bench.model_setup import build_policy
from qerl_core.checks import ConfigError, naming
from qerl_core.records import Demonstration, Message, Prompt
from tests.models.builds import build
from tests.models.gguf_files import model_of, write

ASKED: tuple[Message, ...] = ({"role": "system", "content": "Think."}, {"role": "user", "content": "2+2?"})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("named") / "llama")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "llama")


def experiment(folder: Path, *words: str) -> Any:
    return build_experiment(compose(["model=hub", f"model.id={folder}", "model.dtype=float32", "device=cpu", *words]))


def put(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: change(tensors[name])}, folder / "model.safetensors", {"format": "pt"})


def with_value(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


def test_a_name_is_put_in_front_once_and_the_error_keeps_its_class() -> None:
    class Other(ConfigError):
        pass

    with pytest.raises(Other, match=r"^/x: key=1; use 2$"), naming("/x"), naming("/x"):
        raise Other("key=1; use 2")
    with pytest.raises(ConfigError, match=r"^/x/file: key=1$"), naming("/x"):
        raise ConfigError("/x/file: key=1")


TEMPLATES = {  # text of the template -> what is said of it
    "{% for message in %}": "line 1.*task.template=plain",
    "{{ raise_exception('no system') }}": "no system; task.instruction=suffix",
    "{{ messages[1].content }}": "leaves out the system message.*'Think.'",
}


@pytest.mark.parametrize(("template", "says"), TEMPLATES.items(), ids=["no Jinja", "refuses", "leaves out"])
@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_template_is_named_by_model_and_file(template: str, says: str, file: str, folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    said = json.loads((folder / "tokenizer_config.json").read_text())
    text = template if file.endswith("jinja") else json.dumps(said | {"chat_template": template})
    (folder / file).write_text(text)
    model = experiment(folder).model
    with pytest.raises(ConfigError, match=f"model.id={re.escape(str(folder))} \\({file}\\): .*{says}"):
        model.check(ASKED)
    model.check(({"role": "rendered", "content": "2+2="},))  # as task.template=plain asks: no template is read


def test_a_chat_template_of_a_gguf_file_is_named_by_its_key(tmp_path: Path) -> None:
    write(file := tmp_path / "x.gguf", model_of("llama"), template="{% for %}")
    with pytest.raises(ConfigError, match=f"model.id={file} \\(tokenizer.chat_template\\): .*line 1") as refusal:
        experiment(file).model.check(ASKED)
    assert "/tmp" not in str(refusal.value).replace(str(file), "")


def test_an_end_of_text_that_is_missing_is_named_by_the_folder(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": None}))
    policy = build_policy(experiment(folder, "quant=bf16"), None, "cpu")
    policy.name_base("llama", None, folder)
    shown = Demonstration(prompt=Prompt(id="q", messages=ASKED, answer="4"), completion="4")
    with pytest.raises(ConfigError, match=f"^{folder}: .*eos_token=None.*tokenizer_config.json"):
        policy.demonstration_ids([shown])
    (folder / "generation_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"^model.id={folder}: .*generation_config.json"):
        build_policy(experiment(folder, "quant=bf16"), None, "cpu")


NOT_FINITE = {  # name of a tensor that every reading path takes, packed or not -> its value
    "model.embed_tokens.weight": float("nan"),
    "model.layers.0.input_layernorm.weight": float("inf"),
    "model.layers.1.self_attn.q_proj.weight": float("nan"),
}


@pytest.mark.parametrize("quant", ["bf16", "nvfp4"])
@pytest.mark.parametrize("name", NOT_FINITE)
def test_a_weight_that_is_not_finite_is_named_by_file_and_tensor(name: str, quant: str, folder: Path) -> None:
    put(folder, name, with_value(NOT_FINITE[name]))
    says = f"{folder}/model.safetensors: .* tensor {name} are NaN or infinite as torch.float32; .*checkpoint again"
    with pytest.raises(ConfigError, match=says):
        build_policy(experiment(folder, f"quant={quant}"), None, "cpu")


def test_a_weight_beyond_the_dtype_of_the_run_is_refused(folder: Path) -> None:
    put(folder, "model.norm.weight", with_value(1e5))
    build_policy(experiment(folder, "quant=bf16"), None, "cpu")
    with pytest.raises(ConfigError, match=r"model.norm.weight are NaN or infinite as torch.float16.*model.dtype"):
        build_policy(experiment(folder, "quant=bf16", "model.dtype=float16"), None, "cpu")


def test_a_weight_without_safetensors_that_is_not_finite_is_refused(folder: Path) -> None:
    put(folder, "model.norm.weight", with_value(float("nan")))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=f"{folder}: .*model.norm.weight"):
        build_policy(experiment(folder, "quant=bf16"), None, "cpu")


def test_a_weight_of_another_shape_is_named_by_file_and_tensor(folder: Path) -> None:
    put(folder, "model.layers.0.self_attn.q_proj.weight", lambda tensor: tensor[:-2].contiguous())
    with pytest.raises(ConfigError, match=f"{folder}/model.safetensors: tensor model.layers.0.self_attn.q_proj.weight"):
        build_policy(experiment(folder), None, "cpu")
