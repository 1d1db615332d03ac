"""What decides the dose of an arm: arms that share it are measured once, and other studies' arms are told by it."""

from __future__ import annotations

import hashlib

from qerl_bench.experiment_spec import Experiment


def dose_key(experiment: Experiment) -> str:
    """What decides the dose of an arm, in words: equal for arms that differ in the schedule alone."""
    adapter = experiment.lora if experiment.noise.where == "adapters" else None
    return repr((experiment.quant, experiment.quantizer, adapter, experiment.noise, experiment.rollout))


def dose_digest(experiment: Experiment) -> str:
    """What tells the dose of an arm from that of another study's arm with the same name."""
    return hashlib.sha256(dose_key(experiment).encode()).hexdigest()[:12]
