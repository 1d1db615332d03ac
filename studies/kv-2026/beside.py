"""What stands beside the verdicts: the dose of each arm, and its difference from 16 bits before, during and after
training. Nothing here is corrected for number.

    python studies/kv-2026/beside.py     # results/beside.md, from the committed data
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean

from qerl_core.exits import guarded
from qerl_core.process.arguments import KeyValueParser
from qerl_core.statistics import Estimate
from qerl_studies.claims.measures import MEASURES
from qerl_studies.claims.preconditions import diverged
from qerl_studies.effects.estimate import effect_of
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import RunMetric, first_step, held_out, last_fifth_mean, mean_between
from qerl_studies.tables.markdown import markdown_table

HERE = Path(__file__).resolve().parent
CONTROL = "bf16"
ARMS = {  # quant, rollout.kv, rollout.quant, importance_sampling.mode
    CONTROL: ("bf16", None, None, "none"),
    "kv8-truncated": ("bf16", "fp8", None, "truncate"),
    "kv4": ("bf16", "nvfp4", None, "none"),
    "kv4-truncated": ("bf16", "nvfp4", None, "truncate"),
    "all4": ("bf16", "nvfp4", "nvfp4", "none"),
    "mxfp8": ("mxfp8", None, None, "none"),
}
PAIRS = [*((arm, CONTROL) for arm in ARMS if arm != CONTROL), ("kv4-truncated", "kv4")]
KEYS = ("quant.name", "rollout.kv", "rollout.quant", "importance_sampling.mode")
KL, LOST = "mismatch/kl", "kv/underflow_rollout"


def logarithm(number: RunMetric) -> RunMetric:
    return lambda run: math.log(number(run))


def lowest_ess(run: Run) -> float:
    """The smallest effective sample size of a step, as a share."""
    return float(run.series("train", "mismatch/ess").min())


def underflow(run: Run) -> float:
    found = run.series("train", LOST)
    return float(found.mean()) if len(found) else 0.0


DOSES: dict[str, Callable[[Run], float]] = {
    "KL, first step": first_step(KL),
    "KL, second tenth": mean_between(KL, 0.1, 0.2),
    "KL, last fifth": last_fifth_mean(KL),
    "lowest effective sample size": lowest_ess,
    "keys and values that become zero": underflow,
    "late reward": last_fifth_mean("reward/mean"),
}
EFFECTS = {  # measure, scale, digits; ratios have no scale
    "reward, first step": (first_step("reward/mean"), 1.0, 3),
    "late reward": (last_fifth_mean("reward/mean"), 1.0, 3),
    "held out, sampled, points": (held_out("sampled"), 100.0, 1),
    "held out, greedy, points": (held_out("greedy"), 100.0, 1),
    "entropy, first step": (logarithm(first_step("entropy")), None, 3),
    "entropy, last fifth": (logarithm(last_fifth_mean("entropy")), None, 3),
    "entropy, last fifth over second tenth": (logarithm(MEASURES["entropy_growth"].number), None, 3),
}


def by_arm(folder: Path) -> dict[str, dict[int, Run]]:
    """The runs of each arm by base. An arm without runs is left out."""
    found: dict[str, dict[int, Run]] = {}
    for run in (one for one in load_runs([folder]) if one.finished):
        words = tuple(run.option(key) for key in KEYS)
        (arm,) = (name for name, chosen in ARMS.items() if chosen == words)
        found.setdefault(arm, {})[run.option("model.seed")] = run
    return {arm: found[arm] for arm in ARMS if arm in found}


def shown(estimate: Estimate, scale: float | None, digits: int) -> str:
    """An effect with its interval, of a ratio as a factor."""
    if scale is None:
        return "x" + estimate.text(lambda end: f"{math.exp(end):.{digits}f}")
    return estimate.text(lambda end: f"{scale * end:+.{digits}f}")


def doses(arms: Mapping[str, Mapping[int, Run]]) -> str:
    rows = [
        [
            f"`{arm}`",
            str(len(runs)),
            *(f"{fmean(map(number, runs.values())):.2g}" for number in DOSES.values()),
            f"{sum(map(diverged, runs.values()))}",
        ]
        for arm, runs in arms.items()
    ]
    return markdown_table(["arm", "bases", *DOSES, "diverged"], rows)


def effects(arms: Mapping[str, Mapping[int, Run]]) -> str:
    rows = []
    for first, second in PAIRS:
        if first in arms:
            bases = sorted(arms[first].keys() & arms[second].keys())
            pair = [[arms[name][base] for base in bases] for name in (first, second)]
            found = [shown(effect_of(pair, number).fixed, *how) for number, *how in EFFECTS.values()]
            rows.append([f"`{first}` - `{second}`", str(len(bases)), *found])
    return markdown_table(["", "bases", *EFFECTS], rows)


def page(folder: Path) -> str:
    arms = by_arm(folder)
    return f"""# Beside the verdicts

Means over bases; of differences with 95 % (Student's t over bases, questions fixed). Of entropies they are ratios.
KL is `{KL}`, nats a token. Held-out answers are made without rounded keys and values, in the weights of training.

{doses(arms)}

{effects(arms)}
"""


def main(arguments: list[str] | None = None) -> None:
    KeyValueParser(__doc__).parse_args(arguments)
    (HERE / "results" / "beside.md").write_text(page(HERE))


if __name__ == "__main__":
    guarded(main)
