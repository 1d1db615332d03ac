"""Write a packed model, or what a run has trained, for other programs.

    qerl-bench export model=PATH_OR_ID quant=nvfp4 out=DIR    # a base: codes
    qerl-bench export runs/NAME out=DIR                       # base and adapter, merged

A base takes the options of a run (quant.*, quantizer=..., task=... for calibration text). nf4 is written as a
bitsandbytes checkpoint, the other formats as those of compressed-tensors, which transformers and vLLM read. The folder
gets its name only when it is complete. Experts are written one linear layer after the other, under the names that
checkpoints of the model have, as llm-compressor does. Left out: experts without such layers (gpt-oss, Llama 4,
Granite), and in nf4.

A run is a finished one, and checkpoint=last, best or a step. Its adapter is added to the dequantized weights that it
was trained on, which are written in dtype=bfloat16, float16 or float32 (default: that of the run's model).
"""

from __future__ import annotations

from pathlib import Path

from qerl_bench.checks import one_of, require
from qerl_bench.commands.eval import chosen_checkpoint, stored_config
from qerl_bench.config import build, compose
from qerl_bench.process.arguments import split_words
from qerl_bench.process.hidden_packages import hidden_packages
from qerl_bench.process.installation import CONF_DIR
from qerl_bench.process.terminal import log_to_stderr
from qerl_bench.quant.export import check_new_folder, config_entry, export
from qerl_bench.rundir.checkpoints import check_checkpoint

USAGE = "usage: qerl-bench export model=PATH_OR_ID quant=fp8|int8|int4|nvfp4|mxfp4|nf4 out=DIR [option=value ...]"
OF_RUN = "usage: qerl-bench export RUN_DIR out=DIR [checkpoint=last|best|STEP dtype=bfloat16|float16|float32]"


def parse_words(words: list[str]) -> tuple[list[str], Path]:
    """The config overrides and the folder `out` from the words of the command.

    A model without a file in conf/model is a hub id or a local folder.
    """
    options, chosen = split_words(words, ("model", "out"), f"{USAGE}; {OF_RUN}")
    model = chosen["model"]
    known = (CONF_DIR / "model" / f"{model}.yaml").is_file()
    overrides = [f"model={model}"] if known else ["model=hub", f"model.id={model}"]
    return [*overrides, "model.dtype=bfloat16", *options], Path(chosen["out"])


def main(words: list[str]) -> None:
    if words and "=" not in words[0]:
        log_to_stderr("qerl_bench")
        print(merge(Path(words[0]), words[1:]))
    else:
        pack(words)


def pack(words: list[str]) -> None:
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


def merge(run_dir: Path, words: list[str]) -> str:
    """Write what the run in `run_dir` has trained to the folder that `words` name; returns a line about it."""
    others, chosen = split_words(words, ("out",), OF_RUN)
    given = dict(word.split("=", 1) for word in others)
    unknown = sorted(given.keys() - {"checkpoint", "dtype"})
    require(not unknown, f"{', '.join(unknown)} is no key of this command; {OF_RUN}")
    cfg = stored_config(run_dir)
    dtype = given.get("dtype") or str(cfg.model.dtype)
    one_of("bfloat16", "float16", "float32")("dtype", dtype)
    checkpoint, out = chosen_checkpoint(run_dir, given.get("checkpoint", "last"), cfg.steps), Path(chosen["out"])
    check_checkpoint(checkpoint)
    check_new_folder(out)
    with hidden_packages():
        import torch

        from qerl_bench.model.merged import export_merged
        from qerl_bench.model_setup import base_checkpoint, build_policy
        from qerl_bench.session import prepare_device

    experiment = build(cfg)
    base = base_checkpoint(experiment.model, experiment.task, experiment.root)
    policy = build_policy(experiment, base, prepare_device(experiment.device, experiment.quant))
    policy.load(checkpoint)
    share = export_merged(policy, getattr(torch, dtype), out)
    return (
        f"{out}: {run_dir.name}, {checkpoint.name}, in {dtype}, whose rounding is {share:.2g} of the adapter's update"
    )
