"""Builds the policy of an experiment: warm start, packing, adapter, noise and kernels.

The modules it puts together (`model/`, `lora/`, `aqn/`) take specs and know nothing of an experiment.
"""

from __future__ import annotations

import fcntl
import logging
import subprocess
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedModel

from qerl_bench.aqn.format_error import packing_errors
from qerl_bench.aqn.injector import NoiseInjector, block_norms, norms_to_perturb
from qerl_bench.aqn.norm_consumers import NormSites
from qerl_bench.config import Experiment, build, compose
from qerl_bench.installation import run_command
from qerl_bench.model.base import Model
from qerl_bench.model.load import load_packed
from qerl_bench.model.policy import Policy
from qerl_bench.quant.error_decomposition import LayerReport
from qerl_bench.rundir import is_finished, last_checkpoint
from qerl_bench.seeding import derive
from qerl_bench.task.base import Task

log = logging.getLogger(__name__)


def base_checkpoint(model: Model, task: Task, root: str) -> Path | None:
    """The checkpoint folder of the model's warm start, made now if the cache lacks it; None if the model needs none.

    The warm start is an ordinary supervised run in `root`/cache/runs under its own fingerprint, shared by all runs. If
    several processes need it at the same time, one of them makes it while the others wait.
    """
    overrides = model.warm_start_overrides()
    if overrides is None:
        return None
    overrides = [*overrides, *task.warm_start_overrides(), f"root={Path(root) / 'cache'}"]
    run_dir = build(compose(overrides)).run_dir
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with open(run_dir.parent / f".{run_dir.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_finished(run_dir):
            log.info("warm start of model=%s: done once, then kept in %s", model.name, run_dir)
            subprocess.run([*run_command(), *overrides], check=True)
    checkpoint = last_checkpoint(run_dir)
    assert checkpoint is not None, f"{run_dir} is finished but has no checkpoint"
    return checkpoint / "model"


def build_policy(experiment: Experiment, base: Path | None, device: str) -> Policy:
    """Load the base model, pack it in the run's format, and attach a fresh adapter and the run's noise.

    `base` is the checkpoint folder of the warm start, if there was one.
    """
    spec, train = experiment.model, experiment.train
    model, tokenizer, layers = load_packed(spec, experiment.quant, experiment.quantizer, experiment.task, base, device)
    model.eval()
    if train.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapter = experiment.lora.attach(model, f"model={spec.name}", derive(experiment.seed, "adapter"))
    return Policy(
        model,
        tokenizer,
        layers,
        build_noise(experiment, model, layers),
        adapter,
        kernel=experiment.kernel,
        packing=train.packing,
        train_norms=experiment.lora.train_norms,
    )


def build_noise(experiment: Experiment, model: PreTrainedModel, layers: Mapping[str, LayerReport]) -> NoiseInjector:
    """The noise of the run for `model`, whose layers were packed with the errors in `layers`."""
    blocks, schedule = model.config.num_hidden_layers, experiment.aqn
    if schedule.error_format is None:
        errors = {name: report.relative_error for name, report in layers.items()}
    else:
        errors = packing_errors(model, layers, schedule.error_format)
    controller = schedule.controller(NormSites(block_norms(model, blocks), errors), experiment.steps)
    norms = norms_to_perturb(model, blocks, experiment.noise.norms)
    return NoiseInjector(experiment.noise, controller, norms, experiment.seed)
