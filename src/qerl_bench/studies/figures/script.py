"""What the scripts that draw share: their command line, the choice of runs, and the files they write."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from matplotlib.figure import Figure

from qerl_bench.checks import require
from qerl_bench.studies.figures.style import STYLES, save, use_style
from qerl_bench.studies.runs.comparable import load_runs
from qerl_bench.studies.runs.load import Run
from qerl_bench.studies.runs.script import parser_for
from qerl_bench.studies.runs.settings import Study
from qerl_bench.studies.tables.paper import add_format


def figure_parser(description: str | None) -> argparse.ArgumentParser:
    """The command line of a script that reads runs and draws."""
    parser = parser_for(description)
    kinds = ("svg", "pdf", "png")
    parser.add_argument(
        "--formats", nargs="+", choices=kinds, help="of the files (default: svg, or pdf with a --style)"
    )
    look = "width and size of text: of these docs (default), a NeurIPS or ICML page, or slides of 16:9"
    parser.add_argument("--style", choices=tuple(STYLES), default="docs", help=look)
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a script that draws; figures have the chosen style from here on."""
    options = parser.parse_args(arguments)
    style = use_style(options.style)
    options.formats = options.formats or list(style.formats)
    return options


def read_study(
    arguments: Sequence[str] | None,
    description: str | None,
    factors: Sequence[str],
    unfinished: bool = False,
    table: bool = False,
) -> tuple[Study, argparse.Namespace]:
    """Parse the command line, read the runs, and select those that differ in `factors` alone.

    Unfinished runs are left out, unless `unfinished`. Their names, and the number of runs selected, go to stderr. With
    `table` the script writes a table too, in the format that --format asks for.
    """
    parser = figure_parser(description)
    if table:
        add_format(parser)
    also = "config keys that may differ too: optim.lr for the methods of the paper, model. for several model sizes"
    parser.add_argument("--also", nargs="+", metavar="KEY", default=[], help=also)
    options = parse(parser, arguments)
    runs = load_runs(options.runs, options.mixed_code, options.without)
    keys = {key for run in runs for key in run.config_items}
    unknown = [key for key in options.also if not any(known.startswith(key) for known in keys)]
    require(
        not unknown,
        f"--also {' '.join(unknown)}: no config key of these runs begins so; it is a key such as optim.lr, or a group "
        "with a dot behind it, such as model.",
    )
    for run in runs:
        if not run.finished:
            effect = "its setting ends at the step that it has reached" if unfinished else "it is left out"
            print(f"{run.name} is not finished: {effect}", file=sys.stderr)
    return select([run for run in runs if run.finished or unfinished], [*factors, *options.also]), options


def select(runs: Sequence[Run], factors: Sequence[str]) -> Study:
    """`Study.select`, which prints how many of the runs it selected to stderr, if not all."""
    study = Study(runs).select(*factors)
    if len(study.runs) < len(runs):
        what = f"the largest set that differs in {', '.join(factors)} alone"
        print(f"compared: {len(study.runs)} of {len(runs)} runs, {what}", file=sys.stderr)
    return study


def write_figure(figure: Figure, options: argparse.Namespace, name: str) -> None:
    """Write NAME.svg, or the formats asked for, and print the paths."""
    print(*save(figure, options.out / name, options.formats), sep="\n")
