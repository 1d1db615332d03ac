"""Draw one figure of runs, or write one table, by its name.

    qerl-bench figure reward runs/ out=figures/
    qerl-bench figure accuracy runs/ also=optim.lr style=neurips

Writes NAME.svg; those marked + write a table, NAME.csv. `qerl-bench figure NAME --help` has the options of one.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable

from qerl_core.checks import ConfigError, require
from qerl_core.exits import guarded
from qerl_core.options.suggestions import did_you_mean
from qerl_core.process.arguments import printable
from qerl_studies.figures.named import FIGURES
from qerl_studies.figures.read import Differing
from qerl_studies.figures.style import STYLES, save, use_style
from qerl_studies.runs.script import parser_for
from qerl_studies.tables.paper import add_format, write_table


def main(arguments: list[str] | None = None) -> None:
    name, *words = (sys.argv[1:] if arguments is None else arguments) or [""]
    if name in ("-h", "--help"):
        names = "\n".join(f"    {one:20}{'+' if each.table else ' '} {each.shows}" for one, each in FIGURES.items())
        parser_of("NAME", f"{__doc__}\n{names}").parse_args([name])
    near = did_you_mean(difflib.get_close_matches(name, FIGURES, n=1))
    require(name in FIGURES, f"there is no figure {name or 'without a name'}.{near} All: qerl-bench figure --help")
    read, draw, tabulate = FIGURES[name][1:]
    parser = parser_of(name, f"{FIGURES[name].shows[0].upper()}{FIGURES[name].shows[1:]}.")
    also = "config keys that may differ too: optim.lr for the methods of the paper, model. for several model sizes"
    if isinstance(read, Differing):
        parser.add_argument("--also", nargs="+", metavar="KEY", default=[], help=also)
    if tabulate:
        add_format(parser)
    options = parser.parse_args(words)
    style = use_style(options.style)
    found = read(options)
    if draw:
        print(*save(draw(found), options.out / name, options.formats or style.formats), sep="\n")
    if tabulate:
        try:
            table = tabulate(found)
        except ConfigError as reason:
            require(draw is not None, str(reason))
            print(printable(f"no table: {reason}"), file=sys.stderr)
        else:
            print(write_table(table, options.format, options.out), table.shown.to_string(index=False), sep="\n")


def as_script(module: str, name: str) -> Callable[[list[str] | None], None]:
    """The `main` of a script that draws this figure, which runs now if `module` is the program."""

    def drawn(arguments: list[str] | None = None) -> None:
        main([name, *(sys.argv[1:] if arguments is None else arguments)])

    if module == "__main__":
        guarded(drawn)
    return drawn


def parser_of(name: str, about: str) -> argparse.ArgumentParser:
    """The options that all figures take."""
    parser = parser_for(about)
    parser.prog = f"qerl-bench figure {name}"
    kinds = "of the files (default: svg, or pdf with a style)"
    parser.add_argument("--formats", nargs="+", choices=("svg", "pdf", "png"), help=kinds)
    look = "width and size of text: of these docs (default), a NeurIPS or ICML page, or slides of 16:9"
    parser.add_argument("--style", choices=tuple(STYLES), default="docs", help=look)
    return parser
