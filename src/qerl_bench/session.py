"""What a training run and a later evaluation of it set up alike: device, policy, engine, and evaluation on record."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch
from transformers.utils import logging as transformers_logging

from qerl_bench.checks import require
from qerl_bench.config import Experiment
from qerl_bench.device import resolve_device
from qerl_bench.engine.base import EngineSpec, RolloutEngine
from qerl_bench.eval.base import Score
from qerl_bench.eval.record import record_evaluation
from qerl_bench.eval.validation import metrics_of_point, reduced
from qerl_bench.memory import memory_for
from qerl_bench.model.digest import digest_of, name_of_base
from qerl_bench.model.policy import Policy
from qerl_bench.model.preflight import preflight
from qerl_bench.model_setup import base_checkpoint, build_policy
from qerl_bench.progress import phase
from qerl_bench.quant.base import WeightFormat
from qerl_bench.rundir import RunDir
from qerl_bench.seeding import derive
from qerl_bench.train.nonfinite import during

log = logging.getLogger(__name__)


def prepare_device(wanted: str, quant: WeightFormat) -> str:
    """The device to run on, made deterministic if it is the CPU. Raises ConfigError if `quant` cannot run there."""
    device = resolve_device(wanted)
    reason = quant.unsupported_reason(device)
    require(reason is None, f"quant={quant.name} cannot run here: {reason}")
    if device == "cpu":
        torch.use_deterministic_algorithms(True)
    return device


@contextmanager
def session(
    experiment: Experiment, engine: EngineSpec, run: RunDir, device: str
) -> Iterator[tuple[Policy, RolloutEngine]]:
    """The untrained policy of `experiment` and an engine that samples from it.

    Writes env.json and preflight.json. Raises ConfigError if the policy fails a check of `model/preflight.py`.
    """
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # on a pipe lines tell what goes on
    base = base_checkpoint(experiment.model, experiment.task, experiment.root)
    with phase("digest of the base weights"):
        digest = digest_of(experiment.model, base)
    run.write_environment(device, digest, experiment.model.remote_code())
    torch.manual_seed(derive(experiment.seed, "torch"))  # for adapter dropout; every other draw has a seed of its own
    with memory_for("setup"):
        with phase(f"loading {experiment.model.name}"):
            policy = build_policy(experiment, base, device)
        policy.name_base(name_of_base(experiment.model), digest)
        with phase("comparing the trainer with plain transformers"):
            checked = preflight(policy, experiment.quant, f"model={experiment.model.name}")
        run.write("preflight.json", json.dumps(checked, indent=1))
        with phase("preparing the engine"):
            built = engine.build(policy)
    with closing(built) as rollout_engine:
        yield policy, rollout_engine


def evaluate(experiment: Experiment, policy: Policy, engine: RolloutEngine, run: RunDir, step: int) -> list[Score]:
    """Evaluate the policy without noise and record the scores in `run`; no scores with eval=none.

    Step 0 is the quantized base before any training.
    """
    with during(f"evaluation after step {step}"), memory_for("evaluation"), phase("evaluation"):
        evaluation = experiment.eval.evaluate(policy, engine, experiment.task, run, experiment.seed)
    if evaluation is None:
        return []
    scores = record_evaluation(run, experiment.task.name, step, evaluation)
    log.info("step %d, %d questions: %s", step, scores[0].n, ", ".join(map(str, scores)))
    return scores


def validate(experiment: Experiment, policy: Policy, engine: RolloutEngine, run: RunDir, step: int) -> dict[str, float]:
    """The point of the curve of held-out accuracy at `step`; it is on record only as these metrics."""
    with during(f"validation after step {step}"), memory_for("evaluation"), phase("validation"):
        point = reduced(experiment.eval, experiment.task)
        evaluation = point.evaluate(policy, engine, experiment.task, run, experiment.seed)
    return metrics_of_point(evaluation.samples)
