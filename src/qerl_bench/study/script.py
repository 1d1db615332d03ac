"""What the scripts in analysis/ share: their command line, the choice of runs, and how they say what is wrong."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from qerl_bench.arguments import KeyValueParser
from qerl_bench.checks import ConfigError
from qerl_bench.figures.style import save
from qerl_bench.study.load import Run, load_runs
from qerl_bench.study.select import varying


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """The command line of a script that reads runs and writes files."""
    parser = KeyValueParser(description)
    parser.add_argument("runs", nargs="+", type=Path, help="folders that hold runs, or single runs")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder to write to (default: figures)")
    parser.add_argument("--mixed-code", action="store_true", help="accept runs of different versions of the code")
    return parser


def figure_parser(description: str | None) -> argparse.ArgumentParser:
    """The same for a script that draws."""
    parser = parser_for(description)
    kinds = ("svg", "pdf", "png")
    parser.add_argument("--formats", nargs="+", choices=kinds, default=["svg"], help="of the files (default: svg)")
    return parser


def draw_figure(
    arguments: list[str] | None,
    description: str | None,
    name: str,
    factors: Sequence[str],
    draw: Callable[[list[Run]], Figure],
    unfinished: bool = False,
) -> None:
    """Read the runs, choose those that differ in `factors` alone, draw them and write NAME.svg.

    Runs that are not finished are left out, unless `unfinished`. Says on stderr which these are, and how
    many of the others are drawn.
    """
    parser = figure_parser(description)
    also = "config keys that may differ too: optim.lr for the methods of the paper, model. for sizes side by side"
    parser.add_argument("--also", nargs="+", metavar="KEY", default=[], help=also)
    options = parser.parse_args(arguments)
    factors = [*factors, *options.also]
    runs = load_runs(options.runs, options.mixed_code)
    for run in runs:
        if not run.finished:
            ends = "its setting ends at the step that it has reached" if unfinished else "it is left out"
            print(f"{run.name} is not finished: {ends}", file=sys.stderr)
    chosen = comparable([run for run in runs if run.finished or unfinished], factors)
    print(*save(draw(chosen), options.out / name, options.formats), sep="\n")


def comparable(runs: Sequence[Run], factors: Sequence[str]) -> list[Run]:
    """Those of `runs` that `varying` chooses; says on stderr how many these are, if not all."""
    chosen = varying(runs, *factors)
    if len(chosen) < len(runs):
        what = f"{len(chosen)} of {len(runs)} runs, the largest set that differs in {', '.join(factors)} alone"
        print(f"compared: {what}", file=sys.stderr)
    return chosen


def guarded(main: Callable[[], None]) -> None:
    """Run a script's main; a warning is one line, bad input is one message and exit code 2."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_place, **_more: print(message, file=sys.stderr)
        try:
            main()
        except ConfigError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
