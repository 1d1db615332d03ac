"""Write a packed model, or what a run has trained, for other programs.

    qerl-bench export model=PATH_OR_ID quant=nvfp4 out=DIR    # a base: codes
    qerl-bench export runs/NAME out=DIR                       # base and adapter, merged, in 16 bits
    qerl-bench export runs/NAME quant=nvfp4 out=DIR           # base and adapter, rounded together

A base takes the options of a run (quant.*, quantizer=..., task=... for calibration text). nf4 is written as a
bitsandbytes checkpoint, the other formats as those of compressed-tensors, which transformers and vLLM read. The folder
gets its name only when it is complete. Experts are written one linear layer after the other, under the names that
checkpoints of the model have, as llm-compressor does. Left out: experts without such layers (gpt-oss, Llama 4,
Granite), and in nf4.

A run is a finished one, and checkpoint=last, best or a step. In 16 bits its adapter is added to the dequantized weights
that it was trained on, which are written in dtype=bfloat16, float16 or float32 (default: that of the run's model). With
`quant` both are rounded together, as rollout.merge does it, and what that costs is measured on held-out questions
(questions=, samples=), printed, and kept in merging.json: accuracy and KL of the merged policy and of the base, beside
those of the adapter apart.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from omegaconf import DictConfig

from qerl_bench.checks import naming, one_of, require
from qerl_bench.commands.eval import chosen_checkpoint, stored_config, without_training
from qerl_bench.config import build, compose
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model.base import source_of
from qerl_bench.options import user_options
from qerl_bench.options.names import load_option
from qerl_bench.process.arguments import split_words
from qerl_bench.process.hidden_packages import hidden_packages
from qerl_bench.process.installation import CONF_DIR
from qerl_bench.process.terminal import log_to_stderr
from qerl_bench.rundir.checkpoints import check_checkpoint
from qerl_bench.rundir.durable import check_new_folder

FORMATS = "fp8|int8|int4|nvfp4|mxfp4|nf4"
USAGE = f"usage: qerl-bench export model=PATH_OR_ID quant={FORMATS} out=DIR [option=value ...]"
IN_16_BITS = "usage: qerl-bench export RUN_DIR out=DIR [checkpoint=last|best|STEP dtype=bfloat16|float16|float32]"
ROUNDED = f"usage: qerl-bench export RUN_DIR quant={FORMATS} out=DIR [checkpoint=last|best|STEP questions=N samples=N]"


def parse_words(words: list[str]) -> tuple[list[str], Path]:
    """The config overrides and the folder `out` from the words of the command.

    A model without a file in conf/model is a hub id or a local folder.
    """
    options, chosen = split_words(words, ("model", "out"), f"{USAGE}; {IN_16_BITS}")
    model = chosen["model"]
    known = (CONF_DIR / "model" / f"{model}.yaml").is_file()
    overrides = [f"model={model}"] if known else ["model=hub", f"model.id={model}"]
    return [*overrides, "model.dtype=bfloat16", *options], Path(chosen["out"])


def main(words: list[str]) -> None:
    if words and "=" not in words[0]:
        log_to_stderr("qerl_bench")
        run_dir, words = Path(words[0]), words[1:]
        rounded = any(word.startswith("quant=") for word in words)
        print((merge_rounded if rounded else merge)(run_dir, words))
    else:
        pack(words)


def pack(words: list[str]) -> None:
    overrides, out = parse_words(words)
    experiment = build(compose(overrides))
    experiment.model.check_files()
    check_new_folder(out)
    with hidden_packages():
        from qerl_bench.model.load import load_packed
        from qerl_bench.model_setup import base_checkpoint
        from qerl_bench.process.device import resolve_device
        from qerl_bench.quant.error_decomposition import write_layers
        from qerl_bench.quant.export import config_entry, export

    config_entry(experiment.quant, [], "bfloat16")  # refuses formats that pack nothing, before any work
    base = base_checkpoint(experiment.model, experiment.task, experiment.root)
    device, quantizer = resolve_device(experiment.device), experiment.quantizer
    with naming(source_of(experiment.model)):
        model, tokenizer, layers = load_packed(
            experiment.model, experiment.quant, quantizer, experiment.task, base, device
        )
    export(model, tokenizer, experiment.quant, out)
    write_layers(out / "layers.parquet", layers, experiment.quant.name, experiment.quantizer.name)
    size = sum(report.bytes for report in layers.values())
    print(
        f"{out}: {len(layers)} layers as {experiment.quant.name} ({experiment.quantizer.name}), {size / 2**20:.1f} MiB"
    )


def merge(run_dir: Path, words: list[str]) -> str:
    """Write what the run in `run_dir` has trained to the folder that `words` name; returns a line about it."""
    out, given = words_of_run(words, {"checkpoint", "dtype"}, IN_16_BITS)
    cfg = stored_config(run_dir)
    trained_in = cfg.rollout.quant or cfg.quant.name
    require(
        cfg.train.get("merge", "none") == "none",
        f"{run_dir.name} was trained with base and adapter rounded together, so it is that in no other way: "
        f"quant={trained_in}",
    )
    dtype = given.get("dtype") or str(cfg.model.dtype)
    one_of("bfloat16", "float16", "float32")("dtype", dtype)
    checkpoint = chosen_checkpoint(run_dir, given.get("checkpoint", "last"), cfg.steps)
    check_checkpoint(checkpoint)
    check_new_folder(out)
    with hidden_packages():
        import torch

        from qerl_bench.model.merged_checkpoint import export_merged
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


def words_of_run(words: list[str], known: Collection[str], usage: str) -> tuple[Path, dict[str, str]]:
    """The folder `out` and the other words. Raises ConfigError for a key that is not known."""
    others, chosen = split_words(words, ("out",), usage)
    given = dict(word.split("=", 1) for word in others)
    unknown = sorted(given.keys() - {*known})
    require(not unknown, f"{', '.join(unknown)} is no key of this command; {usage}")
    return Path(chosen["out"]), given


def merge_rounded(run_dir: Path, words: list[str]) -> str:
    """Write the policy of a run, base and adapter rounded together; returns what that costs, which it measures."""
    out, given = words_of_run(words, {"quant", "checkpoint", "questions", "samples"}, ROUNDED)
    for key in ("questions", "samples"):
        whole = key not in given or (given[key].isdecimal() and int(given[key]) > 0)
        require(whole, f"{key} must be a whole number of at least 1, got {given.get(key)}")
    check_new_folder(out)
    stored = stored_config(run_dir)
    checkpoint = chosen_checkpoint(run_dir, given.get("checkpoint", "last"), stored.steps)
    check_checkpoint(checkpoint)
    experiment = rounded_experiment(stored, given["quant"])
    merged_into = experiment.sampled.quant
    with hidden_packages():
        from qerl_bench.model_setup import base_checkpoint, build_policy
        from qerl_bench.probe.merging_cost import in_words, merging_cost
        from qerl_bench.quant.export import config_entry, export
        from qerl_bench.session import prepare_device

    config_entry(merged_into, [], "bfloat16")  # refuses formats that pack nothing, before any work
    device = prepare_device(experiment.device, merged_into)
    base = base_checkpoint(experiment.model, experiment.task, experiment.root)
    policy = build_policy(experiment, base, device)
    policy.load(checkpoint)
    questions = given.get("questions", getattr(experiment.eval, "questions", None))
    samples = int(given.get("samples", 1))
    cost = merging_cost(experiment, policy, None if questions is None else int(questions), samples)
    assert policy.merging is not None
    for path, layer in policy.merging.layers().items():
        policy.model.set_submodule(path, layer)
    export(policy.model, policy.tokenizer, merged_into, out)
    told = {"run": str(run_dir.resolve()), "checkpoint": checkpoint.name, "quant": merged_into.name}
    (out / "merging.json").write_text(json.dumps(told | cost, indent=1) + "\n")
    return f"{in_words(cost)}\n{out}: {run_dir.name}, {checkpoint.name}, as {merged_into.name}"


def rounded_experiment(stored: DictConfig, quant: str) -> Experiment:
    """The experiment of a run whose base and adapter are rounded together, to `quant`."""
    require(quant != "bf16", "a merged policy in 16 bits is what export writes without quant: leave quant=bf16 out")
    cfg = without_training(stored)
    cfg.engine = load_option(user_options.folders(), "engine", "hf")
    cfg.rollout.update({"quant": quant, "activations": None, "merge": True, "temperature": 1.0})
    cfg.train.merge = "ste"  # in the policy itself
    if "dropout" in cfg.lora:
        cfg.lora.dropout = 0.0  # of training alone
    return build(cfg)
