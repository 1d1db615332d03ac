"""Write a packed model, or what a run has trained, for other programs.

    qerl-bench export model=PATH_OR_ID quant=nvfp4 out=DIR    # a base: codes
    qerl-bench export runs/NAME out=DIR                       # base and adapter, merged, in 16 bits
    qerl-bench export runs/NAME quant=nvfp4 out=DIR           # base and adapter, rounded together

A base takes the options of a run (quant.*, quantizer=..., task=... for calibration text). nf4 is written as a
bitsandbytes checkpoint, the other formats as those of compressed-tensors, which transformers and vLLM read. The folder
gets its name only when it is complete. Experts are written one linear layer after the other, under the names that
checkpoints of the model have, as llm-compressor does. Left out: experts without such layers (gpt-oss, Llama 4,
Granite), and in nf4.

A run is a finished one, checkpoint=last, best or a step, and device its own unless another is given. In 16 bits its
adapter is added to the dequantized weights that it was trained on, which are written in dtype=bfloat16, float16 or
float32 (default: that of the run's model). With `quant` both are rounded together, as rollout.merge does it, and what
that costs is measured on held-out questions (questions=, samples=), printed, and kept in merging.json: accuracy and KL
of the merged policy and of the base, beside those of the adapter apart.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import closing
from pathlib import Path

from omegaconf import DictConfig

from qerl_bench.config import build, compose
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model.base import source_of
from qerl_bench.quant.packed_config import config_entry
from qerl_core.checks import naming, one_of, require
from qerl_core.options import user_options
from qerl_core.options.fingerprint import as_dict
from qerl_core.options.names import load_option, refuse_foreign_classes
from qerl_core.process.arguments import split_words
from qerl_core.process.cards import require_gpu
from qerl_core.process.hidden_packages import hidden_packages
from qerl_core.process.installation import CONF_DIR
from qerl_core.process.terminal import log_to_stderr
from qerl_core.rundir.checkpoints import check_checkpoint
from qerl_core.rundir.durable import check_new_folder
from qerl_core.rundir.finished_run import chosen_checkpoint, own_folders, stored_config, without_training

FORMATS = "fp8|mxfp8|int8|int4|nvfp4|mxfp4|nf4"
USAGE = f"usage: qerl-bench export model=PATH_OR_ID quant={FORMATS} out=DIR [option=value ...]"
IN_16_BITS = "usage: qerl-bench export RUN_DIR out=DIR [checkpoint=... device=... dtype=bfloat16|float16|float32]"
ROUNDED = f"usage: qerl-bench export RUN_DIR quant={FORMATS} out=DIR [checkpoint=... device=... questions=N samples=N]"


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
        log_to_stderr()
        run_dir, words = Path(words[0]), words[1:]
        rounded = any(word.startswith("quant=") for word in words)
        print((merge_rounded if rounded else merge)(run_dir, words))
    else:
        pack(words)


def pack(words: list[str]) -> None:
    overrides, out = parse_words(words)
    experiment = build(compose(overrides))
    check_new_folder(out)
    config_entry(experiment.quant, [], "bfloat16")  # refuses formats that pack nothing
    require_gpu(experiment.device)
    experiment.model.check_files()
    experiment.check_calibration()
    with hidden_packages():
        from qerl_bench.model.load import load_packed
        from qerl_bench.model_setup import base_checkpoint
        from qerl_bench.quant.error_decomposition import write_layers
        from qerl_bench.quant.export import export
        from qerl_core.process.device import resolve_device

    base = base_checkpoint(experiment.model, experiment.task, experiment.root)
    device, quantizer = resolve_device(experiment.device), experiment.quantizer
    with naming(source_of(experiment.model)):
        model, tokenizer, layers, *_ = load_packed(
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
    out, given, cfg, checkpoint = asked_of(run_dir, words, {"dtype"}, IN_16_BITS)
    trained_in = cfg.rollout.quant or cfg.quant.name
    require(
        cfg.train.get("merge", "none") == "none",
        f"{run_dir.name} was trained with base and adapter rounded together, so it is that in no other way: "
        f"quant={trained_in}",
    )
    dtype = given.get("dtype") or str(cfg.model.dtype)
    one_of("bfloat16", "float16", "float32")("dtype", dtype)
    experiment = build(cfg)
    require_gpu(experiment.device)
    with hidden_packages():
        import torch

        from qerl_bench.model.merged_checkpoint import export_merged
        from qerl_bench.model_setup import base_checkpoint, build_policy
        from qerl_bench.run_setup import prepare_device

    base = base_checkpoint(experiment.model, experiment.task, experiment.root)
    policy = build_policy(experiment, base, prepare_device(experiment.device, experiment.quant))
    policy.load(checkpoint)
    share = export_merged(policy, getattr(torch, dtype), out)
    return (
        f"{out}: {run_dir.name}, {checkpoint.name}, in {dtype}, whose rounding is {share:.2g} of the adapter's update"
    )


def asked_of(
    run_dir: Path, words: list[str], known: Collection[str], usage: str
) -> tuple[Path, dict[str, str], DictConfig, Path]:
    """The folder `out`, the other words, the config of a finished run, on another device if they say so, and the
    checkpoint to export.

    Raises ConfigError for a key that is not known, a folder that is none, or not new, and a missing checkpoint.
    """
    others, chosen = split_words(user_options.split_search_path(words)[1], ("out",), usage)
    given = dict(word.split("=", 1) for word in others)
    unknown = sorted(given.keys() - {*known, "checkpoint", "device"})
    require(not unknown, f"{', '.join(unknown)} is no key of this command; {usage}")
    require(len(given) == len(others), f"{' '.join(others)}: a key is given twice; {usage}")
    out = Path(chosen["out"])
    check_new_folder(out)
    cfg = stored_config(run_dir)
    refuse_foreign_classes(as_dict(cfg), "", user_options.folders(), own_folders(run_dir))
    cfg.device = given.get("device", cfg.device)
    checkpoint = chosen_checkpoint(run_dir, given.get("checkpoint", "last"), cfg.steps)
    check_checkpoint(checkpoint)
    return out, given, cfg, checkpoint


def merge_rounded(run_dir: Path, words: list[str]) -> str:
    """Write the policy of a run, base and adapter rounded together; returns what that costs, which it measures."""
    out, given, stored, checkpoint = asked_of(run_dir, words, {"quant", "questions", "samples"}, ROUNDED)
    for key in ("questions", "samples"):
        whole = key not in given or (given[key].isdecimal() and int(given[key]) > 0)
        require(whole, f"{key} must be a whole number of at least 1, got {given.get(key)}")
    experiment = rounded_experiment(stored, given["quant"])
    merged_into = experiment.sampled.quant
    config_entry(merged_into, [], "bfloat16")  # refuses formats that pack nothing
    require_gpu(experiment.device)
    with hidden_packages():
        from qerl_bench.model_setup import base_checkpoint, build_policy
        from qerl_bench.probe.merging_cost import cost_table, merging_cost
        from qerl_bench.quant.export import export
        from qerl_bench.run_setup import prepare_device

    device = prepare_device(experiment.device, merged_into)
    base = base_checkpoint(experiment.model, experiment.task, experiment.root)
    policy = build_policy(experiment, base, device)
    policy.load(checkpoint)
    questions = given.get("questions", getattr(experiment.eval, "questions", None))
    samples = int(given.get("samples", 1))
    asked = None if questions is None else int(questions)
    with closing(experiment.engine.build(policy)) as engine:
        cost = merging_cost(experiment.task, experiment.train, policy, engine, asked, samples)
    assert policy.merging is not None
    for path, layer in policy.merging.layers().items():
        policy.model.set_submodule(path, layer)
    export(policy.model, policy.tokenizer, merged_into, out)
    told = {"run": str(run_dir.resolve()), "checkpoint": checkpoint.name, "quant": merged_into.name}
    (out / "merging.json").write_text(json.dumps(told | cost, indent=1) + "\n")
    return f"{cost_table(cost)}\n{out}: {run_dir.name}, {checkpoint.name}, as {merged_into.name}"


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
