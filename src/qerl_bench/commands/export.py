"""Write a packed model for other programs.

Takes the options of a run (quant.*, quantizer=..., task=... for calibration text). nf4 is written as a bitsandbytes
checkpoint, the other formats as those of compressed-tensors, which transformers and vLLM read. The folder gets its name
only when it is complete. Experts are written one linear layer after the other, under the names that checkpoints of
the model have, as llm-compressor does. Left out: experts without such layers (gpt-oss, Llama 4, Granite), and in nf4.
"""

from __future__ import annotations

from pathlib import Path

from qerl_bench.config import build, compose
from qerl_bench.process.arguments import split_words
from qerl_bench.process.hidden_packages import hidden_packages
from qerl_bench.process.installation import CONF_DIR
from qerl_bench.quant.export import check_new_folder, config_entry, export

USAGE = "usage: qerl-bench export model=PATH_OR_ID quant=fp8|int8|int4|nvfp4|mxfp4|nf4 out=DIR [option=value ...]"


def parse_words(words: list[str]) -> tuple[list[str], Path]:
    """The config overrides and the folder `out` from the words of the command.

    A model without a file in conf/model is a hub id or a local folder.
    """
    options, chosen = split_words(words, ("model", "out"), USAGE)
    model = chosen["model"]
    known = (CONF_DIR / "model" / f"{model}.yaml").is_file()
    overrides = [f"model={model}"] if known else ["model=hub", f"model.id={model}"]
    return [*overrides, "model.dtype=bfloat16", *options], Path(chosen["out"])


def main(words: list[str]) -> None:
    with hidden_packages():
        from qerl_bench.model.load import load_packed
        from qerl_bench.model_setup import base_checkpoint
        from qerl_bench.process.device import resolve_device
        from qerl_bench.quant.error_decomposition import write_layers

    overrides, out = parse_words(words)
    experiment = build(compose(overrides))
    config_entry(experiment.quant, [], "bfloat16")  # refuses formats that pack nothing, before any work
    check_new_folder(out)
    base = base_checkpoint(experiment.model, experiment.task, experiment.root)
    device, quantizer = resolve_device(experiment.device), experiment.quantizer
    model, tokenizer, layers = load_packed(experiment.model, experiment.quant, quantizer, experiment.task, base, device)
    export(model, tokenizer, experiment.quant, out)
    write_layers(out / "layers.parquet", layers, experiment.quant.name, experiment.quantizer.name)
    size = sum(report.bytes for report in layers.values())
    print(
        f"{out}: {len(layers)} layers as {experiment.quant.name} ({experiment.quantizer.name}), {size / 2**20:.1f} MiB"
    )
