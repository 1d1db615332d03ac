"""Write a packed model for other programs: a base, or the policy of a finished run with its adapter in the weights.

Takes the options of a run (quant.*, quantizer=..., task=... for calibration text). nf4 is written as a bitsandbytes
checkpoint, the other formats as those of compressed-tensors, which transformers and vLLM read. The folder gets its name
only when it is complete. Experts are written one linear layer after the other, under the names that checkpoints of
the model have, as llm-compressor does. Left out: experts without such layers (gpt-oss, Llama 4, Granite), and in nf4.

With the folder of a run, base and adapter of a checkpoint are rounded together, as rollout.merge does it, in the format
that the run sampled in or in `quant`. What that costs is measured on held-out questions, printed, and kept in
merging.json: accuracy and KL of the merged policy and of the base, beside those of the adapter apart.
"""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import DictConfig

from qerl_bench.checks import require
from qerl_bench.commands.eval import chosen_checkpoint, stored_config, without_training
from qerl_bench.config import build, compose
from qerl_bench.experiment_spec import Experiment
from qerl_bench.options import user_options
from qerl_bench.options.names import load_option
from qerl_bench.process.arguments import split_words
from qerl_bench.process.hidden_packages import hidden_packages
from qerl_bench.process.installation import CONF_DIR
from qerl_bench.quant.export import check_new_folder, config_entry, export
from qerl_bench.rundir.checkpoints import check_checkpoint

FORMATS = "fp8|int8|int4|nvfp4|mxfp4|nf4"
USAGE = f"usage: qerl-bench export model=PATH_OR_ID quant={FORMATS} out=DIR [option=value ...]"
USAGE_RUN = (
    f"usage: qerl-bench export RUN_DIR out=DIR [quant={FORMATS} checkpoint=last|best|STEP questions=N samples=N]"
)
OF_RUN: dict[str, str | None] = {"quant": None, "checkpoint": "last", "questions": None, "samples": "1"}


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
    if words and "=" not in words[0]:
        return merged(words)
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


def merged(words: list[str]) -> None:
    """Write the policy of a run, base and adapter rounded together, and measure what that costs."""
    with hidden_packages():
        from qerl_bench.model_setup import base_checkpoint, build_policy
        from qerl_bench.probe.merging_cost import in_words, merging_cost
        from qerl_bench.session import prepare_device

    run_dir, (given, chosen) = Path(words[0]), split_words(words[1:], ("out",), USAGE_RUN)
    asked = OF_RUN | {key: value for key, _, value in (word.partition("=") for word in given)}
    require(asked.keys() == OF_RUN.keys(), f"{' '.join(given)}: {USAGE_RUN}")
    for key in ("questions", "samples"):
        value = asked[key]
        whole = value is None or (value.isdecimal() and int(value) > 0)
        require(whole, f"{key} must be a whole number of at least 1, got {value}")
    out = Path(chosen["out"])
    check_new_folder(out)
    stored = stored_config(run_dir)
    checkpoint = chosen_checkpoint(run_dir, asked["checkpoint"] or "last", stored.steps)
    check_checkpoint(checkpoint)
    experiment = merged_experiment(stored, asked["quant"])
    merged_into = experiment.sampled.quant
    config_entry(merged_into, [], "bfloat16")  # refuses formats that pack nothing, before any work
    device = prepare_device(experiment.device, merged_into)
    base = base_checkpoint(experiment.model, experiment.task, experiment.root)
    policy = build_policy(experiment, base, device)
    policy.load(checkpoint)
    questions = asked["questions"] or getattr(experiment.eval, "questions", None)
    samples = int(asked["samples"] or 1)
    cost = merging_cost(experiment, policy, None if questions is None else int(questions), samples)
    assert policy.merging is not None
    for path, layer in policy.merging.layers().items():
        policy.model.set_submodule(path, layer)
    export(policy.model, policy.tokenizer, merged_into, out)
    told = {"run": str(run_dir.resolve()), "checkpoint": checkpoint.name, "quant": merged_into.name}
    (out / "merging.json").write_text(json.dumps(told | cost, indent=1) + "\n")
    print(f"{in_words(cost)}\n{out}: {run_dir.name}, {checkpoint.name}, as {merged_into.name}")


def merged_experiment(stored: DictConfig, quant: str | None) -> Experiment:
    """The experiment of a run whose base and adapter are rounded together, to `quant` or to what it sampled in."""
    cfg = without_training(stored)
    rollout = stored.rollout.quant if stored.rollout.merge else None
    target = quant or rollout or stored.quant.name
    require(
        target != "bf16",
        f"{stored.name} has 16-bit weights, and a merged export rounds them: say to which format, such as quant=nvfp4",
    )
    cfg.engine = load_option(user_options.folders(), "engine", "hf")
    cfg.rollout.update({"quant": target, "activations": None, "merge": True, "temperature": 1.0})
    cfg.train.merge = "ste"  # in the policy itself
    if "dropout" in cfg.lora:
        cfg.lora.dropout = 0.0  # of training alone
    return build(cfg)
