"""The table of docs/formats.md: checkpoints that one program writes and another reads, and whether weights are equal.

python -m tests.models.pairs            # writes the table, of the writers and readers that are installed here
python -m tests.models.pairs --show     # shows it, writes nothing

Rows of programs that are not installed, or have another version, are kept as they are. One small Qwen2 in BF16 goes
through all of them. A reader's weights are compared with what the writer itself makes of its bytes, in BF16, bit for
bit; of ours as writer with `dequantized`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from qerl_bench.config import build, compose
from qerl_bench.model.load import load_packed
from qerl_bench.quant.export import export
from qerl_bench.quant.linear import PackedLinear
from qerl_core.checks import ConfigError
from qerl_studies.tables.markdown import markdown_table
from tests.models import builds, gguf_files, test_squares

PAGE = Path(__file__).resolve().parents[2] / "docs" / "formats.md"
MARKS = ("<!-- table of python -m tests.models.pairs -->\n", "<!-- end of table -->")
HEADS = ["writer", "as", "reader", "with", "weights"]
OURS = "qerl-bench"
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Pair:
    """`weights_of(FOLDER)` has the writer fill a folder, and gives what its bytes mean and what the reader has."""

    writer: str  # names of distributions, or OURS
    form: str
    reader: str
    words: str
    weights_of: Callable[[Path], tuple[Weights, Weights]]

    @property
    def key(self) -> tuple[str, ...]:
        return named(self.writer), self.form, named(self.reader), self.words


def named(program: str) -> str:
    return program if program == OURS else f"{program} {version(program)}"


def is_here(program: str) -> bool:
    try:
        return program == OURS or bool(version(program))
    except PackageNotFoundError:
        return False


def outcome(pair: Pair) -> str:
    """Whether weights are equal, or the first words of a refusal."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wanted, found = pair.weights_of(Path(folder))
        except ConfigError as error:
            said = str(error).replace(f"{folder}/out", "").strip(": ").replace("its quantization config has ", "")
            return f"refused: {re.split('; |, (?:which|and the run)', said)[0]}"
    assert wanted and wanted.keys() <= found.keys(), sorted(wanted.keys() - found.keys())
    count = sum(weight.numel() for weight in wanted.values())
    off = sum(int((found[name].bfloat16() != weight.bfloat16()).sum()) for name, weight in wanted.items())
    return f"equal, {count:,}" if off == 0 else f"{off / count:.1%} of {count:,} differ"


# --- ours ------------------------------------------------------------------------------------------------------------


def plain(folder: Path) -> Path:
    model = gguf_files.model_of("qwen2", vocab_size=builds.VOCABULARY).bfloat16()
    model.save_pretrained(folder)
    builds.write_tokenizer(folder)
    return folder


def ours(folder: Path, words: str) -> tuple[Any, Any]:
    """Our model of a folder or file, and the experiment's specs."""
    chosen = [f"model.id={folder}", "model=hub", "model.dtype=bfloat16", "device=cpu", *words.split()]
    specs = build(compose(chosen))
    base = specs.model.folder() if folder.is_dir() else None
    return load_packed(specs.model, specs.quant, specs.quantizer, specs.task, base, "cpu")[0], specs


def weights_of(model: Any) -> Weights:
    packed = {n: layer for n, layer in model.named_modules() if isinstance(layer, PackedLinear)}
    return {name: layer.dequantized() for name, layer in packed.items()}


def exported(folder: Path, words: str, read: Callable[[Path, Path], Weights]) -> tuple[Weights, Weights]:
    """What we have packed, and what `read` makes of our export."""
    model, specs = ours(plain(folder / "plain"), words)
    export(model, specs.model.tokenizer(), specs.quant, folder / "out")
    return weights_of(model), read(folder / "out", folder)


# --- readers ---------------------------------------------------------------------------------------------------------


def by_transformers(folder: Path, _: Path, **more: Any) -> Weights:
    """Plain weights by the integration of the library that the folder names."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **more)
    found = {}
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if "layers." in name and weight is not None and weight.dim() == 2:
            state = getattr(weight, "quant_state", None)
            library: Any = import_module("bitsandbytes.functional") if state is not None else None
            found[name] = weight.detach() if state is None else library.dequantize_4bit(weight.data, state)
    return found


def by_compressed_tensors(folder: Path, where: Path) -> Weights:
    from transformers import CompressedTensorsConfig

    return by_transformers(folder, where, quantization_config=CompressedTensorsConfig(run_compressed=False))


def by_llm_dequant(folder: Path, where: Path) -> Weights:
    import_module("llm_dequant.model").convert(folder, where / "dense", "bf16", log=lambda *_: None)
    return tensors_of(where / "dense")


def tensors_of(folder: Path) -> Weights:
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name.removesuffix(".weight"): tensor for name, tensor in stored.items()}


# --- writers ---------------------------------------------------------------------------------------------------------


def by_llm_compressor(folder: Path, words: str, scheme: str) -> tuple[Weights, Weights]:
    from transformers import AutoModelForCausalLM

    modifiers = import_module("llmcompressor.modifiers.quantization")
    model = AutoModelForCausalLM.from_pretrained(plain(folder / "plain"), dtype=torch.bfloat16)
    recipe = modifiers.QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    import_module("llmcompressor").oneshot(model=model, recipe=recipe, pipeline="datafree", log_dir=None)
    model.save_pretrained(folder / "out", save_compressed=True)
    builds.write_tokenizer(folder / "out")
    found = weights_of(ours(folder / "out", words)[0])
    whole = by_compressed_tensors(folder / "out", folder)
    return {name: whole[name] for name in found}, found


def by_modelopt(folder: Path, words: str, config: str) -> tuple[Weights, Weights]:
    """Its own weights are those of its `dequantize`, of codes that it packed without rounding inputs on this CPU."""
    from transformers import AutoModelForCausalLM

    quantization = import_module("modelopt.torch.quantization")
    model = AutoModelForCausalLM.from_pretrained(plain(folder / "plain"), dtype=torch.bfloat16)
    quantization.quantize(model, getattr(quantization, config), lambda _: None)
    import_module("modelopt.torch.export").export_hf_checkpoint(model, export_dir=str(folder / "out"))
    builds.write_tokenizer(folder / "out")
    found, stored = weights_of(ours(folder / "out", words)[0]), load_file(folder / "out" / "model.safetensors")
    qtensor = import_module("modelopt.torch.quantization.qtensor").NVFP4QTensor
    wanted = {}
    for name in found:
        codes, scale, double = (stored[f"{name}.{leaf}"] for leaf in ("weight", "weight_scale", "weight_scale_2"))
        tensor = qtensor(torch.Size((codes.shape[0], 2 * codes.shape[1])), torch.bfloat16, codes)
        wanted[name] = tensor.dequantize(torch.bfloat16, scale=scale, double_scale=double, block_sizes={-1: 16})
    return wanted, found


def by_bitsandbytes(folder: Path, words: str, **options: Any) -> tuple[Weights, Weights]:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    entry = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **options)
    model = AutoModelForCausalLM.from_pretrained(
        plain(folder / "plain"), quantization_config=entry, dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(folder / "out")
    builds.write_tokenizer(folder / "out")
    found = weights_of(ours(folder / "out", words)[0])
    return by_transformers(folder / "out", folder, device_map="cpu"), found


def by_gguf(folder: Path, words: str, kind: str) -> tuple[Weights, Weights]:
    """`write` leaves in the model what the package reads back. Biases apart, everything is dequantized to BF16."""
    from qerl_bench.model.gguf.convert import converted

    model = gguf_files.model_of("qwen2")
    file = gguf_files.write(folder / "model.gguf", model, kind)
    wanted = {n: m.weight.detach() for n, m in model.named_modules() if "layers." in n and "proj" in n}
    return wanted, tensors_of(converted(file, None, "bfloat16", folder / "cache"))


def by_squares(folder: Path, words: str) -> tuple[Weights, Weights]:
    """Scales of squares as models are published, and transformers' own reading of them."""
    out = test_squares.publish(folder / "out", "qwen3")
    found, stored = weights_of(ours(out, words)[0]), load_file(out / "model.safetensors")
    pairs = {name: (stored[f"{name}.weight"], stored[f"{name}.weight_scale_inv"]) for name in found}
    return {n: test_squares.theirs(codes, scale, torch.bfloat16) for n, (codes, scale) in pairs.items()}, found


def by_torchao(folder: Path, words: str) -> tuple[Weights, Weights]:
    from transformers import AutoModelForCausalLM, TorchAoConfig

    kind = import_module("torchao.quantization").Int8WeightOnlyConfig
    source = plain(folder / "plain")
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=TorchAoConfig(kind()), dtype=torch.bfloat16
    )
    model.save_pretrained(folder / "out", safe_serialization=False)
    builds.write_tokenizer(folder / "out")
    return {}, weights_of(ours(folder / "out", words)[0])


def pairs() -> Iterator[Pair]:
    schemes = {
        "NVFP4A16": "quant=nvfp4", "NVFP4": "quant=nvfp4", "MXFP4A16": "quant=mxfp4", "FP8_DYNAMIC": "quant=fp8",
        "FP8_BLOCK": "quant=fp8 quant.block=128x128", "W8A8": "quant=int8", "W8A16": "quant=int8 quant.block=128",
        "W4A16": "quant=int4 quant.block=128", "W4A16_ASYM": "quant=int4 quant.block=128", "FP8": "quant=fp8",
        "W4AFP8": "quant=int4 quant.block=128",
    }  # fmt: skip
    for scheme, words in schemes.items():
        yield Pair("llmcompressor", scheme, OURS, words, partial(by_llm_compressor, words=words, scheme=scheme))
    for config in ("NVFP4_MLP_WEIGHT_ONLY_CFG", "W4A16_NVFP4_CFG", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"):
        words = "quant=fp8 quant.block=128x128" if "FP8_2D" in config else "quant=nvfp4"
        yield Pair("nvidia-modelopt", config, OURS, words, partial(by_modelopt, words=words, config=config))
    for form, options in {
        "nf4": {"bnb_4bit_quant_type": "nf4"},
        "nf4, double": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        "fp4": {"bnb_4bit_quant_type": "fp4"},
    }.items():
        words = "quant=nf4" + (" quant.double_quant=true" if "double" in form else "")
        yield Pair("bitsandbytes", form, OURS, words, partial(by_bitsandbytes, words=words, **options))
    for kind in ("MXFP4", "Q8_0", "Q4_0"):
        yield Pair("gguf", kind, OURS, "model=FILE.gguf", partial(by_gguf, words="", kind=kind))
    words = "quant=fp8 quant.block=128x128"
    yield Pair("transformers", "fp8", OURS, words, partial(by_squares, words=words))
    yield Pair("torchao", "Int8WeightOnlyConfig", OURS, "quant=int8", partial(by_torchao, words="quant=int8"))
    for words in (
        *("quant=nvfp4", "quant=mxfp4", "quant=mxfp8", "quant=fp8", "quant=fp8 quant.block=128x128"),
        *("quant=int8", "quant=int8 quant.block=128", "quant=int4", "quant=int4 quant.block=128"),
    ):
        read = partial(exported, words=words, read=by_compressed_tensors)
        yield Pair(OURS, "compressed-tensors", "compressed-tensors", words, read)
    yield Pair(OURS, "compressed-tensors", "llm-dequant", "quant=nvfp4",
               partial(exported, words="quant=nvfp4", read=by_llm_dequant))  # fmt: skip
    for words in ("quant=nf4", "quant=nf4 quant.double_quant=true"):
        read = partial(exported, words=words, read=partial(by_transformers, device_map="cpu"))
        yield Pair(OURS, "bitsandbytes", "bitsandbytes", words, read)


# --- the table -------------------------------------------------------------------------------------------------------


def stored_rows() -> dict[tuple[str, ...], str]:
    table = PAGE.read_text().partition(MARKS[0])[2].partition(MARKS[1])[0]
    cells = [[cell.strip().strip("`") for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]
    return {tuple(row[:4]): row[4] for row in cells}


def render(rows: dict[tuple[str, ...], str]) -> str:
    lines = [[key[0], f"`{key[1]}`", key[2], f"`{key[3]}`", said] for key, said in rows.items()]
    return markdown_table(HEADS, lines)


def main(words: list[str]) -> None:
    logging.disable(logging.WARNING)
    rows = stored_rows()
    for pair in pairs():
        if is_here(pair.writer) and is_here(pair.reader):
            rows[pair.key] = outcome(pair)
            print(*pair.key, rows[pair.key], sep=" | ", flush=True)
    if "--show" not in words:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        PAGE.write_text(before + MARKS[0] + render(rows) + "\n" + MARKS[1] + rest.partition(MARKS[1])[2])


if __name__ == "__main__":
    main(sys.argv[1:])
