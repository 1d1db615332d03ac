"""What a training run and a later evaluation of it set up alike: device, policy and engine, on any base."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from transformers.utils import logging as transformers_logging

from qerl_bench.engine.base import EngineSpec, RolloutEngine, innermost
from qerl_bench.engine.kv_check import kv_check
from qerl_bench.engine.reference_generation import refusing_model_errors
from qerl_bench.engine.sampled_check import sampled_check
from qerl_bench.engine.shared import SharedEngine
from qerl_bench.eval.inputs import inputs_of
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model.check_cache import key_of, passed_before, recall, remember
from qerl_bench.model.digest import digest_of, name_of_base
from qerl_bench.model.gguf.convert import record_of, rounding_notice
from qerl_bench.model.hub import HubModel
from qerl_bench.model.policy import Policy
from qerl_bench.model.preflight import preflight
from qerl_bench.model.reference_model import Origin
from qerl_bench.model.rounded import unrounded
from qerl_bench.model.sharding import shard
from qerl_bench.model_setup import base_checkpoint, build_policy
from qerl_bench.parallel import ALONE, Ranks, World
from qerl_bench.quant.base import WeightFormat
from qerl_bench.train.data_parallel import require_equal_inputs, require_equal_weights
from qerl_bench.train.trainer_state import TrainerState
from qerl_core.checks import require
from qerl_core.file_state import file_states, require_unchanged
from qerl_core.process.device import device_name, multiplies_bf16, resolve_device
from qerl_core.process.gpu_share import keep_to_share
from qerl_core.process.out_of_memory import memory_for
from qerl_core.process.progress import phase
from qerl_core.rundir.run_dir import RunDir
from qerl_core.seeding import derive

log = logging.getLogger(__name__)
# What preflight.json has of the comparisons with the untouched model.
COMPARED = (
    *("logprob_gap_float32", "logprob_gap_tokens", "logprob_gap_tokens_plain"),
    *("sampled_blocks", "sampled_gap_float32", "sampled_gap"),
)


class Setup(NamedTuple):
    """What all of a run, or of a later evaluation, happens with."""

    experiment: Experiment
    policy: Policy
    engine: RolloutEngine  # samples from the policy
    run: RunDir
    state: TrainerState
    world: World = ALONE


def prepare_device(wanted: str, quant: WeightFormat) -> str:
    """The device to run on: a CPU made deterministic, or the share of a GPU (`process/gpu_share.py`).

    Raises ConfigError if `quant` cannot run there.
    """
    device = resolve_device(wanted)
    reason = quant.unsupported_reason(device)
    require(reason is None, f"quant={quant.name} cannot run here: {reason}")
    if device == "cpu":
        torch.use_deterministic_algorithms(True)
    else:
        keep_to_share()
    return device


def require_places(experiment: Experiment, world: World, trains: bool = True) -> None:
    """Raise ConfigError unless every rank of `world` has work, and a device like those of the others."""
    if world.size == 1:
        return
    key, prompts = "rollout.prompts_per_step", experiment.rollout.prompts_per_step
    if not trains:
        key, asked = "eval.questions", getattr(experiment.eval, "questions", None)
        prompts = len(experiment.task.eval_prompts(asked))
    require(
        prompts >= world.size,
        f"torchrun has started {world.size} processes, and {key} has {prompts} prompts to share out: use torchrun "
        f"--nproc-per-node {prompts} at most, or more prompts",
    )
    devices = getattr(experiment.engine, "tensor_parallel_size", 1)
    require(
        devices == 1,
        f"engine.tensor_parallel_size={devices} needs {devices} GPUs for each vLLM, and each of the {world.size} "
        "processes of torchrun has one: use engine.tensor_parallel_size=1, or leave torchrun out",
    )
    names = world.gather(device_name(experiment.device))
    exact, measured = trains and experiment.parallel.exact, experiment.train.micro_batch_tokens is None
    require(
        not (exact and measured and "cpu" not in names),
        "parallel.exact=true needs the micro-batches of a run on one GPU, and train.micro_batch_tokens=null makes them "
        "fit the memory that is free: give a number, the same in both runs",
    )
    cut = trains and experiment.parallel.shard and experiment.lora.rank == 0
    require(
        not (cut and measured and "cpu" not in names),
        "parallel.shard=true with lora=none needs all processes for each pass, and train.micro_batch_tokens=null would "
        "measure passes of one: give a number, at least the tokens of the longest prompt and completion",
    )
    listed = ", ".join(f"process {rank} has {name}" for rank, name in enumerate(names))
    require(
        len({*names}) == 1,
        f"torchrun has started {world.size} processes, and each needs a GPU of its own, equal to the others: {listed}. "
        "Start as many as there are equal GPUs, torchrun --nproc-per-node N, or use device=cpu",
    )


@contextmanager
def set_up(
    experiment: Experiment, engine: EngineSpec, run: RunDir, device: str, world: World = ALONE, trains: bool = True
) -> Iterator[Setup]:
    """The untrained policy of `experiment` and an engine that samples from it, with all ranks of `world`.

    Writes env.json, with the inputs of a run that `trains`, and preflight.json. Raises ConfigError if the policy fails
    a check of `model/preflight.py`.
    """
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # on a pipe lines tell what goes on
    base = base_checkpoint(experiment.model, experiment.task, experiment.root)
    folder, text = base or experiment.model.folder(), getattr(experiment.quantizer.calibration, "file", None)
    files = file_states(Path(path) for path in (folder, text) if path is not None)
    with phase("digest of the base weights"):
        digest = digest_of(experiment.model, base)
    origin = record_of(base)
    inputs = inputs_of(experiment, folder, origin) if trains else {}
    given = {f"the option {name}": repr(value) for name, value in vars(experiment).items() if name != "root"}
    require_equal_inputs(given | inputs | {"the base weights": str(digest)}, world)
    recorded = inputs if trains and world.first else None
    run.write_environment(device, digest, experiment.model.remote_code(), world.size, origin, recorded)
    if origin is not None and (rounded := rounding_notice(origin)):
        log.info(rounded)
    if device == "cpu" and experiment.model.dtype == "bfloat16" and multiplies_bf16() is False:
        log.warning(
            "this processor has no instructions for BF16, so model.dtype=bfloat16 may take several times as long as "
            "model.dtype=float32 does here"
        )
    torch.manual_seed(derive(experiment.seed, "torch"))  # for adapter dropout; every other draw has a seed of its own
    with ExitStack() as around:
        with memory_for("setup"):
            with phase(f"loading {experiment.model.name}"):
                policy = build_policy(experiment, base, device)
                require_unchanged(files)  # since their digests were recorded
            if policy.calibration is not None:
                run.write("calibration.json", json.dumps(policy.calibration, indent=1))
            policy.name_base(name_of_base(experiment.model), digest, folder)
            where, state = f"model={experiment.model.name}", TrainerState()
            policy.is_sharded = experiment.parallel.shard and isinstance(world, Ranks)
            built = around.enter_context(checked_engine(experiment, engine, policy, state, base, where, run))
        if policy.merging is not None:
            policy.merging.on = experiment.train.merge != "none"  # of what is checked, base and adapter are apart
        if policy.is_sharded and isinstance(world, Ranks):
            require_equal_weights(policy.model, world)
            with memory_for("setup"):
                shard(policy, where, world)
        shared = SharedEngine(built, world, experiment.parallel.exact)
        yield Setup(experiment, policy, built if world.size == 1 and not shared.exact else shared, run, state, world)


@contextmanager
def checked_engine(
    experiment: Experiment,
    engine: EngineSpec,
    policy: Policy,
    state: TrainerState,
    base: Path | None,
    where: str,
    run: RunDir | None = None,
) -> Iterator[RolloutEngine]:
    """An engine that samples from `policy`, which is untrained or without its adapter, after all checks of both.

    In the block it is open, and has joined `state`. Raises ConfigError, which names the model `where`, if a check
    fails. Writes preflight.json in `run`. The comparisons with the untouched model are those that were passed before,
    if nothing has changed since.
    """
    model = experiment.model
    folder = base if isinstance(model, HubModel) and base is not None else model.folder()
    options = {
        "model": model.config(),
        "quant": experiment.quant,
        "dtype": model.dtype,
        "kernel": experiment.kernel,
        "packing": experiment.train.packing,
        "recompute": experiment.train.recompute,
        "lora": experiment.lora,
        "engine": engine,
        "merged_into": experiment.merged_into,  # which keeps passes from being recorded
        "kv": policy.kv.kinds,  # the same
    }
    device = policy.device.type
    key = key_of(policy.digest, folder, model.remote_code(), experiment.quantizer, options, device)
    known = recall(key, passed_before())
    with (
        phase("comparing the trainer with plain transformers"),
        refusing_model_errors(f"the trainer cannot compute {where}", remedy="model.dtype=float32, or another model"),
    ):
        checked = kv_check(policy, where)
        checked |= preflight(policy, experiment.quant, where, known)
    with phase("preparing the engine"):
        built = engine.build(policy)
    with closing(built), state.joined_by(innermost(built)):
        if known is None:
            source = Origin(folder, model.trust_remote_code, experiment.quantizer.rescales)
            with phase("comparing the engine with plain transformers"), unrounded(policy):
                checked |= sampled_check(policy, built, source, where)
            passed = {name: value for name, value in checked.items() if name in COMPARED}
            if "sampled_gap" in passed or "sampled_gap_float32" in passed:
                remember(key, passed, passed_before())
        else:
            log.info("preflight: compared with the untouched model before, with equal weights, options, code and card")
        if run is not None:
            run.write("preflight.json", json.dumps(checked | {"remembered": known is not None}, indent=1))
        yield built


@contextmanager
def on_base_of(
    other: Experiment,
    key: str,
    experiment: Experiment,
    policy: Policy,
    engine: RolloutEngine,
    state: TrainerState | None = None,
) -> Iterator[tuple[Policy, RolloutEngine]]:
    """The policy of `experiment` on the base of `other`, its `answering` or `sampled`, and an engine for that.

    They are `policy` and `engine` if the two are the same. Otherwise packed layers are made for as long as the context
    lasts, and everything else is that of `policy`, as it is at each moment, but for what a quantizer rescales
    (`model/other_base.py`). The engine joins `state`, that of the run, if there is one. Raises
    ConfigError, which names `key`, if a check of `model/preflight.py` fails.
    """
    if other is experiment:
        yield policy, engine
        return
    device = policy.device.type
    reason = other.quant.unsupported_reason(device)
    require(reason is None, f"{key}={other.quant.name} cannot run here: {reason}")
    base = base_checkpoint(experiment.model, experiment.task, experiment.root)
    devices = [policy.device] if device == "cuda" else []
    made = f"{other.quant.name}, {other.quantizer.name}"
    with phase(f"packing {experiment.model.name} in {made}"), torch.random.fork_rng(devices):
        copy = build_policy(other, base, device, policy)
    copy.digest, copy.folder = policy.digest, policy.folder
    where = f"model={experiment.model.name} with {key}={other.quant.name}"
    with ExitStack() as around:
        with copy.without_adapter():  # the checks are of the base
            checked = checked_engine(other, experiment.engine, copy, state or TrainerState(), base, where)
            built = around.enter_context(checked)
        shared = isinstance(engine, SharedEngine)
        yield copy, SharedEngine(built, engine.world, engine.exact) if shared else built
