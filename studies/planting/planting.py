"""Checks the error rates of the verdicts: runs with planted effects go through all of the
evaluation.

    python studies/planting/planting.py --out studies/planting/results

The nine training claims get the same true effect, in margins of each claim: 0, one half, one
and two, in the direction claimed, and two against it. Every replication makes runs with curves,
accuracies by question, seeds and bases, and passes them to `evaluate_claims`. The table has the
share of false verdicts over claims, the share of replications with any false verdict (both
should stay below 5 % for each kind of error), and the share of claims for which each word was
found.

The spread is like that of the built-in model and task: the difference of two arms has a
standard deviation of one margin over the seeds of a base, and the true effects of bases have
one of half a margin.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from qerl_core.exits import guarded
from qerl_core.seeding import derive
from qerl_studies.claims.claim import Claim
from qerl_studies.claims.evaluate import evaluate_claims
from qerl_studies.claims.registry import QERL, claims_of
from qerl_studies.runs.load import Run
from qerl_studies.tables.markdown import markdown_table

EFFECTS = (0.0, 0.5, 1.0, 2.0, -2.0)  # margins, above zero as claimed
DESIGNS = ((1, 8), (8, 2), (16, 2))  # bases, seeds of each
WITHIN, BETWEEN = 1.0, 0.5  # standard deviations of the difference of two arms, in margins
MARGINS = {"entropy": float(np.log(1.02)), "area": 0.02, "late": 0.02, "accuracy": 0.01}
ENTROPY_SHIFT = 5.0  # of noise, in margins of entropy: it passes its manipulation check
STEPS, POINTS = 40, 20  # of a run, and how many of them are recorded
QUESTIONS, SAMPLES = 128, 32
TABLE = "planting.csv"
WORDS = ("supported", "negligible", "reversed")
# Controls of exploration are no more simulated than other gates; nor is full training, claim 13.
TRAINING = tuple(replace(claim, explores=False) for claim in claims_of(QERL) if claim.number < 10)


@dataclass(frozen=True)
class PlantedArm:
    """The config of an arm, and its true distances from BF16 without noise, in margins."""

    config: dict[str, Any]
    entropy: float = 0.0  # at every step
    area: float = 0.0  # of reward, at every step
    late: float = 0.0  # of reward, over the last fifth of the steps
    accuracy: float = 0.0


def planted_arms(effect: float) -> list[PlantedArm]:
    """The arms of every primary contrast of the training claims, each with a true effect of `effect` margins."""
    e = effect
    nvfp4 = {"entropy": e, "area": e, "accuracy": e}
    arms = [PlantedArm(_config("bf16")), PlantedArm(_config("nvfp4"), **nvfp4)]
    arms += [PlantedArm(_config("mxfp4"), entropy=e), PlantedArm(_config("nf4"), entropy=e)]
    for aqn in ("exp", "linear", "cosine", "log"):
        noisy = {"entropy": e + ENTROPY_SHIFT, "accuracy": 2 * e, "late": e if aqn == "exp" else 0.0}
        arms.append(PlantedArm(_config("nvfp4", aqn=aqn), **noisy))
    arms += [PlantedArm(_config("nvfp4", rank=rank), area=2 * e) for rank in (16, 64)]
    arms += [PlantedArm(_config("bf16", lr=9e-4)), PlantedArm(_config("nvfp4", lr=9e-4), late=e)]
    arms += [PlantedArm(_config("bf16", algo="sft"))]
    arms += [PlantedArm(_config(quant, algo="sft"), accuracy=-e) for quant in ("nvfp4", "nf4")]
    return arms


def planted_runs(effect: float, bases: int, seeds: int, generator: np.random.Generator) -> list[Run]:
    """One replication: a run of every arm, base and seed. What a seed does to all arms cancels in their differences."""
    easiness = generator.beta(3.0, 1.5, size=QUESTIONS)
    arms, runs = planted_arms(effect), []
    for base in range(bases):
        shared = generator.normal(size=(seeds, len(MARGINS)))
        for arm in arms:
            of_arm = generator.normal(size=len(MARGINS)) * (BETWEEN if bases > 1 else 0.0) / 2**0.5
            for seed in range(seeds):
                noise = shared[seed] + of_arm + generator.normal(size=len(MARGINS)) * WITHIN / 2**0.5
                shifts = {
                    name: margin * (getattr(arm, name) + noise[place])
                    for place, (name, margin) in enumerate(MARGINS.items())
                }
                runs.append(_run(arm.config, base, seed, shifts, easiness, generator))
    return runs


def false_verdict(claim: Claim, verdict: str, effect: float) -> str:
    """The word of a verdict that is false for the planted effect, in margins; empty if there is none."""
    words = verdict.split(" but ")
    if claim.expected == "same":
        true = {"supported": abs(effect) < 1.0, "reversed": abs(effect) > 1.0}
    else:
        true = {"supported": effect > 0.0, "reversed": effect < 0.0, "negligible": abs(effect) < 1.0}
    return next((word for word in words if not true.get(word, True)), "")


def replicate(effect: float, bases: int, seeds: int, count: int, seed: int) -> list[dict[str, Any]]:
    """The verdicts of `count` replications: a row for each claim in each of them."""
    rows = []
    for number in range(count):
        generator = np.random.default_rng(derive(seed, "planting", f"{effect:g}", bases, seeds, number))
        for result in evaluate_claims(TRAINING, planted_runs(effect, bases, seeds, generator)):
            claim, verdict = result.claim, result.verdict
            row = {"effect": effect, "bases": bases, "seeds": seeds, "replication": number, "claim": claim.title}
            rows.append(row | {"verdict": verdict, "false": false_verdict(claim, verdict, effect)})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """For each planted effect and design, the shares of each word and of false verdicts."""
    same = {claim.title for claim in TRAINING if claim.expected == "same"}
    cells: dict[tuple[float, int, int], list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["effect"], row["bases"], row["seeds"]), []).append(row)
    lines = []
    for (effect, bases, seeds), cell in cells.items():
        words = [row["verdict"].split(" but ") for row in cell if row["claim"] not in same]
        studies = {row["replication"] for row in cell}
        line: dict[str, Any] = {"effect": effect, "bases": bases, "seeds": seeds, "replications": len(studies)}
        line |= {word: fmean(word in verdict for verdict in words) for word in WORDS}
        line |= {f"false {word}": fmean(row["false"] == word for row in cell) for word in WORDS}
        lines.append(line | {"any false": len({row["replication"] for row in cell if row["false"]}) / len(studies)})
    return pd.DataFrame(lines)


def markdown(shares_table: pd.DataFrame) -> str:
    """The table of docs/claims.md."""
    shares = [name for name in shares_table.columns if name not in ("effect", "bases", "seeds", "replications")]
    header = ["true effect", "bases x seeds", *shares]
    lines = [
        [
            f"{row['effect']:g} margins",
            f"{row['bases']:.0f} x {row['seeds']:.0f}",
            *(f"{100 * row[name]:.1f} %" for name in shares),
        ]
        for row in shares_table.to_dict("records")
    ]
    return markdown_table(header, lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--replications", type=int, default=200, help="of each planted effect and design (default: 200)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for planting.csv and planting.md")
    options = parser.parse_args(arguments)
    cells = [(e, *design) for e, design in product(EFFECTS, DESIGNS)]
    with ProcessPoolExecutor(options.jobs) as pool:
        jobs = [pool.submit(replicate, *cell, options.replications, options.seed) for cell in cells]
        rows = [row for job in tqdm(jobs, "planted effects", disable=None) for row in job.result()]
    shares = table(rows)
    options.out.mkdir(parents=True, exist_ok=True)
    shares.to_csv(options.out / TABLE, index=False, float_format="%.5f")
    (options.out / "planting.md").write_text(markdown(shares))
    print(markdown(shares))


def _config(quant: str, aqn: str = "none", rank: int = 32, lr: float = 3e-4, algo: str = "grpo") -> dict[str, Any]:
    noise = {"name": aqn} | ({} if aqn == "none" else {"sigma_start": 1e-2})
    return {
        "quant": {"name": quant}, "quantizer": {"name": "rtn"}, "aqn": noise, "noise": {"site": "rollout"},
        "algo": {"name": algo}, "lora": {"name": "default", "rank": rank, "alpha": 32}, "optim": {"lr": lr},
        "model": {"name": "planted", "lr": 3e-4}, "task": {"name": "planted"}, "eval": {"name": "task"},
        "rollout": {"prompts_per_step": 16, "group_size": 8}, "steps": STEPS,
    }  # fmt: skip


def _run(
    config: dict[str, Any],
    base: int,
    seed: int,
    shifts: dict[str, float],
    easiness: np.ndarray,
    generator: np.random.Generator,
) -> Run:
    """A run whose curves and answers are moved by `shifts` from those of all runs."""
    name = "-".join(
        [
            "planted",
            *(str(part) for group in ("quant", "aqn", "algo", "lora", "optim") for part in config[group].values()),
            f"b{base}",
            f"s{seed}",
        ]
    )
    steps = np.linspace(STEPS // POINTS, STEPS, POINTS).astype(int)
    rise = np.sqrt(steps / STEPS)
    late = steps > STEPS - STEPS // 5
    curves = {
        "reward/mean": 0.3 + 0.5 * rise + shifts["area"] + shifts["late"] * late,
        "accuracy": 0.3 + 0.5 * rise,
        "entropy": 0.4 * np.exp(shifts["entropy"] - steps / STEPS),
    }
    metrics = pd.DataFrame(
        {
            "kind": "train",
            "step": np.tile(steps, len(curves)),
            "metric": np.repeat(list(curves), POINTS),
            "value": np.concatenate(list(curves.values())),
        }
    )
    held_out = pd.DataFrame(
        {"kind": "eval", "step": [0, STEPS], "metric": "eval/accuracy_sampled", "value": [0.4, 0.7]}
    )
    correct = generator.binomial(SAMPLES, np.clip(easiness + shifts["accuracy"], 0.0, 1.0))
    answers = pd.DataFrame(
        {"mode": "sampled", "question": np.arange(QUESTIONS), "step": STEPS, "correct": correct, "samples": SAMPLES}
    )
    return Run(
        path=Path(name),
        config=config | {"name": name, "seed": seed, "model": config["model"] | {"seed": base}},
        environment={"code": "planted", "device": "cpu"},
        finished=True,
        done={},
        metrics=pd.concat([metrics, held_out], ignore_index=True),
        kept_answers=answers,
    )


if __name__ == "__main__":
    guarded(main)
