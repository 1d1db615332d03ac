"""The effect of an arm on held-out accuracy over the bases of several studies that have it.

    cd studies
    python shortcut-2026-doses/pooled.py shortcut-2026-again shortcut-2026-doses \\
        --arm nvfp4-noise --control nvfp4 --confidence 0.971

Prints the mean over bases, in points, of each study and of all, with Student's t. A base counts
once, whatever number of seeds it has. Whether studies may be pooled is for their protocols to say.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from qerl_core.checks import require
from qerl_core.exits import guarded
from qerl_core.statistics import mean_ci, t_quantile
from qerl_studies.design.design import Arm
from qerl_studies.design.readings import by_base, final
from qerl_studies.design.sessions import Sessions, read_study
from qerl_studies.effects.pairs import shared


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", type=Path, nargs="+", help="folders with study.yaml and data/")
    parser.add_argument("--arm", required=True, help="an arm that all of them have")
    parser.add_argument("--control", required=True, help="what it is compared with")
    parser.add_argument("--confidence", type=float, default=0.95, help="of the interval over all (default: 0.95)")
    options = parser.parse_args(arguments)
    require(0 < options.confidence < 1, f"--confidence must be between 0 and 1, got {options.confidence:g}")
    pairs = [
        (study, arm_of(study, options.arm), arm_of(study, options.control))
        for study in map(read_study, options.studies)
    ]
    check_poolable(pairs)
    found = [effects(*pair) for pair in pairs]
    for folder, values in zip(options.studies, found, strict=True):
        print(row(folder.name, values, 0.95))
    if len(found) > 1:
        print(row("all", [value for values in found for value in values], options.confidence))


def arm_of(study: Sessions, name: str) -> Arm:
    found = next((arm for arm in study.arms if arm.name == name), None)
    have = ", ".join(arm.name for arm in study.arms)
    require(found is not None, f"{study.design.path} has no runs of an arm {name}: it has {have}")
    assert found is not None
    return found


def check_poolable(pairs: Sequence[tuple[Sessions, Arm, Arm]]) -> None:
    """Raise ConfigError unless all studies have the same two arms, with noise of one dose, on bases of their own."""
    for same in ([(study, arm) for study, arm, _ in pairs], [(study, control) for study, _, control in pairs]):
        kinds = {str(study.design.path): _kind(study, arm) for study, arm in same}
        require(
            len({*kinds.values()}) == 1,
            f"the arm {same[0][1].name} is not the same in all studies, so they cannot be pooled: {kinds}",
        )
    bases = [base for study, *_ in pairs for base in study.probes]
    twice = sorted({base for base in bases if bases.count(base) > 1})
    require(not twice, f"several of these studies have the bases {twice}, and a base counts once: leave a study out")


def _kind(study: Sessions, arm: Arm) -> str:
    """What decides the runs of an arm, in words, but for base and seed."""
    words = " ".join([*study.design.common, *arm.words])
    return f"{words}, {study.design.dose}" if arm.dosed else words


def effects(study: Sessions, arm: Arm, control: Arm) -> list[float]:
    """Points of held-out accuracy that `arm` has more than `control`, on each base that has both.

    Raises ConfigError if fewer than two have.
    """
    found = [100 * gap for gap in shared(*(by_base(study.runs, one.name, final) for one in (arm, control)))]
    require(len(found) > 1, f"{study.design.path} has both arms on {len(found)} bases: an interval needs two")
    return found


def row(name: str, values: Sequence[float], confidence: float) -> str:
    """Mean, interval and two-sided p-value of numbers, one for each base."""
    mean = mean_ci(values)
    reach = t_quantile((1 + confidence) / 2, mean.df) * mean.stderr
    return (
        f"{name}: {mean.value:+.1f} points, {100 * confidence:g} % [{mean.value - reach:+.1f}, "
        f"{mean.value + reach:+.1f}], {mean.n} bases, p = {mean.p_outside(0.0):.2g}"
    )


if __name__ == "__main__":
    guarded(main)
