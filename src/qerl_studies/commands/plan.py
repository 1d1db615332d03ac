"""How many bases and seeds would decide a claim, and what they cost, given the spread of existing runs.

    qerl-bench plan runs/ effect=1 power=0.8
    qerl-bench plan runs/ papers=literature
    qerl-bench plan runs/ papers=mine --config-dir DIR     # DIR/claim/NAME.yaml with family: mine

For each training claim it takes the spread of the primary contrast over seeds, and over bases if there are several, and
prints the design with the fewest runs that finds the effect (in margins) with that power, at the strictest level of
Holm's method. With a single base, --between is the assumed spread between bases; the seeds that one base would need,
for a verdict about that base alone, stand beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median

from qerl_core.checks import require
from qerl_core.statistics import Estimate
from qerl_studies.claims.claim import ClaimResult
from qerl_studies.claims.evaluate import DIRECTION, evaluate_claims
from qerl_studies.claims.registry import QERL, families, with_own_folders
from qerl_studies.design.looks import shown_runs
from qerl_studies.effects.estimate import Effect
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.script import parser_for
from qerl_studies.runs.settings import by_scope
from qerl_studies.tables.markdown import markdown_table

BASES = (1, 4, 6, 8, 12, 16, 24, 32, 48)
SEEDS = (1, 2, 4, 8, 16)
HEADER = (
    "claim",
    "sd over seeds",
    "sd over bases",
    "bases x seeds",
    "one base",
    "runs",
    "time, one at a time",
    "16 x 2 finds",
)


@dataclass(frozen=True)
class Spread:
    """Variances of the effect of a claim, in squared units of its measure."""

    within: float  # between pairs of runs of one base
    between: float  # between the true effects of bases
    questions: float  # of the mean, from the choice of questions

    def estimate(self, bases: int, seeds: int) -> Estimate:
        """The estimate of a study; its units are bases, or seeds if there is one base."""
        units = seeds if bases == 1 else bases
        variance = self.within / (bases * seeds) + (self.between / bases if bases > 1 else 0.0) + self.questions
        return Estimate(0.0, math.sqrt(variance), units, units - 1, math.sqrt(self.questions))


@dataclass(frozen=True)
class StudySize:
    bases: int
    seeds: int
    power: float
    detectable: float


def spread(effect: Effect, between: float) -> Spread:
    """The spread of an effect; `between`, a standard deviation, is used if there is a single base."""
    questions = (effect.whole.stderr_questions or 0.0) ** 2
    if effect.unit == "seed":
        return Spread(_variance_of_pairs(effect.whole), between**2, questions)
    within = fmean(map(_variance_of_pairs, effect.by_base)) if effect.seeds > 1 else 0.0
    return Spread(within, effect.between**2, questions)


def _variance_of_pairs(estimate: Estimate) -> float:
    return (estimate.stderr**2 - (estimate.stderr_questions or 0.0) ** 2) * estimate.n


def designs(variances: Spread, effect: float, level: float) -> list[StudySize]:
    """Every design of at least two units, fewest runs first."""
    estimates = [(b, s, variances.estimate(b, s)) for b, s in product(BASES, SEEDS) if b > 1 or s > 1]
    candidates = [StudySize(b, s, one.power(effect, level), one.detectable(level)) for b, s, one in estimates]
    return sorted(candidates, key=lambda design: (design.bases * design.seeds, -design.power))


def seeds_of_one_base(variances: Spread, effect: float, level: float, power: float) -> int | None:
    """Seeds that find the effect on one base, for a verdict about it alone; None if thousands do not."""
    return variances.estimate(1, 2).repetitions_needed(effect, level, power)


def plan(result: ClaimResult, margins: float, power: float, between: float, level: float) -> tuple[str, ...]:
    """One row: the spread, the design of several bases with the fewest runs that has enough power, and its cost."""
    claim, measure = result.claim, result.claim.measure
    primary = [one.primary for one in result.voting if one.primary and one.primary.effect]
    measured = [(one.stratum, one.effect) for one in primary if one.effect and one.effect.whole.stderr > 0]
    if not measured:
        return (claim.title, "-", "-", f"no spread to read: {result.reason}", "-", "-", "-", "-")
    spreads = [spread(effect, between * measure.margin) for _, effect in measured]
    widest = max(spreads, key=lambda one: one.within + one.between)
    candidates = designs(widest, margins * measure.margin, level)
    enough = next((design for design in candidates if design.power >= power and design.bases > 1), None)
    recommended = next(design for design in candidates if (design.bases, design.seeds) == (16, 2))
    seeds = seeds_of_one_base(widest, margins * measure.margin, level, power)
    used = [run for stratum, _ in measured for run in stratum.runs]
    walls = [run.done["wall_s"] for run in used if "wall_s" in run.done]
    runs = enough.bases * enough.seeds * len({run.setting_items for run in used}) if enough else 0
    assumed = "" if all(effect.unit == "base" for _, effect in measured) else " (assumed)"
    return (
        claim.title,
        measure.size_text(math.sqrt(widest.within)),
        measure.size_text(math.sqrt(widest.between)) + assumed,
        f"{enough.bases} x {enough.seeds}" if enough else f"more than {BASES[-1]} x {SEEDS[-1]}",
        f"{seeds} seeds" if seeds else "no number",
        str(runs) if enough else "-",
        f"{runs * median(walls) / 3600:.1f} h" if enough and walls else "-",
        f"{measure.size_text(recommended.detectable)} ({recommended.power:.0%})",
    )


def main(arguments: list[str] | None = None) -> None:
    words = with_own_folders(arguments)
    parser = parser_for(__doc__)
    parser.add_argument("--effect", type=float, default=1.0, help="to find, in margins of each claim (default: 1)")
    parser.add_argument("--power", type=float, default=0.8, help="probability of finding it (default: 0.8)")
    between = "assumed sd between bases, in margins, if runs have one base (default: 0.5)"
    parser.add_argument("--between", type=float, default=0.5, help=between)
    parser.add_argument("--papers", choices=[*families()], default=QERL, help="whose claims (default: qerl)")
    options = parser.parse_args(words)
    require(options.effect > 0, f"--effect is a size in margins and must be positive, got {options.effect:g}")
    require(0 < options.power < 1, f"--power is a probability between 0 and 1, got {options.power:g}")
    require(options.between >= 0, f"--between must be 0 or more margins, got {options.between:g}")
    claims = [one for one in families()[options.papers] if not one.measure.gpu and one.expected != "same"]
    runs = load_runs(shown_runs(options.runs, options.without), options.mixed_code)
    for scope, group in by_scope(runs).items():
        level = DIRECTION / 2 / len(claims)
        results = evaluate_claims(claims, group)
        rows = [plan(one, options.effect, options.power, options.between, level) for one in results]
        print(f"{scope}: designs that find {options.effect:g} margins with a power of {options.power:.0%}")
        print(markdown_table(HEADER, rows))
