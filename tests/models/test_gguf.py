"""model.id=FILE.gguf: each architecture computes what transformers does, and what cannot be read is refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_bench.config import build, compose
from qerl_bench.model.digest import digest_of, file_digest, name_of_base
from qerl_bench.model.gguf import convert
from qerl_bench.model.gguf.convert import converted, record_of, rounding_notice
from qerl_bench.model.gguf.header import _read
from qerl_bench.model.gguf.rope import FREQUENCIES
from qerl_bench.model.gguf.safetensors import SERIAL, rounded
from qerl_bench.model.gguf.weights import Dither
from qerl_bench.model.hub import HubModel
from qerl_bench.model.load import load_packed
from qerl_bench.model_setup import base_checkpoint
from qerl_core.checks import ConfigError
from qerl_core.options.fingerprint import fingerprint
from qerl_core.options.model_names import short_name
from tests.faults.damage import DAMAGES
from tests.models.gguf_files import PLAIN, SPECIAL, VOCABULARY, model_of, random_blocks, tokenizer_keys, write

IDS = torch.randint(0, VOCABULARY, (2, 48), generator=torch.Generator().manual_seed(0))
MIXED = {  # types as in files of llama-quantize, made of random blocks where the gguf package cannot make them
    "token_embd.weight": "Q8_0",
    "blk.0.attn_q.weight": "Q5_0",
    "blk.0.attn_k.weight": "Q4_1",
    "blk.0.attn_v.weight": "Q6_K",
    "blk.0.attn_output.weight": "Q4_0",
    "blk.0.ffn_gate.weight": "Q4_K",
    "blk.0.ffn_up.weight": "Q5_K",
    "blk.0.ffn_down.weight": "Q5_1",
    "blk.1.attn_q.weight": "Q4_K",
    "blk.1.attn_k.weight": "Q6_K",
    "blk.1.ffn_down.weight": "F16",
    "blk.1.ffn_up.weight": "BF16",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
LINEAR_KEYS = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}


def hub(file: Path | str, **changes: Any) -> HubModel:
    values: dict[str, Any] = {"name": "x", "id": str(file), "revision": None, "dtype": "float32", "lr": 1e-5}
    values |= {"trust_remote_code": False, "template": {}, "dither": None, "dither_scale": 1.0}
    return HubModel(**{**values, **changes})


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def loaded(file: Path, cache: Path, **changes: Any) -> Any:
    """The model as a run loads it, its layers unpacked."""
    cfg = compose(["model=hub", f"model.id={file}", "model.dtype=float32", f"root={cache}", "task.template=chat"])
    experiment = build(cfg)
    spec = hub(file, **changes)
    base = base_checkpoint(spec, experiment.task, str(cache))
    model, *_ = load_packed(spec, experiment.quant, experiment.quantizer, experiment.task, base, "cpu")
    return model


def llama3_divisors() -> np.ndarray:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = model_of("llama", rope_parameters=LLAMA3)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled.config, torch.device("cpu"))
    plain = 1 / LLAMA3["rope_theta"] ** (torch.arange(0, 64, 2) / 64)
    return (plain / frequencies).numpy().astype(np.float32)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (lambda: model_of("llama"), {}),
    "llama, untied": (lambda: model_of("llama", tied=False), {}),
    "llama, wide heads": (lambda: model_of("llama", head_dim=128), {}),
    "llama 3": (
        lambda: model_of("llama", rope_parameters=LLAMA3),
        {"extra": {FREQUENCIES: llama3_divisors}},
    ),
    "llama, linear": (
        lambda: model_of("llama", rope_parameters=LINEAR),
        {"keys": LINEAR_KEYS},
    ),
    "qwen2": (lambda: model_of("qwen2"), {}),
    "qwen2, untied": (lambda: model_of("qwen2", tied=False), {}),
    "qwen2, yarn": (lambda: model_of("qwen2", rope_parameters=YARN), {"keys": YARN_KEYS}),
    "qwen3": (lambda: model_of("qwen3", head_dim=128), {}),
    "gemma3": (lambda: model_of("gemma3_text"), {}),
    "gemma3, linear": (
        lambda: model_of("gemma3_text", rope_parameters={"full_attention": LINEAR, "sliding_attention": {**PLAIN}}),
        {"keys": LINEAR_KEYS},
    ),
}


@pytest.mark.parametrize("kinds", ["F32", "mixed"])
@pytest.mark.parametrize("case", CASES)
def test_a_file_computes_what_transformers_does_with_the_same_weights(case: str, kinds: str, tmp_path: Path) -> None:
    make, words = CASES[case]
    model = make()
    words = {**words, "extra": {name: make() for name, make in words.get("extra", {}).items()}}
    file = write(tmp_path / "x.gguf", model, "F32" if kinds == "F32" else MIXED, **words)
    assert torch.equal(logits(loaded(file, tmp_path)), logits(model))
    folder = hub(file).converted(tmp_path / "cache" / "gguf")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)), logits(model))


def test_a_gemma_of_62_blocks_divides_queries_as_the_27b_does(tmp_path: Path) -> None:
    model = model_of(
        "gemma3_text", num_hidden_layers=62, layer_types=None, hidden_size=160, head_dim=32, intermediate_size=32
    )
    folder = hub(write(tmp_path / "x.gguf", model)).converted(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["query_pre_attn_scalar"] == 40 and config["head_dim"] == 32
    assert config["layer_types"] == model.config.layer_types


# --- head ------------------------------------------------------------------------------------------------------------


def test_two_roundings_of_one_matrix_are_tied_and_the_finer_one_serves_both(tmp_path: Path) -> None:
    model = model_of("qwen2")
    original = model.model.embed_tokens.weight.detach().numpy().copy()
    finer = quantize(original, GGMLQuantizationType.Q8_0)
    file = write(tmp_path / "x.gguf", model, {"token_embd.weight": "Q4_0"}, raw_head=(finer, "Q8_0"))
    folder = hub(file).converted(tmp_path)
    assert record_of(folder)["tied"]  # type: ignore[index]
    read = loaded(file, tmp_path)
    assert read.lm_head.weight is read.model.embed_tokens.weight
    assert np.array_equal(read.lm_head.weight.detach().numpy(), dequantize(finer, GGMLQuantizationType.Q8_0))


@pytest.mark.parametrize("rows", [1, VOCABULARY])
def test_a_head_that_differs_in_any_row_stays_apart(rows: int, tmp_path: Path) -> None:
    model = model_of("qwen2")
    head = model.model.embed_tokens.weight.detach().numpy().copy()
    head[:rows] *= 1.5
    raw = quantize(head, GGMLQuantizationType.Q8_0)
    file = write(tmp_path / "x.gguf", model, {"token_embd.weight": "Q4_0"}, raw_head=(raw, "Q8_0"))
    read = loaded(file, tmp_path)
    assert np.array_equal(read.lm_head.weight.detach().numpy(), dequantize(raw, GGMLQuantizationType.Q8_0))
    assert torch.equal(read.model.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS"])
def test_a_head_of_a_type_whose_cells_are_not_known_stays_apart(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model, raw = model_of("qwen2"), random_blocks(kind, VOCABULARY, 256)
    file = write(tmp_path / "x.gguf", model, {"token_embd.weight": "Q4_0"}, raw_head=(raw, kind))
    read = loaded(file, tmp_path)
    assert np.array_equal(read.lm_head.weight.detach().numpy(), dequantize(raw, GGMLQuantizationType[kind]))
    assert torch.equal(read.model.embed_tokens.weight, model.model.embed_tokens.weight)
    said = [line for line in caplog.messages if "output.weight" in line]
    assert len(said) == 1 and f"Q4_0 and {kind}" in said[0]


# --- the folder ------------------------------------------------------------------------------------------------------


def test_the_folder_is_made_once_and_says_what_the_weights_have_been_through(tmp_path: Path) -> None:
    file = write(tmp_path / "My Model.gguf", model_of("qwen2"), "Q4_1")
    folder = hub(file, dtype="bfloat16").converted(tmp_path / "cache")
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert hub(file, dtype="bfloat16").converted(tmp_path / "cache") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()} == {folder.name}
    record = record_of(folder)
    assert record is not None and record["bits_per_weight"] == 5.0 and record["file"] == "My Model.gguf"
    assert rounding_notice(record) == "My Model.gguf: these 16-bit weights were rounded to 5.0 bits a weight before"
    plain = write(tmp_path / "plain.gguf", model_of("qwen2"), "BF16")
    assert rounding_notice(record_of(hub(plain).converted(tmp_path)) or {}) is None


def test_another_file_of_the_same_name_and_size_is_converted_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of large files the digest reads some blocks alone, which may be the same in both."""
    monkeypatch.setattr("qerl_bench.model.digest.MAX_WHOLE_BYTES", 2**12)
    monkeypatch.setattr("qerl_bench.model.digest.BLOCK_BYTES", 2**6)
    file, other = tmp_path / "x.gguf", model_of("qwen2")
    write(file, other)
    first, size, digest = hub(file).converted(tmp_path / "cache"), file.stat().st_size, file_digest(file)
    content = bytearray(file.read_bytes())
    at = size // 2 + 256  # between two blocks that are read
    content[at : at + 4] = np.float32(3).tobytes()
    file.write_bytes(content)
    os.utime(file, ns=(0, 10**18))
    assert (file.stat().st_size, file_digest(file)) == (size, digest)
    second = hub(file).converted(tmp_path / "cache")
    assert second != first
    before, after = ((folder / "model.safetensors").read_bytes() for folder in (first, second))
    assert before != after


@pytest.mark.parametrize("how", ["replaced", "written to", "given another time"])
def test_a_file_that_changes_while_it_is_converted_is_refused_and_then_converted_whole(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is that of the weights that were read, whoever takes its place."""
    file = write(tmp_path / "x.gguf", model_of("qwen2"))
    other = write(tmp_path / "other.gguf", model_of("qwen2"), "Q8_0")
    write_weights = convert._write_weights

    def change(*given: Any) -> None:
        write_weights(*given)
        if how == "replaced":
            os.replace(other, file)
        elif how == "written to":
            with open(file, "r+b") as opened:
                opened.seek(-4, os.SEEK_END)
                opened.write(b"abcd")
        else:
            os.utime(file, ns=(0, 10**18))

    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"x\.gguf was changed while it was read"):
        patch.setattr(convert, "_write_weights", change)
        hub(file).converted(tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    record = record_of(hub(file).converted(tmp_path / "cache"))
    assert record is not None and record["digest"] == f"sha256:{file_digest(file)[:16]}"


def test_a_conversion_that_was_killed_is_made_again(tmp_path: Path) -> None:
    file = write(tmp_path / "x.gguf", model_of("qwen2"))
    folder = hub(file).converted(tmp_path / "cache")
    left = folder.with_name(f".{folder.name}.writing")
    folder.rename(left)
    (left / "model.safetensors").write_bytes(b"half")
    assert hub(file).converted(tmp_path / "cache") == folder and not left.exists()
    assert (folder / "model.safetensors").stat().st_size > 1000


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json", "gguf.json", "digests.json"],
)
@pytest.mark.parametrize("damage", ["cut", "zeros", "delete"])
def test_a_conversion_that_was_damaged_is_made_again(
    name: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "x.gguf", model_of("qwen2"))
    folder = hub(file).converted(tmp_path / "cache")
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    DAMAGES[damage](folder / name)
    assert hub(file).converted(tmp_path / "cache") == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert f"{folder / name} is not what was written" in caplog.text and "x.gguf" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen2, untied"])
def test_chunks_change_no_byte(case: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "x.gguf", CASES[case][0](), {"blk.0.attn_q.weight": "Q5_0", "token_embd.weight": "Q8_0"})
    folders = []
    for chunk in (2**30, 5 * 256):
        monkeypatch.setattr("qerl_bench.model.gguf.weights.CHUNK", chunk)
        folders.append(converted(file, Dither(3, 1.0), dtype, tmp_path / str(chunk)))
    whole, parts = (folder / "model.safetensors" for folder in folders)
    assert whole.read_bytes() == parts.read_bytes()
    save_file(load_file(whole), tmp_path / "again.safetensors", {"format": "pt"})
    assert whole.read_bytes() == (tmp_path / "again.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_rounded_as_torch_does(dtype: torch.dtype) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 3 * SERIAL + 1, dtype=np.uint32)  # every kind of number
    values = bits.view(np.float32)
    wanted = torch.from_numpy(values).to(dtype).view(torch.uint8).numpy()
    assert bytes(rounded(values, dtype)) == wanted.tobytes()


def test_large_models_lie_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    file = write(tmp_path / "x.gguf", model)
    monkeypatch.setattr("qerl_bench.model.gguf.convert.SHARD_BYTES", 2**20)
    folder = hub(file).converted(tmp_path / "cache")
    assert len([*folder.glob("model-*.safetensors")]) > 2
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)), logits(model))


def test_completions_end_at_the_token_of_the_file_and_behind_a_turn_of_the_template(tmp_path: Path) -> None:
    keys = tokenizer_keys(eos_token_id=257, padding_token_id=None)
    file = write(tmp_path / "x.gguf", model_of("qwen2"), tokenizer=keys)
    folder = hub(file).converted(tmp_path)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [257, 259]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+2?"}], add_generation_prompt=True, tokenize=False
    )
    assert asked.startswith("<|im_start|>user\n2+2?<|im_end|>") and tokenizer.eos_token == SPECIAL[0]


# --- copies ----------------------------------------------------------------------------------------------------------


def test_copies_are_told_apart_by_fingerprint_digest_and_name(tmp_path: Path) -> None:
    file = write(tmp_path / "My Model.gguf", model_of("qwen2"), "Q4_1")
    words = ["model=hub", f"model.id={file}"]
    seeds = [[], ["model.dither=0"], ["model.dither=1"], ["model.dither=1", "model.dither_scale=2"]]
    assert len({fingerprint(compose([*words, *more])) for more in seeds}) == 4
    specs = [build(compose([*words, *more])).model for more in seeds]
    digests = {digest_of(spec, spec.converted(tmp_path / "cache")) for spec in specs}  # type: ignore[attr-defined]
    assert len(digests) == 4 and None not in digests
    assert [name_of_base(spec) for spec in specs[:2]] == ["My Model.gguf", "My Model.gguf (dither 0)"]
    assert short_name(str(file)) == "my-model"


def test_options_that_dither_cannot_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.dither=1 .*model.id=org/name.*null"):
        hub("org/name", dither=1)
    file = write(tmp_path / "x.gguf", model_of("qwen2"))
    with pytest.raises(ConfigError, match=r"model.dither_scale=2.*model.dither=null"):
        hub(file, dither_scale=2)
    with pytest.raises(ConfigError, match=r"model.revision=main"):
        hub(file, revision="main")
    with pytest.raises(ConfigError, match=r"model.dither .*F32.*model.dither=null"):
        hub(file, dither=1).check(())
    for scale in (0, -1, float("nan"), 1e9):
        with pytest.raises(ConfigError, match=r"model.dither_scale"):
            hub(file, dither=1, dither_scale=scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_draw_of_another_size_leaves_everything_else_alone(dtype: str, tmp_path: Path) -> None:
    model = model_of("llama")
    file = write(tmp_path / "x.gguf", model, {"blk.0.attn_q.weight": "Q5_0"})
    plain, small, large = (
        AutoModelForCausalLM.from_pretrained(
            converted(file, dither, dtype, tmp_path / "cache"), dtype=torch.float32
        ).state_dict()
        for dither in (None, Dither(3, 0.25), Dither(3, 4.0))
    )
    changed = [name for name in plain if not torch.equal(plain[name], small[name])]
    assert changed == ["model.layers.0.self_attn.q_proj.weight"]
    first, second = (copy[changed[0]] - plain[changed[0]] for copy in (small, large))
    limit = 0.0 if dtype == "float32" else 2.0**-7 * float(plain[changed[0]].abs().max())
    assert (second - 4 * first).abs().max() <= 1e-6 + 5 * limit


# --- what is refused -------------------------------------------------------------------------------------------------


def refused(file: Path, match: str, **changes: Any) -> None:
    """Both the first look at a config and the check before a run refuse, or the check alone."""
    with pytest.raises(ConfigError, match=match):
        hub(file, **changes).check(())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "x.gguf", model_of("qwen2"))


def test_a_missing_foreign_or_cut_file_is_refused(whole: Path, tmp_path: Path) -> None:
    refused(tmp_path / "no.gguf", r"model.id=.*no.gguf: there is no such file")
    content = whole.read_bytes()
    header = content.index(b"blk.1.ffn_down.weight")
    for length, match in (
        (0, "0 bytes"),
        (10, "10 bytes"),
        (header // 2, "cut short or damaged inside its header"),
        (header, "cut short or damaged inside its header"),
        (len(content) - 5000, r"cut short: tensor .* ends at byte"),
    ):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(content[:length])
        refused(cut, rf"model.id=.*cut.gguf .*{match}")
    for start, match in (
        (b"PK\3\4", "is no GGUF file"),
        (b"GGUF\1\0\0\0", "version 1"),
        (b"GGUF\0\0\0\3", "version 50"),
    ):
        other = tmp_path / "other.gguf"
        other.write_bytes(start + content[len(start) :])
        refused(other, match)


@pytest.mark.parametrize("word", ["cut", "noise"])
def test_a_damaged_header_ends_in_one_message(word: str, whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    end = content.index(b"output_norm.weight")
    random = np.random.default_rng(0)
    for number in range(40):
        damaged = bytearray(content)
        if word == "cut":
            damaged = damaged[: int(random.integers(24, end))]
        else:
            at = int(random.integers(8, end))
            damaged[at : at + 8] = random.bytes(8)
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(damaged)
        try:
            hub(file).check(())
        except ConfigError as error:
            assert str(file) in str(error) or "model" in str(error)
        else:
            assert word == "noise"  # which may hit the text of a token


def test_parts_of_a_split_file_are_refused(whole: Path, tmp_path: Path) -> None:
    part = tmp_path / "x-00001-of-00002.gguf"
    part.write_bytes(whole.read_bytes())
    refused(part, r"one of 2 parts .*llama-gguf-split --merge")
    refused(write(tmp_path / "y.gguf", model_of("qwen2"), keys={"split.count": 3}), r"one of 3 parts")


def test_an_unknown_type_is_refused_by_its_name(whole: Path, tmp_path: Path) -> None:
    content = bytearray(whole.read_bytes())
    at = content.index(b"blk.1.ffn_down.weight") + len(b"blk.1.ffn_down.weight") + 4 + 16
    content[at : at + 4] = (99).to_bytes(4, "little")
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    refused(file, r"tensor blk.1.ffn_down.weight has the unknown type 99")
    content[at : at + 4] = int(GGMLQuantizationType.Q8_1).to_bytes(4, "little")
    file.write_bytes(content)
    refused(file, r"tensor blk.1.ffn_down.weight has the type Q8_1")


def test_dither_refuses_types_whose_cells_it_does_not_know(tmp_path: Path) -> None:
    raw = random_blocks("Q3_K", VOCABULARY, 256)
    file = write(tmp_path / "x.gguf", model_of("qwen2"), "Q4_0", raw_head=(raw, "Q3_K"))
    hub(file).check(())
    refused(file, r"model.dither .*Q3_K.*output.weight.*model.dither=null", dither=0)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no tokenizer": ({"tokenizer": {}}, "tokenizer.ggml.tokens is missing"),
    "another vocabulary": (
        {"tokenizer": tokenizer_keys(tokens=["a", "b"], token_type=[1, 1])},
        r"tokenizer.ggml.tokens\) has 2 tokens and token_embd.weight 260 rows",
    ),
    "no end": ({"tokenizer": tokenizer_keys(eos_token_id=None)}, "tokenizer.ggml.eos_token_id"),
    "an end beyond": ({"tokenizer": tokenizer_keys(eos_token_id=900)}, "eos_token_id=900"),
    "another kind": ({"tokenizer": tokenizer_keys(model="t5")}, "tokenizer.ggml.model=t5.*gpt2 and llama"),
    "another split": ({"tokenizer": tokenizer_keys(pre="tekken")}, "tokenizer.ggml.pre=tekken.*qwen2"),
    "bos without": (
        {"tokenizer": tokenizer_keys(add_bos_token=True, bos_token_id=None)},
        "add_bos_token=true.*bos_token_id",
    ),
    "no size": ({"keys": {"embedding_length": None}}, "qwen2.embedding_length"),
    "an unknown key": ({"keys": {"attention.sliding_window": 32}}, r"qwen2.attention.sliding_window=32"),
    "a part rotated": ({"keys": {"rope.dimension_count": 32}}, "qwen2.rope.dimension_count=32.*64"),
    "longrope": ({"keys": {"rope.scaling.type": "longrope"}}, "qwen2.rope.scaling.type=longrope"),
    "yarn without its length": (
        {"keys": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}},
        "rope.scaling.type=yarn.*original_context_length",
    ),
    "a factor without type": ({"keys": {"rope.scaling.factor": 4.0}}, "rope.scaling.type=none with factor 4"),
    "yarn of another kind": ({"keys": YARN_KEYS | {"rope.scaling.yarn_log_multiplier": 0.1}}, "yarn_log_multiplier"),
    "divisors": ({"extra": {FREQUENCIES: np.ones(32, dtype=np.float32)}}, FREQUENCIES),
    "a missing tensor": ({"drop": ("blk.1.attn_q.bias",)}, "lacks 1 .*blk.1.attn_q.bias"),
    "a foreign tensor": (
        {"extra": {"blk.0.ffn_gate_inp.weight": np.ones((4, 256), np.float32)}},
        "ffn_gate_inp.weight",
    ),
    "another width": ({"keys": {"feed_forward_length": 128}}, r"blk.0.ffn_gate.weight has the shape \(512, 256\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_would_be_read_wrong_is_refused_by_name(case: str, tmp_path: Path) -> None:
    words, match = BAD[case]
    refused(write(tmp_path / "x.gguf", model_of("qwen2"), **words), rf"(?s)x.gguf.*{match}")


def test_divisors_that_are_not_those_of_llama_3_are_refused(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, 32, dtype=np.float32)
    file = write(tmp_path / "x.gguf", model_of("llama"), extra={FREQUENCIES: divisors})
    refused(file, rf"{FREQUENCIES}.*factor of 8.*low_freq_factor=1")


def test_another_architecture_is_refused_by_its_name(tmp_path: Path) -> None:
    file = write(tmp_path / "x.gguf", model_of("qwen2"))
    file.write_bytes(file.read_bytes().replace(b"qwen2", b"rwkv7"))
    refused(file, r"general.architecture=rwkv7; readable are llama, qwen2, qwen3, gemma3")


@pytest.mark.usefixtures("no_packages")
def test_the_package_is_named_if_it_is_missing(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    _read.cache_clear()
    for ask in (lambda: hub(whole).check(()), hub(whole).config):
        with pytest.raises(ConfigError, match=r"model.id=.*x.gguf needs the package gguf.*\.\[gguf\]"):
            ask()


def test_a_file_that_is_missing_is_told_by_every_command_that_converts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.id=.*none.gguf: there is no such file"):
        hub(tmp_path / "none.gguf").converted(tmp_path)
