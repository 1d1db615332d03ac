"""Does the chain from runs to verdicts err as rarely as it says? Runs with planted effects go through all of it.

    python -m qerl_bench.results.planting --out docs/results/planting

The nine training claims are planted at once, with the same true effect in margins of each claim: 0, one half, one and
two, in the direction claimed. Every replication makes runs with curves, accuracies by question, seeds and bases, and
hands them to `judge`. The table counts how often a verdict was false, claim by claim, and how often any of the nine was
(both should stay below 5 % for each kind of error), and how often the true word was found.

The spread is that of the built-in world: within a base the difference of two arms varies over seeds by one margin, and
the true effects of bases by half a margin.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from qerl_bench.results.judge import Claim, Judgement, judge
from qerl_bench.results.load import Run
from qerl_bench.results.paper import CLAIMS, NOISY_ENTROPY
from qerl_bench.results.script import guarded

EFFECTS = (0.0, 0.5, 1.0, 2.0)  # margins
DESIGNS = ((1, 4), (1, 8), (1, 16), (8, 2), (16, 2))  # bases, seeds of each
WITHIN, BETWEEN = 1.0, 0.5  # standard deviations of a difference of two arms, in margins
STEPS = 40
QUESTIONS, SAMPLES = 128, 32
TRAINING = tuple(claim for claim in CLAIMS if not claim.measure.gpu)
TABLE = "planting.csv"


@dataclass(frozen=True)
class PlantedArm:
    """One arm: its config, and its true effects in margins on entropy, area, late reward and accuracy."""

    config: dict[str, Any]
    entropy: float = 0.0
    area: float = 0.0
    late: float = 0.0
    accuracy: float = 0.0


def planted_arms(effect: float) -> list[PlantedArm]:
    """The arms of every primary contrast of the training claims, each claim true by `effect` margins."""
    arms = [PlantedArm(_config("bf16"))]
    arms += [PlantedArm(_config("nvfp4"), entropy=effect, area=effect, accuracy=effect)]
    arms += [PlantedArm(_config("mxfp4"), entropy=effect), PlantedArm(_config("nf4"), entropy=effect)]
    arms += [
        PlantedArm(_config("nvfp4", aqn=aqn), late=effect if aqn == "exp" else 0.0, accuracy=2 * effect, entropy=3.0)
        for aqn in ("exp", "linear", "cosine", "log")
    ]
    arms += [PlantedArm(_config("nvfp4", rank=rank), area=2 * effect) for rank in (16, 64)]
    arms += [PlantedArm(_config(quant, lr=9e-4), late=effect * (quant == "nvfp4")) for quant in ("bf16", "nvfp4")]
    arms += [PlantedArm(_config(quant, algo="sft"), accuracy=-effect * (quant != "bf16")) for quant in ("bf16", "nvfp4", "nf4")]
    return arms


def planted_runs(effect: float, bases: int, seeds: int, generator: np.random.Generator) -> list[Run]:
    """One replication: a run of every arm, base and seed. What a base or a seed does to all arms alike is large."""
    size = {"entropy": np.log(1.02), "area": 0.02, "late": 0.02, "accuracy": 0.01}  # margins
    runs = []
    easy = generator.beta(3.0, 1.5, size=QUESTIONS)
    for base in range(bases):
        shared = generator.normal(size=(seeds, 4))
        for arm in planted_arms(effect):
            own_base = generator.normal(size=4) * (BETWEEN / 2**0.5 if bases > 1 else 0.0)
            for seed in range(seeds):
                noise = shared[seed] + own_base + generator.normal(size=4) * WITHIN / 2**0.5
                planted = np.array([arm.entropy, arm.area, arm.late, arm.accuracy]) + noise
                values = dict(zip(size, planted * np.array(list(size.values())), strict=True))
                runs.append(_run(arm.config, base, seed, values, easy, generator))
    return runs


def _config(quant: str, aqn: str = "none", rank: int = 32, lr: float = 3e-4, algo: str = "grpo") -> dict[str, Any]:
    noise = {"name": aqn} | ({} if aqn == "none" else {"sigma_start": 1e-2})
    return {
        "quant": {"name": quant}, "quantizer": {"name": "rtn"}, "aqn": noise, "inject": {"site": "sampler"},
        "algo": {"name": algo}, "lora": {"name": "default", "rank": rank, "alpha": 32}, "optim": {"lr": lr},
        "model": {"name": "planted", "lr": 3e-4}, "task": {"name": "planted"}, "eval": {"name": "task"},
        "rollout": {"prompts": 16, "group_size": 8}, "steps": STEPS,
    }  # fmt: skip
