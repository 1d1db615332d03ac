"""How many bases and seeds would decide a claim, and what they cost: from the spread of runs that there are.

    qerl-bench plan runs/ effect=1 power=0.8

For each training claim it reads the spread of the primary contrast over seeds, and over bases where there are several,
and prints the cheapest design that finds an effect of so many margins with that power, at the level that Holm's method
may demand of a single claim. What a base adds cannot be read from one base: --between says how much to assume.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median

from qerl_bench.checks import require
from qerl_bench.claims.judge import DIRECTION, Judgement, Result, judge
from qerl_bench.claims.paper import CLAIMS
from qerl_bench.statistics import Mean
from qerl_bench.study.load import load_runs
from qerl_bench.study.script import parser_for

BASES = (1, 4, 6, 8, 12, 16, 24, 32, 48)
SEEDS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Spread:
    """Variances of the difference that a claim is about, in units of its measure, squared."""

    within: float  # of single pairs of runs of one base
    between: float  # of the true effects of bases
    questions: float  # of the mean, from the choice of questions

    def mean(self, bases: int, seeds: int) -> Mean:
        """What a study of so many bases and seeds gives: of one base its seeds are the unit, else bases are."""
        units = seeds if bases == 1 else bases
        variance = self.within / (bases * seeds) + (self.between / bases if bases > 1 else 0.0) + self.questions
        return Mean(0.0, math.sqrt(variance), units - 1, units, self.questions)


@dataclass(frozen=True)
class Design:
    bases: int
    seeds: int
    power: float
    detectable: float


def spread(result: Result, between: float) -> Spread:
    """The spread of a primary contrast; `between`, a standard deviation, stands in where there is a single base."""
    assert result.primary is not None and result.primary.effect is not None
    effect = result.primary.effect
    if effect.bases is None:
        return Spread((effect.whole.error**2 - effect.whole.fixed) * effect.whole.n, between**2, effect.whole.fixed)
    within = fmean((base.error**2 - base.fixed) * base.n for base in effect.bases.by_base) if effect.seeds > 1 else 0.0
    return Spread(within, effect.bases.between**2, effect.whole.fixed)


def designs(found: Spread, effect: float, level: float) -> list[Design]:
    """Every design of at least two units, fewest runs first."""
    tried = [(b, s, found.mean(b, s)) for b, s in product(BASES, SEEDS) if b > 1 or s > 1]
    made = [Design(b, s, mean.power(effect, level), mean.detectable(level)) for b, s, mean in tried]
    return sorted(made, key=lambda design: (design.bases * design.seeds, -design.power))


def plan(judgement: Judgement, margins: float, power: float, between: float, level: float) -> tuple[str, ...]:
    """One row: the spread, the design of several bases with the fewest runs that is enough, and its cost."""
    claim = judgement.claim
    voting = [r for r in judgement.voting if r.primary and r.primary.effect and r.primary.effect.whole.error > 0]
    if not voting:
        return (claim.title, "-", "-", f"no spread to read: {judgement.reason}", "-", "-", "-")
    widest = max((spread(r, between * claim.margin) for r in voting), key=lambda found: found.within + found.between)
    every = designs(widest, margins * claim.margin, level)
    enough = next((design for design in every if design.power >= power and design.bases > 1), None)
    recommended = next(design for design in every if (design.bases, design.seeds) == (16, 2))
    walls = [run.done["wall_s"] for r in voting if r.primary for run in r.primary.stratum.runs if "wall_s" in run.done]
    arms = {repr(sorted(run.facts.items())) for r in voting if r.primary for run in r.primary.stratum.runs}
    runs = enough.bases * enough.seeds * len(arms) if enough else 0
    cost = f"{runs * median(walls) / 3600:.1f} h" if enough and walls else "-"
    several = all(r.primary and r.primary.effect and r.primary.effect.bases for r in voting)
    show = claim.measure.size
    return (
        claim.title,
        show(math.sqrt(widest.within)),
        show(math.sqrt(widest.between)) + ("" if several else " (assumed)"),
        f"{enough.bases} x {enough.seeds}" if enough else f"more than {BASES[-1]} x {SEEDS[-1]}",
        str(runs) if enough else "-",
        cost,
        f"{show(recommended.detectable)} ({recommended.power:.0%})",
    )


def main(arguments: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--effect", type=float, default=1.0, help="to be found, in margins of each claim (default: 1)")
    parser.add_argument("--power", type=float, default=0.8, help="probability of finding it (default: 0.8)")
    between = "standard deviation of effects between bases, in margins, where runs have one base (default: 0.5)"
    parser.add_argument("--between", type=float, default=0.5, help=between)
    options = parser.parse_args(arguments)
    require(options.effect > 0, f"--effect is a size in margins and must be positive, got {options.effect:g}")
    require(0 < options.power < 1, f"--power is a probability between 0 and 1, got {options.power:g}")
    require(options.between >= 0, f"--between must be 0 or more margins, got {options.between:g}")
    claims = [claim for claim in CLAIMS if not claim.measure.gpu and claim.expected != "same"]
    runs = load_runs(options.runs, options.mixed_code)
    scopes = sorted({(run.option("model.name"), run.option("task.name")) for run in runs})
    for model, task in scopes:
        group = [run for run in runs if (run.option("model.name"), run.option("task.name")) == (model, task)]
        level = DIRECTION / 2 / len(claims)
        header = (
            "claim",
            "sd over seeds",
            "sd over bases",
            "bases x seeds",
            "runs",
            "time, one at a time",
            "16 x 2 finds",
        )
        rows = [plan(one, options.effect, options.power, options.between, level) for one in judge(claims, group)]
        print(
            f"{model} on {task}: designs that find {options.effect:g} margins with a probability of {options.power:.0%}"
        )
        print(*(f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *rows)), sep="\n")


if __name__ == "__main__":
    raise SystemExit("usage: qerl-bench plan RUNS ... [effect=1 power=0.8]")
