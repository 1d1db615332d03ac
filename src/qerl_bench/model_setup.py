"""Builds the policy of an experiment: warm start, packing, adapter, noise and kernels.

The modules it puts together (`model/`, `lora/`, `aqn/`) take specs and know nothing of an experiment.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from qerl_bench.aqn.format_error import packing_errors
from qerl_bench.aqn.injector import NoiseInjector
from qerl_bench.aqn.norm_errors import NormErrors
from qerl_bench.config import build, compose
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model.adapters import adapted_layers
from qerl_bench.model.base import Model, require_writable, source_of
from qerl_bench.model.hub import HubModel
from qerl_bench.model.kernels import require_compiler
from qerl_bench.model.keys_values import round_keys_values
from qerl_bench.model.load import load_packed
from qerl_bench.model.merging import merging_of
from qerl_bench.model.other_base import share_all_but_base
from qerl_bench.model.policy import Policy
from qerl_bench.model.recompute import keep_matmuls, recompute_blocks
from qerl_bench.model.structure import NormSite, Structure, structure_of
from qerl_bench.quant.activations import round_inputs
from qerl_bench.quant.error_decomposition import LayerReport
from qerl_bench.quant.kv_kinds import kinds_of
from qerl_bench.quant.packed_share import routers
from qerl_bench.task.base import Task
from qerl_core.checks import ConfigError, TrainingStopped, naming, require
from qerl_core.options.user_options import words_in_use
from qerl_core.process.children import Child, wait
from qerl_core.process.installation import run_command
from qerl_core.process.out_of_memory import shortage
from qerl_core.rundir.checkpoints import check_checkpoint, is_finished, last_checkpoint
from qerl_core.rundir.locks import wait_for_lock
from qerl_core.rundir.refusals import CODE as REFUSED
from qerl_core.rundir.stops import note_at_stop, stop_line
from qerl_core.seeding import derive

log = logging.getLogger(__name__)


def base_checkpoint(model: Model, task: Task, root: str, start: Callable[[list[str]], Child] = Child) -> Path | None:
    """The checkpoint folder of the model's warm start, made now if the cache lacks it; None if the model needs none.

    The warm start is an ordinary supervised run in `root`/cache/runs under its own fingerprint, shared by all runs and
    made by a process that `start` starts. If several processes need it at the same time, one of them makes it while the
    others wait. Of a GGUF file it is the folder in `root`/cache/gguf that the file is converted to.
    """
    if isinstance(model, HubModel) and model.gguf is not None:
        return model.converted(Path(root) / "cache" / "gguf")
    overrides = model.warm_start_overrides()
    if overrides is None:
        return None
    overrides = [*words_in_use(), *overrides, *task.warm_start_overrides(), f"root={Path(root) / 'cache'}"]
    warm_start = build(compose(overrides))
    run_dir = warm_start.run_dir
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(run_dir.parent / f".{run_dir.name}.lock", f"the warm start of model={model.name}"):
        if is_finished(run_dir) and (damage := base_damage(run_dir)):
            aside = run_dir.with_name(f"{run_dir.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
            run_dir.rename(aside)
            log.warning(
                "the warm start of model=%s is damaged and made again: %s. Moved to %s", model.name, damage, aside
            )
        if not is_finished(run_dir):
            told = "warm start of model=%s: %d steps, done once, then kept in %s; each line says how long it will take"
            log.info(told, model.name, warm_start.steps, run_dir)
            with note_at_stop(partial(stop_line, run_dir, f"the warm start of model={model.name}")):
                code = wait(start([*run_command(), *overrides]))
            require(code != REFUSED, f"the warm start of model={model.name} was refused, for the reason above")
            if code != 0:
                raise TrainingStopped(f"the warm start of model={model.name} ended with code {code}: {run_dir}/run.log")
    checkpoint = last_checkpoint(run_dir)
    assert checkpoint is not None, f"{run_dir} is finished but has no checkpoint"
    return checkpoint / "model"


def base_damage(run_dir: Path) -> str | None:
    """What is wrong with the weights that a finished warm start made; None if they have their checksums."""
    checkpoint = last_checkpoint(run_dir)
    if checkpoint is None:
        return f"{run_dir} has no checkpoint"
    try:
        check_checkpoint(checkpoint)
    except ConfigError as error:
        return str(error).partition(". ")[0]
    return None


def build_policy(experiment: Experiment, base: Path | None, device: str, like: Policy | None = None) -> Policy:
    """Load the base model, pack it in the run's format, and attach a fresh adapter and the run's noise.

    `base` is the checkpoint folder of the warm start, if there was one. A policy `like` another of the same base has
    only packed layers of its own: what is trained, norms with their noise, embeddings and head are the other's.
    Raises ConfigError, which names the model, if its files cannot be read, or what they hold cannot be trained.
    """
    with naming(source_of(experiment.model)):
        spec, train = experiment.model, experiment.train
        require_compiler(experiment.kernel, torch.device(device))
        loaded = load_packed(spec, experiment.quant, experiment.quantizer, experiment.task, base, device)
        model, tokenizer, layers = loaded.model, loaded.tokenizer, loaded.layers
        model.eval()
        with _first_pass(f"model={spec.name}", experiment.quant.name):
            structure = structure_of(model)
        rounding = round_inputs(model, experiment.quant.activations, f"model={spec.name}")
        recompute_blocks(model, train.recompute)
        if experiment.lora.name == "none":
            require_writable(f"model={spec.name}", *filter(None, (model.config, model.generation_config, tokenizer)))
        adapter = experiment.lora.attach(model, f"model={spec.name}", derive(experiment.seed, "adapter"))
        if like is not None:
            share_all_but_base(model, like, loaded.rescaling.from_other(like.rescaling))
        merging = None
        if (merged := experiment.merged_into) is not None:
            trained = None if like is None else like.model
            merging = merging_of(model, merged, experiment.quantizer, f"model={spec.name} as {merged.name}", trained)
        policy = Policy(
            model,
            tokenizer,
            layers,
            structure,
            build_noise(experiment, model, structure, layers) if like is None else like.noise,
            adapter,
            kernel="modules" if experiment.parallel.shard and experiment.kernel == "auto" else experiment.kernel,
            packing=train.packing,
            train_norms=experiment.lora.train_norms and like is None,
            template=spec.template,
            rounding=rounding,
            merging=merging,
        )
        policy.rescaling, policy.calibration = loaded.rescaling, loaded.calibration
        policy.kv = round_keys_values(model, kinds_of(experiment), policy.device)
        policy.kv.fused = policy.fused
        if rounding is not None:
            rounding.fused, rounding.gradients = policy.fused, train.gradients == "fp8"
        if like is not None:
            policy.base_scales = like.base_scales
        if train.recompute == "selective":
            keep_matmuls(model)
        return policy


@contextmanager
def _first_pass(name: str, quant: str) -> Iterator[None]:
    """Turns an exception of a third-party model in its first forward pass into a ConfigError."""
    try:
        yield
    except (TypeError, AttributeError, RuntimeError, LookupError, ValueError) as error:
        if isinstance(error, ConfigError) or shortage(error) or "CUDA" in str(error):
            raise
        packed = "Some models read the weight of a layer without calling it, which only quant=bf16 allows; otherwise "
        plain = "A key of its config.json may ask for what its class cannot do: correct it, or "
        raise ConfigError(
            f"{name} fails at its first text with its weights in quant={quant}: {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}. {plain if quant == 'bf16' else packed}choose another model"
        ) from error


def build_noise(
    experiment: Experiment, model: PreTrainedModel, structure: Structure, layers: Mapping[str, LayerReport]
) -> NoiseInjector:
    """The noise of the run for `model`, whose layers were packed with the errors in `layers`.

    Raises ConfigError if the model has no norm that the noise should go to.
    """
    noise, schedule = experiment.noise, experiment.aqn
    sites = [site for site in structure.sites if noise.routers or not site.routers]
    if schedule.name != "none" and noise.where == "norms" and noise.norms != "missed":
        name = type(model).__name__
        require(
            len(structure.sites) > 0,
            f"aqn={schedule.name} puts noise on the norms whose output is the input of linear layers, and the blocks "
            f"of {name} have none. Use noise.where=adapters, or aqn=none",
        )
        require(
            len(sites) > 0,
            f"noise.routers=false leaves out the norms that feed a router, and the blocks of {name} have no other. Use "
            "noise.routers=true, or aqn=none",
        )
        require(
            noise.norms != "blocks_final" or structure.final is not None,
            f"noise.norms=blocks_final puts noise on the scale of the norm before the head, and {name} has none. Use "
            "noise.norms=blocks",
        )
    if schedule.error_format is None:
        errors = {name: report.relative_error for name, report in layers.items()}
    else:
        errors = packing_errors(model, layers, schedule.error_format)
    final = None if structure.final is None else structure.final.name
    unpacked = routers(model)
    consumers = {site.name: _packable(site, unpacked, errors) for site in sites}
    controller = schedule.controller(NormErrors(consumers, final, errors), experiment.steps)
    if noise.norms == "missed":
        sites = []
    elif noise.norms == "blocks_final" and structure.final is not None:
        sites.append(structure.final)
    norms = {site.name: model.get_submodule(site.name) for site in sites}
    offsets = {site.name: site.offset for site in sites}
    return NoiseInjector(noise, controller, norms, offsets, final, experiment.seed, adapted_layers(model))


def _packable(site: NormSite, unpacked: Set[str], errors: Mapping[str, float]) -> list[str]:
    """The layers that read `site`, without routers and other `unpacked` ones, by their names in `errors`."""
    layers = [layer for layer in site.consumers if layer not in unpacked and layer not in site.routers]
    experts = {layer: [f"{layer}.{first}" for first in ("gate_up_proj", "up_proj")] for layer in layers}
    return [next((name for name in experts[layer] if name in errors), layer) for layer in layers]
