"""Error rates of the rule of primary contrasts: two looks, Holm's method over two contrasts, on
planted effects.

    python studies/planting/looks.py --out studies/planting/results      # looks.csv, skew.csv

A study has three arms on twelve units, looked at when eight and when twelve have all arms, or
two arms on four units and one look, as studies of released models have. Runs have a standard
deviation of 1.15 points, and those of a unit correlate. Effects are in margins of a point: of
the second arm minus the first (format), and the last minus the second. Each study is judged in
pairs, which is the rule, and by least squares with an effect for each session. Then the tests
themselves, on effects that are drawn from those of the committed studies with a trap, centred:
they are skew.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from qerl_core.exits import guarded
from qerl_core.seeding import derive
from qerl_studies.design.readings import by_base, final
from qerl_studies.design.sessions import read_study
from qerl_studies.effects.pairs import shared
from qerl_studies.tables.markdown import markdown_table

SPREAD = 1.15  # standard deviation of a run, in margins: 1.0 to 1.3 points in the committed studies
CORRELATIONS = (-0.45, 0.0, 0.5)  # of the arms of a unit; -0.45 and -0.16 were found
EFFECTS = (0.0, -1.0, -2.0, 2.0)
DESIGNS = {  # number of units: look -> level, and the session of each unit
    12: ({8: 0.012, 12: 0.046}, (0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4)),
    4: ({4: 0.05}, (0, 1, 2, 3)),
}
TRAPS = ("shortcut-2026", "shortcut-2026-again", "shortcut-2026-doses")
STUDIES = Path(__file__).resolve().parents[1]
T = tuple[np.ndarray, np.ndarray]  # estimates and their two-sided p-values, (studies,)


def in_pairs(treated: np.ndarray, control: np.ndarray, sessions: Sequence[int]) -> tuple[np.ndarray, np.ndarray, int]:
    """Mean, standard error and degrees of freedom of numbers (studies, units)."""
    gaps = treated - control
    return gaps.mean(1), gaps.std(1, ddof=1) / gaps.shape[1] ** 0.5, gaps.shape[1] - 1


def by_runs(treated: np.ndarray, control: np.ndarray, sessions: Sequence[int]) -> tuple[np.ndarray, np.ndarray, int]:
    """The same by least squares: what effects/estimate.py does for one study, for all at once."""
    units = len(sessions)
    places = np.equal.outer([*sessions, *sessions], sorted({*sessions})).astype(float)
    design = np.column_stack([np.repeat([1.0, 0.0], units), places])
    df = 2 * units - int(np.linalg.matrix_rank(design))
    inverse = np.linalg.pinv(design)
    numbers = np.column_stack([treated, control])
    found = numbers @ inverse.T
    rest = numbers - found @ design.T
    return found[:, 0], ((rest**2).sum(1) / df * (inverse @ inverse.T)[0, 0]) ** 0.5, df


RULES: dict[str, Callable[..., tuple[np.ndarray, np.ndarray, int]]] = {"pairs": in_pairs, "least squares": by_runs}


def planted(effects: Sequence[float], units: int, correlation: float, studies: int, seed: int) -> np.ndarray:
    """Arms, (arms, studies, units): the first without an effect, each of the others with one more than the last."""
    arms = len(effects) + 1
    covariance = SPREAD**2 * ((1 - correlation) * np.eye(arms) + correlation)
    draw = np.random.default_rng(derive(seed, "looks", units, f"{correlation:g}", *(f"{one:g}" for one in effects)))
    runs = draw.multivariate_normal(np.zeros(arms), covariance, size=(studies, units))
    return np.moveaxis(runs + np.cumsum([0.0, *effects]), 2, 0)


def holm(p: np.ndarray) -> np.ndarray:
    """p-values (contrasts, studies), adjusted within each study, for at most two contrasts."""
    if len(p) == 1:
        return p
    low, high = p.min(0), p.max(0)
    smaller = np.minimum(1.0, 2 * low)
    return np.where(p == low, smaller, np.maximum(smaller, high))


def words(arms: np.ndarray, units: int, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """Of each contrast, an arm minus the last, and study: its direction at the first look that has one, and whether the
    last look says that it lies within the margin."""
    looks, sessions = DESIGNS[units]
    pairs = [(arm, arm - 1) for arm in range(1, len(arms))]
    direction = np.zeros((len(pairs), arms.shape[1]), dtype=int)
    within = np.zeros(direction.shape, dtype=bool)
    for count, level in looks.items():
        found = [RULES[rule](arms[a][:, :count], arms[b][:, :count], sessions[:count]) for a, b in pairs]
        p = holm(np.array([2 * stats.t.sf(np.abs(mean / error), df) for mean, error, df in found]))
        for place, (mean, error, df) in enumerate(found):
            direction[place] = np.where((direction[place] == 0) & (p[place] <= level), np.sign(mean), direction[place])
            within[place] = np.abs(mean) + stats.t.ppf(0.975, df) * error < 1.0
    return direction, within


def rows(studies: int, seed: int) -> Iterator[dict[str, object]]:
    """For each design, effects, correlation and rule: shares of words of the last contrast, and of false ones."""
    designs = [(12, pair) for pair in product((0.0, -2.0), EFFECTS)] + [(4, (one,)) for one in EFFECTS]
    for (units, effects), correlation, rule in product(designs, CORRELATIONS, RULES):
        arms = planted(effects, units, correlation, studies, seed)
        direction, within = words(arms, units, rule)
        true = np.array(effects)[:, None]
        false = (direction != 0) & (direction != np.sign(true))
        small = within & (np.abs(true) >= 1.0)
        yield {
            "units": units,
            "format": effects[0] if len(effects) > 1 else None,
            "effect": effects[-1],
            "correlation": correlation,
            "rule": rule,
            "supported": (direction[-1] > 0).mean(),
            "opposite": (direction[-1] < 0).mean(),
            "within": within[-1].mean(),
            "false direction": false[-1].mean(),
            "false within": small[-1].mean(),
            "any false": (false | small).any(0).mean(),
        }


# --- skew effects ----------------------------------------------------------------------------------------------------


def trap_effects() -> np.ndarray:
    """Noise on NVFP4 minus none, points, on each base of the committed studies with a trap."""
    found: list[float] = []
    for name in TRAPS:
        runs = read_study(STUDIES / name).runs
        found += shared(*(by_base(runs, arm, final) for arm in ("nvfp4-noise", "nvfp4"))).tolist()
    return 100 * np.array(found)


def student(values: np.ndarray) -> np.ndarray:
    """Student's t of each study, (studies, units)."""
    return values.mean(1) / (values.std(1, ddof=1) / values.shape[1] ** 0.5)


def johnson(values: np.ndarray) -> np.ndarray:
    """t corrected for skewness (Johnson 1978)."""
    n, mean, variance = values.shape[1], values.mean(1), values.var(1, ddof=1)
    third = ((values - mean[:, None]) ** 3).mean(1)
    return (mean + third / (6 * variance * n) + third * mean**2 / (3 * variance**2)) * (n / variance) ** 0.5


def bootstrap_t(values: np.ndarray, draw: np.random.Generator, count: int = 399) -> tuple[np.ndarray, np.ndarray]:
    """Both tails of Student's t by its own bootstrap, (studies,) each."""
    n = values.shape[1]
    centred, t = values - values.mean(1, keepdims=True), student(values)
    below, above = np.zeros(len(values)), np.zeros(len(values))
    for _ in range(count):
        again = np.take_along_axis(centred, draw.integers(0, n, size=values.shape), axis=1)
        spread = again.std(1, ddof=1)
        drawn = np.where(spread > 0, again.mean(1) / np.where(spread > 0, spread, 1.0) * n**0.5, 0.0)
        below += drawn <= t
        above += drawn >= t
    return (below + 1) / (count + 1), (above + 1) / (count + 1)


def skew_rows(effects: np.ndarray, studies: int, seed: int) -> Iterator[dict[str, object]]:
    """False words of each test, above and below, where the true mean is 0 and units are drawn from these effects."""
    centred = effects - effects.mean()
    for units, level in ((16, 0.05), (32, 0.05), (32, 0.029)):
        draw = np.random.default_rng(derive(seed, "skew", units, f"{level:g}"))
        values = draw.choice(centred, size=(studies, units))
        few, modified = values[: studies // 10], johnson(values)
        tails = {
            "Student's t": (stats.t.cdf(student(values), units - 1), stats.t.sf(student(values), units - 1)),
            "t, corrected for skewness": (stats.t.cdf(modified, units - 1), stats.t.sf(modified, units - 1)),
            "signed ranks": tuple(
                np.asarray(stats.wilcoxon(few, axis=1, alternative=one))[1] for one in ("less", "greater")
            ),
            "bootstrapped t": bootstrap_t(few, draw),
        }
        for name, (below, above) in tails.items():
            false = [float((tail <= level / 2).mean()) for tail in (above, below)]
            found = {"above": false[0], "below": false[1], "any": sum(false)}
            yield {"units": units, "level": level, "test": name} | found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=100_000, help="of each row (default: 100000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for looks.csv and skew.csv")
    options = parser.parse_args(arguments)
    effects = trap_effects()
    tables = {
        "looks": pd.DataFrame(rows(options.studies, options.seed)),
        "skew": pd.DataFrame(skew_rows(effects, options.studies, options.seed)),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        table.to_csv(options.out / f"{name}.csv", index=False, float_format="%.4f")
        print(markdown(table))
    print(f"{len(effects)} effects, skewness {stats.skew(effects):.2f}")


def markdown(table: pd.DataFrame) -> str:
    """Shares in per cent; what is given in a row as it is."""
    given = {"units", "format", "effect", "correlation", "rule", "level", "test"}

    def cell(name: str, value: object) -> str:
        return f"{100 * float(str(value)):.1f} %" if name not in given else "-" if value != value else f"{value}"

    lines = [[cell(str(name), value) for name, value in row.items()] for row in table.to_dict("records")]
    return markdown_table([*map(str, table.columns)], lines)


if __name__ == "__main__":
    guarded(main)
