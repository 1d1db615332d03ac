"""Everything that a study in sessions shows, into its folder results/.

    python analysis/study_report.py studies/worlds-2026

gates.md has the gates over all sessions, claims.md and claims.svg the verdicts, literature.md and
literature.svg those on later papers, if there are any, as of every other family of claims, bases.md
a table by base; curves.svg, arms.svg, exploration.svg and pass_at_k.svg are the figures, and
dose.svg if three arms have noise of one shape in different sizes. Probes with details add probes.md
and probes.svg. specification.csv and specification.svg have the effect behind each verdict under
other choices, pooled too with the other studies of the task in the folder beside. A study with
primary contrasts has primary.md and secondary.md in the place of verdicts on claims. Of many arms
three of the figures are drawn once for each arm that others are compared with. Arms with random
rewards are not in arms.svg, whose axes they would stretch. Runs of several versions of the code are
taken together, since no pair of runs is from two sessions. Where the study has a page, README.md in
its folder or in the one around it, figures are drawn that this page shows, and others named.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, cycle
from pathlib import Path

from matplotlib.figure import Figure

from qerl_studies.claims.claim import ClaimResult
from qerl_studies.claims.evaluate import evaluate_claims
from qerl_studies.claims.registry import QERL, families
from qerl_studies.claims.specification import specifications
from qerl_studies.design.design import Arm, read_design
from qerl_studies.design.gates import gates, override, render
from qerl_studies.design.looks import at_last_look
from qerl_studies.design.sessions import Sessions, read_study
from qerl_studies.figures.curves import ENTROPY, REWARD, paired_curves
from qerl_studies.figures.dose import dose_response
from qerl_studies.figures.effects import PlottedArm, dot_plot
from qerl_studies.figures.exploration import entropy_and_accuracy, pass_at_k_curves
from qerl_studies.figures.forest import all_claims, svg
from qerl_studies.figures.paired import ENTROPY as ENTROPY_MEAN
from qerl_studies.figures.paired import REWARD_MEAN, SAMPLED
from qerl_studies.figures.specification import specification_curve, specification_table
from qerl_studies.figures.style import OTHER_COLORS, color, save
from qerl_studies.report import probe_page
from qerl_studies.report.bases_page import bases
from qerl_studies.report.claims_page import markdown, page_table
from qerl_studies.report.primary import primary_page
from qerl_studies.report.secondary import secondary_page
from qerl_studies.runs.comparable import check_comparable
from qerl_studies.runs.load import Run
from qerl_studies.runs.settings import by_scope

MOST_LINES = 8  # arms in one figure of lines
SIZES = 3  # of noise, from which a figure of dose and response is drawn
MEASURES = [ENTROPY_MEAN, REWARD_MEAN, SAMPLED]
Drawing = Callable[[], str | Figure]  # SVG text, or a figure to save


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="a folder with study.yaml and data/, such as studies/worlds-2026")
    folder = parser.parse_args(arguments).study
    study, out = read_study(folder), folder / "results"
    out.mkdir(exist_ok=True)
    shown, left = shown_on_page(folder), []
    for name, made in contents(study).items():
        file = out / name
        if not isinstance(made, str):
            if shown is not None and file.resolve() not in shown:
                left.append(name)
                continue
            made = made()
        if isinstance(made, str):
            file.write_text(made)
            print(file)
        else:
            print(*save(made, file.with_suffix("")), sep="\n")
    if left:
        print(f"not drawn, since the page of {folder} shows none of them: {', '.join(left)}")


def shown_on_page(folder: Path) -> set[Path] | None:
    """The files of the pictures in README.md of a study's folder, or else of the one around it; None without either."""
    here = folder.resolve()
    page = next((file for place in (here, here.parent) if (file := place / "README.md").is_file()), None)
    return page and pictures_on(page)


def pictures_on(page: Path) -> set[Path]:
    """The files of the pictures that a page in Markdown shows."""
    return {(page.parent / place).resolve() for place in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text())}


def contents(study: Sessions) -> dict[str, str | Drawing]:
    """The files of the report by name: pages and tables as text, pictures as what draws them.

    Of a study with primary contrasts these alone have verdicts, and before the first look there is only their page.
    """
    if study.design.primary is None:
        return _measured(study) | _verdicts(study) | figures(study)
    primary, seen = {"primary.md": primary_page(study)}, at_last_look(study)
    if seen is None:
        return {**primary}
    pairs = [(arm.name, control.name) for arm in seen.arms if (control := control_of(seen, arm))]
    return primary | {"secondary.md": secondary_page(seen, pairs)} | _measured(seen) | figures(seen)


def _measured(study: Sessions) -> dict[str, str]:
    """Gates, the table by base, and probes if they have details."""
    results = gates(study.design, [*study.probes.values()], study.runs)
    told = [
        f"Bases of {one}: {study.otherwise[one]}."
        for one in sorted({run.path.parent.name for run in study.runs.values()})
        if one in study.otherwise
    ]
    gates_page = "\n\n".join([render(override(results, study.overridden)), *told])
    found = {
        "gates.md": gates_page + "\n",
        "bases.md": bases(study, {arm.name: control for arm in study.arms if (control := control_of(study, arm))}),
    }
    page = probe_page.markdown([*study.probes.values()])
    return found | ({"probes.md": page} if page else {})


def _verdicts(study: Sessions) -> dict[str, str | Drawing]:
    """The verdicts of each family of claims, and the effects behind them under other choices."""
    scope, runs, verdicts, later = judged(study)
    found: dict[str, str | Drawing] = {"claims.md": markdown({scope: verdicts}, runs)}
    found["claims.svg"] = lambda: svg(all_claims(verdicts, scope))
    for family, of_family in later.items():
        if any(one.state.tested for one in of_family):
            found[f"{family}.md"] = page_table(of_family) + "\n"
            found[f"{family}.svg"] = lambda of_family=of_family: svg(all_claims(of_family, scope))
    if ways := specifications([*verdicts, *chain(*later.values())], runs, [_other(one) for one in beside(study)]):
        found["specification.csv"] = specification_table(ways).to_csv(index=False, float_format="%.6f")
        found["specification.svg"] = lambda: svg(specification_curve(ways))
    return found


@lru_cache
def judged(study: Sessions) -> tuple[str, list[Run], list[ClaimResult], dict[str, list[ClaimResult]]]:
    """Model and task of a study, its runs, and the verdicts on QeRL's claims and on those of each other family."""
    runs = [*study.runs.values()]
    check_comparable(runs, mixed_code=True)
    ((scope, runs),) = by_scope(runs).items()  # all arms have one model and one task
    later = {family: evaluate_claims(claims, runs) for family, claims in families().items()}
    return scope, runs, later.pop(QERL), later


@lru_cache
def read_once(folder: Path) -> Sessions:
    """The study in a folder that nothing changes meanwhile; read once in a process."""
    return read_study(folder)


def _other(folder: Path) -> tuple[list[ClaimResult], list[Run]]:
    """The verdicts and runs of a study that others are pooled with."""
    _, runs, verdicts, later = judged(read_once(folder))
    return [*verdicts, *chain(*later.values())], runs


def beside(study: Sessions) -> list[Path]:
    """The folders of other studies of the same task that lie beside one, have runs, and are judged by claims."""
    here = study.design.path.parent
    task = study.design.option(study.design.reference, "task")["name"]
    folders = sorted({file.parents[2] for file in here.parent.glob("*/data/*/settings.json*")} - {here})
    designs = [read_design(folder / "study.yaml") for folder in folders if (folder / "study.yaml").is_file()]
    alike = [one for one in designs if one.option(one.reference, "task")["name"] == task]
    return [one.path.parent for one in alike if one.primary is None]


def figures(study: Sessions) -> dict[str, Drawing]:
    """The figures of the report, by file. Arms too many for one figure of lines have one for each of their controls.

    Supervised arms sample nothing in training: they have no entropy or reward, so pass@k alone shows them.
    """
    sampling = [arm for arm in study.arms if study.design.option(arm, "algo")["name"] != "sft"]
    graded = [arm for arm in sampling if study.design.option(arm, "reward")["name"] == "task"]
    drawn = {"arms": partial(dot_plot, [*plotted(study, graded, pairs=True).values()], MEASURES)}
    doses = [arm for arm in sampling if study.design.option(arm, "aqn")["name"] in ("exp", "matched")]
    if len(doses) >= SIZES and len({control.name for arm in doses if (control := control_of(study, arm))}) == 1:
        drawn["dose"] = partial(dose_response, [*plotted(study, doses).values()])
    for ending, (control, *arms) in by_figure(study).items():
        levels, pairs = (plotted(study, [control, *arms], pairs=labels) for labels in (False, True))
        levels[control.name] = level = replace(levels[control.name], control=())
        drawn[f"pass_at_k{ending}"] = partial(pass_at_k_curves, [*levels.values()])
        rewarded = [arm.name for arm in arms if arm in sampling]
        treated = [arm.name for arm in arms if arm in sampling and not arm.control]
        if rewarded:
            drawn[f"exploration{ending}"] = partial(entropy_and_accuracy, study, [pairs[name] for name in rewarded])
            lines = [level, *(levels[name] for name in treated)]
            drawn[f"curves{ending}"] = partial(
                paired_curves, lines, [pairs[name] for name in treated], [REWARD, ENTROPY]
            )
    return {f"{name}.svg": draw for name, draw in (drawn | probe_page.figures([*study.probes.values()])).items()}


def by_figure(study: Sessions) -> dict[str, list[Arm]]:
    """The arms of each figure of lines, what they are compared with first, by the ending of the figure's name."""
    if len(study.arms) <= MOST_LINES:
        return {"": study.arms}
    found: dict[str, list[Arm]] = {}
    for arm in study.arms:
        if control := control_of(study, arm):
            found.setdefault(f"_{control.name}", [control]).append(arm)
    return found


def plotted(study: Sessions, arms: Sequence[Arm], pairs: bool = False) -> dict[str, PlottedArm]:
    """The arms as figures show them, by name, on the bases of their controls, which labels name too with `pairs`."""
    others = cycle(OTHER_COLORS)
    shown = {}
    for arm in arms:
        control = control_of(study, arm)
        plain = len(arm.words) == 1 and study.design.format_of(arm) == arm.name
        shade = color(arm.name) if plain else next(others)
        label = f"{arm.name} − {control.name}" if pairs and control else arm.name
        runs, controls = study.pairs(arm.name, control.name) if control else (study.of_arm(arm.name), ())
        shown[arm.name] = PlottedArm(label, runs, controls, shade)
    return shown


def control_of(study: Sessions, arm: Arm) -> Arm | None:
    """The arm that `arm` is compared with, as its design says; None for the reference."""
    if arm is study.design.reference:
        return None
    quiet = [word for word in arm.words if not word.startswith("aqn=")]
    itself = next((one for one in study.arms if one is not arm and one.words == quiet), study.design.reference)
    return next((one for one in study.arms if one.name == arm.compared_with), itself)
