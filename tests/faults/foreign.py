"""Models of others: GGUF files and checkpoint folders that are damaged or say what cannot be, and models that the
preflight must refuse.

Such a model is refused before the first step, by the name of the file or the key; the whole one then trains with the
numbers of an undisturbed run. A damage that no reader can see, such as another value of a weight, is left out.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.attempt import attempt
from tests.faults.damage import DAMAGES
from tests.faults.run import SURVIVED, WORDS, Case, Lost, Outcome, Stock, checked, drawing_nothing, numbers

WORDS_OF_MODEL = (
    *(word for word in WORDS if not word.startswith("model.")),
    *("model=hub", "model.dtype=float32", "model.template={}"),
)
FILE, FOLDER = "little.gguf", "little"
SEEN = ("cut", "empty", "delete", "binary")  # damages that a reader without checksums can see
NO_GGUF = "the package gguf is not installed"


def write_models(place: Path) -> None:
    """The GGUF file and the folder that everything here happens to; no file without the package gguf."""
    from tests.models.builds import build

    build("llama", place / FOLDER)
    try:
        from tests.models.gguf_files import model_of, write
    except ImportError:
        return
    model = model_of("qwen2", hidden_size=64, intermediate_size=128, head_dim=16)
    write(place / FILE, model, "Q8_0")


def undisturbed(model: str, root: Path, stock: Path) -> dict[str, Any]:
    """The numbers of the run of a model; none without it."""
    if not (stock / model).exists():
        return {}
    root.mkdir()
    ended = checked(attempt(of_model(stock / model, Case(root, {}, stock)).words(), drawing_nothing(None)))
    if ended.code != 0:
        raise SystemExit(f"the run of {model} without faults ended with {ended.code}:\n{ended.said}")
    return numbers(root / "runs" / "run")


UNDISTURBED = {name: partial(undisturbed, name) for name in (FILE, FOLDER)}


def of_model(path: Path, case: Case) -> Case:
    words = (*WORDS_OF_MODEL, f"model.id='{path}'")
    return Case(case.root, case.others.get(path.name, {}), case.stock, case.others, words)


def own_copy(name: str, case: Case) -> tuple[Path, Case]:
    """A copy of a model in the folder of the case, and the case of its run."""
    path = case.root / name
    whole = case.stock / name
    shutil.copytree(whole, path) if whole.is_dir() else shutil.copy(whole, path)
    return path, of_model(path, case)


def restore(name: str, case: Case) -> None:
    path = case.root / name
    if path.is_dir():
        shutil.rmtree(path)
    own_copy(name, case)


def refused(case: Case, name: str, *words: str) -> Outcome:
    """A refusal before the first step that has one of `words`, after which the whole model trains; or its numbers."""
    ended = case.attempt()
    if ended.code == 0:
        case.require_numbers()
        return SURVIVED
    said = case.in_words(ended, 2)
    if not any(word in said for word in words):
        raise Lost(f"names none of {', '.join(words)}: {said}")
    if (case.folder / "metrics.jsonl").exists() and '"kind": "train"' in (case.folder / "metrics.jsonl").read_text():
        raise Lost(f"refused after a step: {said}")
    restore(name, case)
    return case.ends(said=said)


# GGUF files.


def gguf_files(stock: Stock, draw: random.Random) -> dict[str, Callable[[Case], Outcome]]:
    file = stock.path / FILE
    if not file.exists():
        return {"all": lambda case: Outcome("skipped", NO_GGUF)}
    content = file.read_bytes()
    listed = content.index(b"token_embd.weight") - 8, content.rindex(b".weight") + 40  # of the list of tensors
    header = [*range(24), *draw.sample(range(*listed), 60)]
    sizes = sorted({*(int(len(content) ** draw.uniform(0, 1)) for _ in range(40)), len(content) - 1})
    kept = ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    return {
        **{f"cut to {size} bytes": partial(gguf, lambda path, size=size: os.truncate(path, size)) for size in sizes},
        **{f"bit {n % 8} of byte {n} flipped": partial(gguf, partial(flip, n)) for n in header},
        **{name: partial(gguf, DAMAGES[name]) for name in SEEN},
        **{f"{name}, of an unfinished run": partial(gguf_later, DAMAGES[name]) for name in DAMAGES},
        **{
            f"conversion: {part}: {name}": partial(conversion, part, DAMAGES[name])
            for part in (*kept, "gguf.json")
            for name in DAMAGES
        },
    }


def flip(number: int, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[number] ^= 1 << number % 8
    path.write_bytes(bytes(data))


def gguf(damage: Callable[[Path], object], case: Case) -> Outcome:
    path, case = own_copy(FILE, case)
    damage(path)
    return refused(case, FILE, FILE)


def killed_in_step_3() -> None:
    import qerl_bench.experiment as loop

    step = loop.train_step

    def train_step(*arguments: Any) -> Any:
        if arguments[-1] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*arguments)

    loop.train_step = train_step


def gguf_later(damage: Callable[[Path], object], case: Case) -> Outcome:
    """The file is damaged between a kill and the continuation: not continued with other weights."""
    path, case = own_copy(FILE, case)
    state = path.stat()
    case.attempt(killed_in_step_3)
    damage(path)
    ended = case.attempt()
    if ended.code == 0:
        case.require_numbers()
        return SURVIVED
    said = case.in_words(ended, 2)
    restore(FILE, case)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    return case.ends(said=said)


def conversion(part: str, damage: Callable[[Path], object], case: Case) -> Outcome:
    """What a conversion left in the cache is damaged before a continuation and before a run from the start."""
    _, case = own_copy(FILE, case)
    case.attempt(killed_in_step_3)
    (kept,) = (path for path in (case.root / "cache" / "gguf").iterdir() if path.is_dir())
    damage(kept / part)
    ended = case.attempt()
    said = "" if ended.code == 0 else case.in_words(ended, 2)
    if said:
        if kept.name not in said and part not in said:
            raise Lost(f"names neither file nor folder: {said}")
        shutil.rmtree(kept)
        return case.ends(said=said)
    case.require_numbers()
    shutil.rmtree(case.folder)
    return case.ends()


# Folders.


def folders(stock: Stock) -> dict[str, Callable[[Case], Outcome]]:
    said = {
        f"{file}: {json.dumps(change)}": partial(folder, partial(say, file, change), file)
        for file, changes in SAID.items()
        for change in changes
    }
    files = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    damaged = {f"{file}: {name}": partial(folder, partial(harm, file, name), file) for file in files for name in SEEN}
    del damaged["tokenizer_config.json: delete"]  # a folder may do without, and asks without a first token then
    tensors = {f"tensors: {name}": partial(folder, change, "model.safetensors") for name, change in TENSORS.items()}
    return said | damaged | tensors


SAID: dict[str, tuple[dict[str, Any], ...]] = {
    "config.json": (
        {"hidden_size": 63},
        {"hidden_size": 128},
        {"num_hidden_layers": 3},
        {"num_attention_heads": 3},
        {"num_key_value_heads": 4},
        {"vocab_size": 100},
        {"vocab_size": 321},
        {"vocab_size": "320"},
        {"head_dim": 0},
        {"model_type": "unheard_of"},
        {"hidden_act": "unheard_of"},
        {"rms_norm_eps": None},
        {"rope_parameters": {"rope_type": "unheard_of"}},
        {"pad_token_id": -1},
        {"pad_token_id": 32000},
        {"eos_token_id": 32000},
        {"tie_word_embeddings": False},
        {"max_position_embeddings": 4},
        {"quantization_config": {"quant_method": "unheard_of"}},
        {"quantization_config": {"quant_method": "compressed-tensors", "transform_config": {"r": "hadamard"}}},
        {"architectures": ["Unheard"]},
        {"auto_map": {"AutoModelForCausalLM": "code.Model"}},
    ),
    "generation_config.json": (
        {"eos_token_id": "257"},
        {"eos_token_id": -1},
        {"eos_token_id": 320},
        {"eos_token_id": [257, None]},
        {"pad_token_id": -1},
        {"do_sample": False, "temperature": 0.9},
        {"cache_implementation": "unheard_of"},
    ),
    "tokenizer_config.json": (
        {"eos_token": None},
        {"pad_token": None},
        {"tokenizer_class": "Unheard"},
        {"chat_template": "{{ messages"},
        {"chat_template": "{{ raise_exception('no') }}"},
        {"chat_template": "nothing of the prompt"},
    ),
}


def say(file: str, change: dict[str, Any], path: Path) -> None:
    said = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps(said | change))
    if "chat_template" in change:  # which transformers keeps beside, and reads first
        (path / "chat_template.jinja").unlink(missing_ok=True)


def harm(file: str, name: str, path: Path) -> None:
    DAMAGES[name](path / file)


def put(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def dropped(path: Path) -> None:
    put(path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def renamed(path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    put(path, lambda tensors: tensors.update({name.replace("up_proj", "up"): tensors.pop(name)}))


def narrower(path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    put(path, lambda tensors: tensors.update({name: tensors[name][:, :32].contiguous()}))


def with_bias(path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj"
    put(path, lambda tensors: tensors.update({f"{name}.bias": tensors[f"{name}.weight"][:, 0].contiguous()}))


def with_nan(path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"].view(-1)[5] = float("nan")

    put(path, change)


def twice(path: Path) -> None:
    shutil.copy(path / "model.safetensors", path / "consolidated.safetensors")


def index_of_a_file_that_is_gone(path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "gone.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def pickled(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


TENSORS: dict[str, Callable[[Path], None]] = {
    function.__name__.replace("_", " "): function
    for function in (dropped, renamed, narrower, with_bias, with_nan, twice, index_of_a_file_that_is_gone, pickled)
}


def folder(damage: Callable[[Path], object], file: str, case: Case) -> Outcome:
    path, case = own_copy(FOLDER, case)
    damage(path)
    return refused(case, FOLDER, file, str(path).replace(str(case.root), "ROOT"), "model=", "model.id")


# The preflight. A policy or engine that computes something else than the untouched model is refused.


def preflights() -> dict[str, Callable[[Case], Outcome]]:
    return {
        **{name: partial(refused_by_preflight, plant) for name, plant in PLANTS.items()},
        **{f"killed at call {n} of {place}": partial(killed_inside, place, n) for place in PARTS for n in (1, 2)},
        **{f"what is remembered: {name}": partial(remembered, damage) for name, damage in DAMAGES.items()},
    }


def scaled_norm(policy: Any) -> None:
    policy.model.model.layers[1].input_layernorm.weight.data *= 1.01


def other_embedding(policy: Any) -> None:
    policy.model.get_input_embeddings().weight.data[3:] *= 1.02


def swapped_layers(policy: Any) -> None:
    first, second = (layer.mlp.down_proj.base_layer for layer in policy.model.model.layers)
    first._buffers, second._buffers = second._buffers, first._buffers
    first.row_scales, second.row_scales = second.row_scales, first.row_scales


def adapter_that_acts(policy: Any) -> None:
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.1


def weight_that_is_not_finite(policy: Any) -> None:
    policy.model.model.layers[0].input_layernorm.weight.data[0] = float("nan")


def other_rope(policy: Any) -> None:
    policy.model.model.rotary_emb.inv_freq *= 1.05


PLANTS: dict[str, Callable[[Any], None]] = {
    function.__name__.replace("_", " "): function
    for function in (
        scaled_norm,
        other_embedding,
        swapped_layers,
        adapter_that_acts,
        weight_that_is_not_finite,
        other_rope,
    )
}
PARTS = {
    "the trainer's half": ("qerl_bench.model.preflight", "trainer_logits"),
    "the engine's half": ("qerl_bench.engine.hf", "HFEngine._sample"),
    "the untouched model": ("qerl_bench.engine.sampled_check", "written_by_stock"),
}


def at_home(case: Case) -> None:
    """Nothing is remembered of earlier runs."""
    os.environ["XDG_CACHE_HOME"] = str(case.root / "home")


def refused_by_preflight(plant: Callable[[Any], None], case: Case) -> Outcome:
    def planted() -> None:
        from qerl_bench import run_setup

        at_home(case)
        build = run_setup.build_policy

        def built(*arguments: Any) -> Any:
            policy = build(*arguments)
            plant(policy)
            return policy

        run_setup.build_policy = built

    _, case = own_copy(FOLDER, case)
    ended = case.attempt(planted)
    said = case.in_words(ended, 1, 2)
    if (case.folder / "metrics.jsonl").exists() and '"kind": "train"' in (case.folder / "metrics.jsonl").read_text():
        raise Lost(f"refused after a step: {said}")
    return case.ends(said=said)


def killed_inside(place: str, number: int, case: Case) -> Outcome:
    from tests.faults.kinds import failing_call

    _, case = own_copy(FOLDER, case)

    def die() -> Exception:
        os.kill(os.getpid(), signal.SIGKILL)
        return RuntimeError()

    def harm() -> None:
        at_home(case)
        failing_call(*PARTS[place], number, die)

    case.attempt(harm)
    ended = case.attempt(partial(at_home, case))
    if ended.code != 0:
        raise Lost(f"does not continue: exit code {ended.code}: {ended.words}")
    case.require_numbers()
    return SURVIVED


def remembered(damage: Callable[[Path], object], case: Case) -> Outcome:
    _, case = own_copy(FOLDER, case)
    case.attempt(partial(at_home, case))
    (file,) = (case.root / "home" / "qerl_bench" / "preflight").glob("*.json")
    damage(file)
    shutil.rmtree(case.folder)
    ended = case.attempt(partial(at_home, case))
    if ended.code != 0:
        raise Lost(f"exit code {ended.code}: {ended.words}")
    case.require_numbers()
    return SURVIVED
